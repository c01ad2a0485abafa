"""Values of REST: strictly decoded request bodies; times; foreign JSON documents."""

from __future__ import annotations

import re
from collections.abc import Hashable
from datetime import datetime
from functools import cache
from typing import Annotated, Any, TypeVar, cast

import msgspec

from fleetplane.kernel.values.times import NS
from fleetplane.web.rest.problems import Code, Problem, Rejected

_OBJECT = {"type": "object", "additionalProperties": {}}

JsonObject = Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema=_OBJECT)]
"""A JSON object of any content."""
JsonObjectOrNull = Annotated[
    msgspec.Raw, msgspec.Meta(extra_json_schema={"anyOf": [_OBJECT, {"type": "null"}]})
]
Number = int | float
"""A number that is written without a fraction where it is whole."""
NULL = msgspec.Raw(b"null")


def foreign(content: bytes) -> msgspec.Raw:
    """A JSON document that is kept as bytes, written the way all answers are."""
    return msgspec.Raw(msgspec.json.encode(msgspec.json.decode(content)))


def parsed(text: str, *, field: str) -> int:
    """Nanoseconds since the epoch; a time without a zone could be anyone's, and is refused."""
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None or "T" not in text.upper():
            raise ValueError(text)
        seconds = int(moment.replace(microsecond=0).timestamp())
        if seconds < 0:
            raise ValueError(text)
        return seconds * NS + moment.microsecond * 1000
    except (ValueError, OverflowError, OSError) as error:
        raise Rejected(Problem(field=field, message="Must be a time such as 2026-03-01T00:00:00Z")) from error


T = TypeVar("T")

BODY_LIMIT_BYTES = 1024 * 1024

_PLACE = re.compile(r" - at `(?P<path>.*)`$")
_NAMED = re.compile(r"field `(?P<name>[^`]*)`")
_KEYS = re.compile(r"\$|\.(?P<name>[^.\[\]]+)|\[(?P<index>\d+|\.\.\.)\]")


@cache
def _decoder(shape: Hashable) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(shape)


def decode(body: bytes, shape: type[T]) -> T:
    """The body as its shape; `Rejected` names the first place where it is not."""
    if not body:
        raise Rejected(Problem(field="", message="A JSON body is required", code=Code.REQUIRED))
    try:
        return cast("T", _decoder(cast("Hashable", shape)).decode(body))
    except msgspec.ValidationError as error:
        raise Rejected(_finding(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Rejected(Problem(field="", message=f"The body is not JSON: {error}")) from error


def _finding(text: str) -> Problem:
    """msgspec tells the first mismatch in a sentence of known forms."""
    place = _PLACE.search(text)
    path = dotted(place["path"]) if place else ""
    message = text[: place.start()] if place else text
    named = _NAMED.search(message)
    if named and message.startswith("Object missing required"):
        return Problem(field=_join(path, named["name"]), message="This field is required", code=Code.REQUIRED)
    if named and message.startswith("Object contains unknown"):
        name = named["name"]
        return Problem(field=_join(path, name), message="This field is not known", code=Code.UNKNOWN_FIELD)
    if "of length <=" in message:
        return Problem(field=path, message=message, code=Code.TOO_LONG)
    if re.search(r"[<>]=? -?\d", message):
        return Problem(field=path, message=message, code=Code.OUT_OF_RANGE)
    return Problem(field=path, message=message)


def dotted(path: str) -> str:
    """`$.locations[0].path` as `locations.0.path`."""
    keys = (match["name"] or match["index"] for match in _KEYS.finditer(path))
    return ".".join(key for key in keys if key and key != "...")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def given(patch: msgspec.Struct) -> dict[str, Any]:
    """The fields that a partial update names."""
    return {
        name: value
        for name in patch.__struct_fields__
        if (value := getattr(patch, name)) is not msgspec.UNSET
    }
