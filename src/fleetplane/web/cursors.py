"""Pages by cursor, and values of the query.

A cursor names a row's place and not its number, so what is added or removed meanwhile makes
nobody miss a row or see one twice.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.resources import AnyResource
from fleetplane.web.routes import Call, Query

R = TypeVar("R", bound=AnyResource)

PAGE, PAGE_LIMIT = 50, 200
PAGING: Sequence[Query] = (
    Query(name="cursor", summary="`next_cursor` of the page before"),
    Query(name="limit", summary="Rows a page", kind="integer", default=PAGE, low=1, high=PAGE_LIMIT),
)


def page(
    call: Call[Any], rows: Sequence[R], show: Callable[[R], Any], *, newest_first: bool = False
) -> dict[str, Any]:
    """Rows in the order in which they were made, after the one that the cursor names."""
    limit = number(call, "limit", default=PAGE, low=1, high=PAGE_LIMIT)
    after = _place(call.query.get("cursor"))
    by_place = {(row.created_revision, row.name): row for row in rows}
    wanted = sorted(
        (place for place in by_place if after is None or (place < after if newest_first else place > after)),
        reverse=newest_first,
    )[: limit + 1]
    cursor = _cursor(wanted[limit - 1]) if len(wanted) > limit else None
    return {"items": [show(by_place[place]) for place in wanted[:limit]], "next_cursor": cursor}


def number(call: Call[Any], name: str, *, default: int, low: int, high: int) -> int:
    text = call.query.get(name)
    if text is None:
        return default
    if not text.isdecimal() or not text.isascii() or not low <= int(text[:9]) <= high:
        raise InvalidArgument(f"must be a whole number from {low} to {high}", field=name)
    return int(text)


def flag(call: Call[Any], name: str) -> bool | None:
    match call.query.get(name):
        case None:
            return None
        case "true" | "1":
            return True
        case "false" | "0":
            return False
    raise InvalidArgument("must be true or false", field=name)


def _cursor(place: tuple[int, str]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(place)).rstrip(b"=").decode()


def _place(cursor: str | None) -> tuple[int, str] | None:
    if cursor is None:
        return None
    try:
        raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        return msgspec.json.decode(raw, type=tuple[int, str])
    except (ValueError, binascii.Error, msgspec.MsgspecError) as error:
        raise InvalidArgument("is none that this server gave out", field="cursor") from error
