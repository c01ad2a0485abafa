"""Both dialects' bytes, told apart and read; crafted look-alikes included."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp
from google.protobuf.wrappers_pb2 import BytesValue, Int32Value, StringValue
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.domains.edge.kinds import NodeResources, PayloadDialect
from fleetplane.domains.edge.wire import envelope
from fleetplane.domains.edge.wire import messages as wire
from fleetplane.domains.edge.wire.envelope import EventKind
from fleetplane.domains.edge.wire.messages import OutputChannel, ResultOutcome
from fleetplane.domains.edge.wire.protobuf_types import mapping_of
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.fleetplane.edge.v1 import legacy_pb2, tolerant_pb2
from fleetplane.kernel.errors import InvalidArgument

NODE = "11111111-2222-4333-8444-555555555555"
STREAM = "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee"
COMMAND = "cccccccc-1111-4222-8333-dddddddddddd"
Legacy = legacy_pb2.LegacyEdgeResult
Result = pb.EdgeResult


def packed(message: Message) -> AnyMessage:
    made = AnyMessage()
    made.Pack(message)
    return made


def document(**values: Any) -> Struct:
    made = Struct()
    made.update(values)
    return made


# Results.

RESULTS: dict[str, tuple[Message, PayloadDialect, dict[str, Any]]] = {
    "legacy success with output": (
        Legacy(ok=True, stdout=b"Linux\n", stderr=b"warn\n"),
        PayloadDialect.LEGACY,
        {"outcome": ResultOutcome.OK, "exit_code": 0, "stdout": b"Linux\n", "stderr": b"warn\n"},
    ),
    "legacy success without output": (
        Legacy(ok=True),
        PayloadDialect.LEGACY,
        {"outcome": ResultOutcome.OK, "exit_code": 0, "stdout": b""},
    ),
    "legacy success with a document": (
        Legacy(ok=True, structured_result=document(a=1)),
        PayloadDialect.LEGACY,
        {"outcome": ResultOutcome.OK, "structured": {"a": 1.0}},
    ),
    "legacy nonzero exit": (
        Legacy(exit_code=3, stdout=b"x", error_kind="nonzero_exit", error_message="exit 3"),
        PayloadDialect.LEGACY,
        {"outcome": ResultOutcome.ERROR, "exit_code": 3, "stdout": b"x", "code": "nonzero_exit"},
    ),
    "legacy end by a signal": (
        Legacy(exit_code=-1, error_kind="nonzero_exit"),
        PayloadDialect.LEGACY,
        {"outcome": ResultOutcome.ERROR, "exit_code": -1},
    ),
    "legacy timeout with output": (
        Legacy(stdout=b"begun", error_kind="timeout", error_message="late"),
        PayloadDialect.LEGACY,
        {"outcome": ResultOutcome.TIMED_OUT, "exit_code": None, "stdout": b"begun", "code": "timeout"},
    ),
    "legacy cancelled": (
        Legacy(error_kind="cancelled"),
        PayloadDialect.LEGACY,
        {"outcome": ResultOutcome.CANCELLED, "exit_code": None, "code": "cancelled"},
    ),
    "legacy policy violation": (
        Legacy(error_kind="policy_violation", error_message="ToolNotAllowed"),
        PayloadDialect.LEGACY,
        {"outcome": ResultOutcome.ERROR, "code": "policy_violation", "message": "ToolNotAllowed"},
    ),
    "documented ok, empty": (
        Result(ok=Result.Ok()),
        PayloadDialect.DOCUMENTED,
        {"outcome": ResultOutcome.OK, "exit_code": 0},
    ),
    "documented ok with output": (
        Result(
            ok=Result.Ok(
                payload=packed(
                    tolerant_pb2.ToolOutput(stdout=b"\xff", stderr=b"e", structured_json=b'{"k":1}')
                ),
                duration=Duration(seconds=1, nanos=500_000_000),
            )
        ),
        PayloadDialect.DOCUMENTED,
        {
            "outcome": ResultOutcome.OK,
            "stdout": b"\xff",
            "stderr": b"e",
            "structured": {"k": 1},
            "duration_seconds": 1.5,
        },
    ),
    "documented ok with text": (
        Result(ok=Result.Ok(payload=packed(StringValue(value="hé")))),
        PayloadDialect.DOCUMENTED,
        {"stdout": "hé".encode()},
    ),
    "documented ok with bytes": (
        Result(ok=Result.Ok(payload=packed(BytesValue(value=b"\0\1")))),
        PayloadDialect.DOCUMENTED,
        {"stdout": b"\0\1"},
    ),
    "documented ok with a document": (
        Result(ok=Result.Ok(payload=packed(document(a="b")))),
        PayloadDialect.DOCUMENTED,
        {"structured": {"a": "b"}},
    ),
    "documented ok of an unknown type": (
        Result(ok=Result.Ok(payload=packed(Int32Value(value=5)))),
        PayloadDialect.DOCUMENTED,
        {"structured": {"@type": "type.googleapis.com/google.protobuf.Int32Value"}},
    ),
    "documented error": (
        Result(err=Result.Err(code="tool_not_found", message="no such tool")),
        PayloadDialect.DOCUMENTED,
        {
            "outcome": ResultOutcome.ERROR,
            "code": "tool_not_found",
            "message": "no such tool",
            "exit_code": None,
        },
    ),
    "documented error with exit code and output": (
        Result(
            err=Result.Err(
                code="nonzero_exit", exit_code=2, payload=packed(tolerant_pb2.ToolOutput(stderr=b"bad"))
            )
        ),
        PayloadDialect.DOCUMENTED,
        {"outcome": ResultOutcome.ERROR, "exit_code": 2, "stderr": b"bad"},
    ),
    "documented timeout": (
        Result(timed_out=Result.TimedOut(deadline=Duration(seconds=60))),
        PayloadDialect.DOCUMENTED,
        {"outcome": ResultOutcome.TIMED_OUT, "code": "timeout", "message": "no end within 60 s"},
    ),
    "documented timeout, empty": (
        Result(timed_out=Result.TimedOut()),
        PayloadDialect.DOCUMENTED,
        {"outcome": ResultOutcome.TIMED_OUT},
    ),
    "documented cancelled": (
        Result(cancelled=Result.Cancelled(reason="operator")),
        PayloadDialect.DOCUMENTED,
        {"outcome": ResultOutcome.CANCELLED, "message": "operator"},
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_read_in_the_dialect_it_was_written_in(name: str) -> None:
    message, dialect, expected = RESULTS[name]
    found, spoken = wire.decode_result(message.SerializeToString())
    assert spoken is dialect
    assert {key: getattr(found, key) for key in expected} == expected


def test_a_reader_of_the_contract_alone_would_fail_on_daemons_in_the_field() -> None:
    with pytest.raises(DecodeError):
        Result.FromString(Legacy(ok=True, stdout=b"Linux\n").SerializeToString())
    assert Result.FromString(Legacy(ok=True).SerializeToString()).WhichOneof("outcome") is None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x80",
        b"\x0a\x05ab",
        b"\x82\x01\x00",  # only field 16
        b"\x3a\x01\xff",  # text that is none
        Legacy(ok=True, structured_result=document(n=float("nan"))).SerializeToString(),
        Result(
            ok=Result.Ok(payload=packed(tolerant_pb2.ToolOutput(structured_json=b"{")))
        ).SerializeToString(),
    ],
)
def test_a_result_without_an_outcome_or_sense_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidArgument) as refused:
        wire.decode_result(raw)
    assert refused.value.field == "result"


@pytest.mark.parametrize("levels", [65, 100_000])
def test_structured_output_that_is_nested_without_end_is_refused(levels: int) -> None:
    def result(depth: int) -> bytes:
        payload = packed(tolerant_pb2.ToolOutput(structured_json=b"[" * depth + b"]" * depth))
        return Result(ok=Result.Ok(payload=payload)).SerializeToString()

    with pytest.raises(InvalidArgument, match="deeper than 64 levels"):
        wire.decode_result(result(levels))
    assert wire.decode_result(result(64))[0].structured is not None


@given(st.binary(max_size=80))
def test_reading_any_bytes_as_a_result_ends_in_a_result_or_a_clear_refusal(raw: bytes) -> None:
    with contextlib.suppress(InvalidArgument):
        assert wire.decode_result(raw)[0].outcome in ResultOutcome


# Progress.


def chunk(**kind: Any) -> bytes:
    return pb.Chunk(**kind).SerializeToString()


LOOK_ALIKES = [
    chunk(stdout=b"abc"),
    chunk(stderr=b"abc"),
    chunk(status=pb.StatusUpdate(state="running")),
    b"\n\x00",
    b"\n\x03abc",
    b"\x12\x00",
    b"\x1a\x00",
]
TEXTS = [b"", b"\n", b"Linux host 6.1\n", b"\xff\xfe\x00", b"\r\n", b"a" * 70_000, "é\n".encode()]


def legacy_progress(
    data: bytes, *, sequence: int = 0, stderr: bool = False, canonical: bool = True
) -> tolerant_pb2.CommandProgress:
    inner = envelope.short_progress_inner(COMMAND, sequence=sequence, stderr=stderr, chunk=data)
    payload = envelope.encode(EventKind.COMMAND_PROGRESS, 1, NODE, STREAM, inner) if canonical else b"mine"
    made = legacy_pb2.LegacyCommandProgress(
        envelope=pb.SealNodeEnvelope(payload=payload),
        command_id=COMMAND,
        chunk=data,
        sequence=sequence,
        stderr=stderr,
    )
    return tolerant_pb2.CommandProgress.FromString(made.SerializeToString())


def documented_progress(raw: bytes, payload: bytes = b"mine") -> tolerant_pb2.CommandProgress:
    made = pb.CommandProgress(
        envelope=pb.SealNodeEnvelope(payload=payload), command_id=COMMAND, chunk=pb.Chunk.FromString(raw)
    )
    return tolerant_pb2.CommandProgress.FromString(made.SerializeToString())


@pytest.mark.parametrize("data", [*TEXTS, *LOOK_ALIKES])
@pytest.mark.parametrize(("sequence", "stderr"), [(0, False), (0, True), (5, False), (5, True)])
def test_output_of_daemons_in_the_field_is_taken_as_it_is_even_where_it_looks_like_a_message(
    data: bytes, sequence: int, stderr: bool
) -> None:
    found, dialect = wire.decode_progress(legacy_progress(data, sequence=sequence, stderr=stderr))
    assert dialect is PayloadDialect.LEGACY
    assert found == wire.CommandProgress(
        stream=OutputChannel.STDERR if stderr else OutputChannel.STDOUT, data=data, sequence=sequence
    )


@pytest.mark.parametrize("data", TEXTS)
def test_plain_output_is_recognised_without_any_further_sign(data: bytes) -> None:
    found, dialect = wire.decode_progress(legacy_progress(data, canonical=False))
    assert (dialect, found.data) == (PayloadDialect.LEGACY, data)


DOCUMENTED: list[tuple[dict[str, Any], wire.CommandProgress]] = [
    ({"stdout": b"abc"}, wire.CommandProgress(stream=OutputChannel.STDOUT, data=b"abc")),
    ({"stdout": b""}, wire.CommandProgress(stream=OutputChannel.STDOUT)),
    (
        {"stderr": b"\xff\n", "sequence": 4},
        wire.CommandProgress(stream=OutputChannel.STDERR, data=b"\xff\n", sequence=4),
    ),
    (
        {"status": pb.StatusUpdate(state="running", message="half", percent=50.0)},
        wire.CommandProgress(
            stream=OutputChannel.STATUS,
            status=wire.ReportedStatus(state="running", message="half", percent=50.0),
        ),
    ),
    (
        {"status": pb.StatusUpdate()},
        wire.CommandProgress(stream=OutputChannel.STATUS, status=wire.ReportedStatus()),
    ),
]


@pytest.mark.parametrize(("kind", "expected"), DOCUMENTED)
@pytest.mark.parametrize("form", ["free", "digest", "foreign"])
def test_documented_chunks_are_read_whatever_their_daemon_signed(
    kind: dict[str, Any], expected: wire.CommandProgress, form: str
) -> None:
    raw = chunk(**kind)
    inner = envelope.progress_inner(COMMAND, raw) if form == "digest" else b"other"
    payload = (
        b"mine" if form == "free" else envelope.encode(EventKind.COMMAND_PROGRESS, 1, NODE, STREAM, inner)
    )
    assert wire.decode_progress(documented_progress(raw, payload)) == (expected, PayloadDialect.DOCUMENTED)


# Heartbeats and capabilities.


@pytest.mark.parametrize(
    "message",
    [
        legacy_pb2.LegacyHeartbeat(envelope=pb.SealNodeEnvelope(payload=b"p")),
        legacy_pb2.LegacyHeartbeat(envelope=pb.SealNodeEnvelope(payload=b"p"), active_invocations=3),
        pb.Heartbeat(envelope=pb.SealNodeEnvelope(payload=b"p"), sent_at=Timestamp(seconds=5)),
    ],
)
def test_a_heartbeat_may_have_a_time_a_count_or_nothing(message: Message) -> None:
    found = tolerant_pb2.Heartbeat.FromString(message.SerializeToString())
    assert found.envelope.payload == b"p"


def test_tags_that_a_daemon_sends_are_ignored() -> None:
    said = legacy_pb2.LegacyCapabilities(
        os="linux",
        arch="x86_64",
        local_tools=["git"],
        mount_points=["/"],
        custom_labels={"rack": "7"},
        tags=["production"],
        node_capabilities=pb.NodeCapabilities(cpu_cores=8, supported_runtimes=["wasm"]),
    )
    found = wire.capabilities_of(wire.decode_capabilities(said.SerializeToString()))
    assert found.labels == {"rack": "7"}
    assert found.local_tools == ("git",)
    assert found.node == NodeResources(cpu_cores=8, runtimes=("wasm",))
    assert "production" not in repr(found)


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (pb.EdgeCapabilities(local_tools=["t"] * 257), "local_tools"),
        (pb.EdgeCapabilities(os="x" * 1025), "os"),
        (pb.EdgeCapabilities(custom_labels={"k": "v" * 1025}), "custom_labels"),
    ],
)
def test_capabilities_beyond_their_bounds_are_refused_by_name(said: pb.EdgeCapabilities, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        wire.capabilities_of(said)
    assert refused.value.field == field


# Towards a daemon.


def test_a_pushed_configuration_decodes_as_each_dialect_expects_it() -> None:
    body = json.dumps({"spec": {"x": [1, "two", None]}}).encode()
    documented = wire.push_config(PayloadDialect.DOCUMENTED, version="v1", document=body).SerializeToString()
    assert pb.EdgeCommand.FromString(documented).push_config.config_delta == body
    fielded = wire.push_config(PayloadDialect.LEGACY, version="v1", document=body).SerializeToString()
    delta = legacy_pb2.LegacyEdgeCommand.FromString(fielded).push_config.merged_config_delta
    assert mapping_of(delta) == {"spec": {"x": [1.0, "two", None]}}
    with pytest.raises(DecodeError):  # why the two must differ
        legacy_pb2.LegacyEdgeCommand.FromString(documented)


def test_the_answer_to_a_rotation_reads_right_in_each_dialect() -> None:
    said: dict[str, Any] = {
        "token": "t",
        "issued_at_ns": 10**18,
        "expires_at_ns": 10**18 + 3600 * 10**9,
        "overlap_seconds": 60.0,
    }
    ours = wire.rotation_response(PayloadDialect.DOCUMENTED, **said)
    assert (ours.issued_at.seconds, ours.expires_at.seconds) == (10**9, 10**9 + 3600)
    assert ours.overlap_window.seconds == 60
    raw = wire.rotation_response(PayloadDialect.LEGACY, **said).SerializeToString()
    theirs = legacy_pb2.LegacyRotateEdgeKeyResponse.FromString(raw)
    assert (theirs.expires_at.seconds, theirs.overlap_until.seconds) == (10**9 + 3600, 10**9 + 60)


def test_a_deadline_goes_out_in_whole_seconds_rounded_up() -> None:
    made = wire.invoke_tool(
        COMMAND,
        tool="cmd.run",
        args={"command": "uname"},
        security_context="zaru-free",
        seal=pb.SealEnvelope(),
        deadline_seconds=2.1,
    )
    assert (made.invoke_tool.deadline.seconds, made.invoke_tool.deadline.nanos) == (3, 0)
    assert made.invoke_tool.args["command"] == "uname"
