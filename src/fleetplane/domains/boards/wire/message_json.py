"""Protobuf messages: filled from objects, tables of their enums, their JSON in REST, and pages. Pure.

An enum is its value's own part of the name, in lower case: `CERTIFICATE_STATUS_ACTIVE` is `active`.
An absent optional field is null; an unspecified enum is an empty text.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values.times import NS, spelled
from fleetplane.kernel.values.timestamps import timestamp

PAGE_DEFAULT = 50
PAGE_LIMIT = 1000

T = TypeVar("T")


def page_of(found: Sequence[T], *, page: int, page_size: int) -> Sequence[T]:
    """What is below 1 is taken for the first page, and for the usual size."""
    size = min(page_size, PAGE_LIMIT) if page_size > 0 else PAGE_DEFAULT
    start = (max(page, 1) - 1) * size
    return found[start : start + size]


M = TypeVar("M", bound=Message)
E = TypeVar("E", bound=StrEnum)


def filled(kind: type[M], *sources: object, **given: Any) -> M:
    """A message whose fields are `given`, or attributes of the same names of the first source that has them.

    A moment such as `created_at` is read from `created_at_ns`. A field that nothing fills raises TypeError.
    """
    names = kind.DESCRIPTOR.fields_by_name
    fields = gathered(names, sources, given, moment=timestamp)
    if missing := names.keys() - fields.keys():
        raise TypeError(f"nothing fills {', '.join(sorted(missing))} of {kind.__name__}")
    return kind(**fields)


def gathered(
    names: Iterable[str],
    sources: Sequence[object],
    given: Mapping[str, Any],
    *,
    moment: Callable[[int | None], object],
) -> dict[str, Any]:
    """The fields by name: `given`, else from the sources, with moments spelled by `moment`."""
    fields = dict(given)
    for name in names:
        for source in sources if name not in fields else ():
            if hasattr(source, name):
                fields[name] = getattr(source, name)
                break
            if hasattr(source, f"{name}_ns"):
                fields[name] = moment(getattr(source, f"{name}_ns"))
                break
    return fields


def enum_table(values: type[E], enum: Any, prefix: str) -> Mapping[E, Any]:
    """The numbers of a protobuf enum by our values, which have the same names after `prefix`."""
    return {one: enum.Value(prefix + one.name) for one in values}


def known(said: int, table: Mapping[E, int], field: str) -> E | None:
    """Our value for a number of a protobuf enum; None if it is unspecified."""
    if not said:
        return None
    for value, number in table.items():
        if number == said:
            return value
    raise InvalidArgument(f"{field} {said} is not known", field=field)


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
