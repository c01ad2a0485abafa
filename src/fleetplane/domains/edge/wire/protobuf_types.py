"""Times, durations and documents as protobuf's well-known types, both ways. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct

from fleetplane.kernel.values.documents import check_document


def struct_of(document: Mapping[str, Any], *, field: str = "document") -> Struct:
    """`field` is what the document is called if it cannot be sent."""
    check_document(document, field=field)
    made = Struct()
    made.update(document)
    return made


def mapping_of(document: Struct) -> dict[str, Any]:
    """Raises `json_format.Error` where a number is not one that JSON has."""
    found: dict[str, Any] = json_format.MessageToDict(document)
    return found


def duration_of(seconds: float) -> Duration:
    made = Duration()
    made.FromNanoseconds(round(seconds * 1e9))
    return made


def seconds_of(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
