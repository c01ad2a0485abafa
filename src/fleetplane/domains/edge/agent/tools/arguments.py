"""Reading a call's arguments: each by name, of one type, within bounds. Pure.

They come as JSON does: all numbers are floating-point ones, and nothing says what was left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fleetplane.domains.edge.agent.tools.contract import BadArguments

TEXT_LIMIT: Final = 32 * 1024
"""Of one argument: what Linux takes for one string of a command line is four times that."""
LIST_LIMIT: Final = 1024


def _bad(name: str, why: str) -> BadArguments:
    return BadArguments(f"{name}: {why}", field=name)


def only(arguments: Mapping[str, object], known: frozenset[str]) -> None:
    """Refuse what nobody reads: a misspelt limit must not pass for a limit."""
    for name in arguments:
        if name not in known:
            raise _bad(str(name)[:80], f"is not known; known are {', '.join(sorted(known))}")


def text(arguments: Mapping[str, object], name: str, default: str | None = None) -> str:
    value = arguments.get(name, default)
    if value is None:
        raise _bad(name, "is missing")
    return _text(value, name)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise _bad(name, "is no text")
    if "\0" in value:
        raise _bad(name, "holds a zero byte")
    if len(value) > TEXT_LIMIT:
        raise _bad(name, f"has more than {TEXT_LIMIT} characters")
    return value


def texts(arguments: Mapping[str, object], name: str) -> tuple[str, ...]:
    value = arguments.get(name, ())
    if not isinstance(value, list | tuple):
        raise _bad(name, "is no list")
    if len(value) > LIST_LIMIT:
        raise _bad(name, f"has more than {LIST_LIMIT} entries")
    return tuple(_text(entry, f"{name}[{index}]") for index, entry in enumerate(value))


def text_map(arguments: Mapping[str, object], name: str) -> dict[str, str]:
    value = arguments.get(name) or {}
    if not isinstance(value, Mapping):
        raise _bad(name, "is no object")
    if len(value) > LIST_LIMIT:
        raise _bad(name, f"has more than {LIST_LIMIT} entries")
    return {_text(key, name): _text(entry, f"{name}.{key}") for key, entry in value.items()}


def number(arguments: Mapping[str, object], name: str, default: float, *, low: float, high: float) -> float:
    value = arguments.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad(name, "is no number")
    if not low <= value <= high:  # not-a-number is refused too
        raise _bad(name, f"is not between {low:g} and {high:g}")
    return float(value)


def whole(arguments: Mapping[str, object], name: str, default: int, *, low: int, high: int) -> int:
    value = number(arguments, name, default, low=low, high=high)
    if value != int(value):
        raise _bad(name, "is no whole number")
    return int(value)


def flag(arguments: Mapping[str, object], name: str, *, default: bool) -> bool:
    value = arguments.get(name, default)
    if not isinstance(value, bool):
        raise _bad(name, "is neither true nor false")
    return value


def absolute_path(arguments: Mapping[str, object], name: str, default: str | None = None) -> str:
    value = text(arguments, name, default)
    if not value.startswith("/"):
        raise _bad(name, "is no absolute path")
    return value
