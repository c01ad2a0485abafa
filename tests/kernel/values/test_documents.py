from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from google.protobuf.struct_pb2 import Struct

from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values.documents import DEPTH_LIMIT, check_document


def nested(levels: int, *, lists: bool = False) -> Any:
    value: Any = "end"
    for _ in range(levels):
        value = [value] if lists else {"a": value}
    return value


@pytest.mark.parametrize(
    ("document", "place", "reason"),
    [
        (nested(DEPTH_LIMIT), "args.a.a", "nested deeper than 31 levels"),
        (nested(900, lists=True), "args[0][0]", "nested deeper than 31 levels"),
        ({"a": [1, float("nan")]}, "args.a[1]", "is nan"),
        ({"a": float("-inf")}, "args.a", "is -inf"),
        ({"a": {"b": 10**400}}, "args.a.b", "is not between"),
        ({"a": -(2**63) - 1}, "args.a", "is not between"),
        ({"a": "\ud800"}, "args.a", "surrogate"),
        ({"\udfff": 1}, "args", "is no text"),
        ({1: 1}, "args", "is no text"),
        ({"a": b"raw"}, "args.a", "is a bytes"),
    ],
)
def test_what_some_encoding_could_not_carry_is_refused_with_its_place(
    document: Any, place: str, reason: str
) -> None:
    with pytest.raises(InvalidArgument, match=reason) as refused:
        check_document(document, field="args", within=1)
    assert refused.value.field is not None
    assert refused.value.field.startswith(place)
    assert len(refused.value.field) < 200, "an answer does not repeat a deep document"


@pytest.mark.parametrize("lists", [False, True])
def test_what_is_taken_every_encoding_carries(lists: bool) -> None:
    document = {"a": nested(DEPTH_LIMIT - 2, lists=lists), "b": [2**64 - 1, -(2**63), 1e308, "\0ä\U0001f600"]}
    check_document(document, field="args", within=1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(document)) == document
    assert json.loads(msgspec.json.encode(document)) == document
    sealed = Struct()
    sealed.update({"tool_name": "t", "args": document})
    call = pb.InvokeTool(seal_envelope=pb.SealEnvelope(payload=sealed))
    assert pb.EdgeCommand.FromString(pb.EdgeCommand(invoke_tool=call).SerializeToString()).invoke_tool == call
