"""JSON exactly as Go's encoding/json writes it, so that hashes taken of it are the same on both sides.

Maps come out with sorted keys and structs in the order of their fields: here, `dict` and `GoStruct`. Every
number is a double, as it is to a Go program that reads JSON without a schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal

from fleetplane.kernel.errors import InvalidArgument

_ESCAPED = re.compile('[<>&\u2028\u2029\x00-\x1f"\\\\]')
_SHORT = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


class GoStruct(dict[str, object]):
    """A Go struct: its keys stay in the order in which they were put in."""


def dumps(value: object, *, indent: int = 0) -> str:
    """Compact, or over several lines when `indent` is given."""
    return _dump(value, " " * indent, "\n" if indent else "")


def _dump(value: object, step: str, newline: str) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return _string(value)
        case int() | float():
            return _number(float(value))
        case Mapping():
            keys = list(value) if isinstance(value, GoStruct) else sorted(value)
            colon = ": " if newline else ":"
            inner = newline + step if newline else ""
            items = [f"{_string(key)}{colon}{_dump(value[key], step, inner)}" for key in keys]
            return _enclosed("{}", items, newline, inner)
        case list() | tuple():
            inner = newline + step if newline else ""
            return _enclosed("[]", [_dump(item, step, inner) for item in value], newline, inner)
        case _:
            raise InvalidArgument(f"a {type(value).__name__} has no form in JSON")


def _enclosed(brackets: str, items: list[str], newline: str, inner: str) -> str:
    if not items:
        return brackets
    return f"{brackets[0]}{inner}{(',' + inner).join(items)}{newline}{brackets[1]}"


def _string(text: str) -> str:
    def escaped(match: re.Match[str]) -> str:
        return _SHORT.get(match[0]) or f"\\u{ord(match[0]):04x}"

    return f'"{_ESCAPED.sub(escaped, text)}"'


def _number(number: float) -> str:
    """Shortest digits that read back the same; an exponent only below 1e-6 and from 1e21 on."""
    if number == 0 or 1e-6 <= abs(number) < 1e21:
        text = format(Decimal(repr(number)), "f")
        return text.removesuffix(".0")
    if number != number or number in (float("inf"), float("-inf")):
        raise InvalidArgument(f"{number} has no form in JSON")
    mantissa, _, exponent = json.dumps(number).partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent):+d}"
