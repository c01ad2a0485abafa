"""Whether a JSON document can be carried by every encoding that it may meet later. Pure.

What is taken from a caller is often encoded long after the caller was answered: as a `Struct` inside the
envelopes of a command, as MessagePack in the database. Whoever takes a document checks it here, so that the
caller is told, and not a machine that was to get it.
"""

from __future__ import annotations

import math

from fleetplane.kernel.errors import InvalidArgument

DEPTH_LIMIT = 32
"""Objects and lists within each other. Protobuf takes 100 messages within each other: an object costs three
(`Value`, `Struct`, its entry), and the envelopes of a command four."""
INTEGER_LIMITS = (-(2**63), 2**64 - 1)
"""What MessagePack has."""
_TOO_DEEP = "is nested too deeply"
PATH_LIMIT = 120
"""Characters of the place that an error names."""


def check_document(document: object, *, field: str, within: int = 0) -> None:
    """Refuse what could not be encoded later, naming its place and the reason.

    `within` is how many objects it is put into before it is encoded.
    """
    found = _fault(document, within + 1)
    if found is not None:
        path, reason = found
        if reason is _TOO_DEEP:
            reason = f"is nested deeper than {DEPTH_LIMIT - within} levels"
        place = field + path
        raise InvalidArgument(reason, field=place if len(place) <= PATH_LIMIT else place[:PATH_LIMIT] + "...")


def _fault(value: object, depth: int) -> tuple[str, str] | None:
    """The place below `value` that cannot be encoded, and why."""
    match value:
        case None | bool():
            return None
        case str():
            return None if _is_text(value) else ("", "has half of a surrogate pair, which is no text")
        case int():
            least, most = INTEGER_LIMITS
            return (
                None if least <= value <= most else ("", f"is not between {least} and {most}; use a string")
            )
        case float():
            return None if math.isfinite(value) else ("", f"is {value}, which is no number in JSON")
        case dict() | list() | tuple() if depth > DEPTH_LIMIT:
            return "", _TOO_DEEP
        case dict():
            for key, inner in value.items():
                if not isinstance(key, str) or not _is_text(key):
                    return "", f"has the key {key!r:.80}, which is no text"
                if (found := _fault(inner, depth + 1)) is not None:
                    return f".{key}{found[0]}", found[1]
        case list() | tuple():
            for index, inner in enumerate(value):
                if (found := _fault(inner, depth + 1)) is not None:
                    return f"[{index}]{found[0]}", found[1]
        case _:
            return "", f"is a {type(value).__name__}, which JSON does not have"
    return None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
