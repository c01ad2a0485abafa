"""Reading what a caller sent: strictly, and naming the field that is wrong."""

from __future__ import annotations

import re
from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from fleetplane.web.rest.problems import Code, Problem, Rejected

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
