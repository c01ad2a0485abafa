"""Moments as protobuf has them. Apart from `times`, because whoever prints help need not load protobuf."""

from __future__ import annotations

from typing import overload

from google.protobuf.timestamp_pb2 import Timestamp

from fleetplane.kernel.values.times import NS


@overload
def timestamp(at_ns: int) -> Timestamp: ...
@overload
def timestamp(at_ns: int | None) -> Timestamp | None: ...
def timestamp(at_ns: int | None) -> Timestamp | None:
    """The moment, or None, which leaves a field unset, for what never was."""
    if at_ns is None:
        return None
    return Timestamp(seconds=at_ns // NS, nanos=at_ns % NS)
