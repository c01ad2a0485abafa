"""Protobuf messages as REST shows them, and pages as the original services count them. Pure.

An enum is its value's own part of the name, in lower case: `CERTIFICATE_STATUS_ACTIVE` is `active`.
An absent optional field is null; an unspecified enum is an empty text.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from fleetplane.kernel.values.times import NS, spelled

PAGE_DEFAULT = 50
PAGE_LIMIT = 1000

T = TypeVar("T")


def page_of(found: Sequence[T], *, page: int, page_size: int) -> Sequence[T]:
    """What is below 1 is taken for the first page, and for the usual size."""
    size = min(page_size, PAGE_LIMIT) if page_size > 0 else PAGE_DEFAULT
    start = (max(page, 1) - 1) * size
    return found[start : start + size]


# Descriptors are of two unrelated types, by how protobuf was built: hence Any.
_UNSAID = "UNSPECIFIED"


def plain(message: Message) -> dict[str, Any]:
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    if field.is_repeated:
        return [_value(field, one) for one in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _value(field, value)


def _value(field: Any, value: Any) -> Any:
    if isinstance(value, Timestamp):
        return spelled(value.seconds * NS + value.nanos)
    if isinstance(value, Duration):
        return json_number(value.seconds + value.nanos / NS)
    if isinstance(value, Message):
        return plain(value)
    if field.enum_type is not None:
        return word(field.enum_type, value)
    if isinstance(value, float):
        return json_number(value)
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def json_number(value: float) -> float:
    """As clients in Go write and read it: `1`, not `1.0`, where it is whole."""
    return int(value) if value.is_integer() else value


def word(enum: Any, number: int) -> str:
    """A value's own part of its name; the number itself for one that is not known."""
    known = enum.values_by_number.get(number)
    if known is None:
        return str(number)
    first = enum.values_by_number[0].name if 0 in enum.values_by_number else ""
    shared = first.removesuffix(_UNSAID) if first.endswith(_UNSAID) else ""
    own = known.name.removeprefix(shared)
    return "" if own == _UNSAID else own.lower()
