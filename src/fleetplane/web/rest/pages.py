"""Pages of lists, in both shapes, and numbers and flags of a query.

Numbered pages (`page`, `per_page`) are of an order to which new rows only ever append. Pages by cursor
(`cursor`, `limit`) name a row's place and not its number, so what is added or removed meanwhile makes
nobody miss a row or see one twice.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.resources import AnyResource, Resource, SpecT, StatusT
from fleetplane.web.rest.problems import Code, Problem, Rejected
from fleetplane.web.rest.routes import Call, Query

T = TypeVar("T")
V = TypeVar("V")
R = TypeVar("R", bound=AnyResource)

# Numbered pages.

PER_PAGE = 20
PER_PAGE_LIMIT = 100
PAGE_LIMIT = 1_000_000
"""Pages are numbered up to here; more rows than that do not fit into a server's memory."""


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    page: int
    per_page: int
    total: int


class Listing(msgspec.Struct, Generic[V], frozen=True, kw_only=True):
    """One numbered page."""

    data: Sequence[V]
    meta: Meta


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    page: int = 1
    per_page: int = PER_PAGE


def paging(query: Mapping[str, str]) -> Paging:
    """The numbered page that a query asks for; problems with both numbers are reported together."""
    problems: list[Problem] = []
    page = number(query, "page", 1, low=1, high=PAGE_LIMIT, problems=problems)
    per_page = number(query, "per_page", PER_PAGE, low=1, high=PER_PAGE_LIMIT, problems=problems)
    if problems:
        raise Rejected(*problems)
    return Paging(page=page, per_page=per_page)


def number(
    query: Mapping[str, str], name: str, default: int, *, low: int, high: int, problems: list[Problem]
) -> int:
    """A whole number of a query; what is wrong with it is added to `problems`."""
    text = query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 12:
        problems.append(Problem(field=name, message="Must be a whole number"))
        return default
    value = int(text)
    if not low <= value <= high:
        problems.append(
            Problem(field=name, message=f"Must be between {low} and {high}", code=Code.OUT_OF_RANGE)
        )
    return value


def in_order(resources: Iterable[Resource[SpecT, StatusT]]) -> list[Resource[SpecT, StatusT]]:
    """Oldest first. By revision, not by the clock, which may go back; then by id."""
    return sorted(resources, key=_place_of)


def listing(rows: Sequence[T], at: Paging, show: Callable[[T], V]) -> Listing[V]:
    """One numbered page; past the end it is empty, with the total right."""
    start = (at.page - 1) * at.per_page
    return Listing(
        data=[show(row) for row in rows[start : start + at.per_page]],
        meta=Meta(page=at.page, per_page=at.per_page, total=len(rows)),
    )


# Pages by cursor.

CURSOR_ROWS, CURSOR_ROWS_LIMIT = 50, 200
DIGITS = 12
"""Of a number, beside zeros before it; every limit has fewer, so that a longer one is beyond it anyway."""
BY_CURSOR: Sequence[Query] = (
    Query(name="cursor", summary="`next_cursor` of the previous page"),
    Query(
        name="limit",
        summary="Rows per page",
        kind="integer",
        default=CURSOR_ROWS,
        low=1,
        high=CURSOR_ROWS_LIMIT,
    ),
)


class CursorPage(msgspec.Struct, Generic[V], frozen=True, kw_only=True):
    """One page by cursor."""

    items: Sequence[V]
    next_cursor: str | None


def cursor_page(
    call: Call[Any], rows: Sequence[R], show: Callable[[R], V], *, newest_first: bool = False
) -> CursorPage[V]:
    """Rows in the order in which they were made, after the one that the cursor names."""
    limit = whole_number(call, "limit", default=CURSOR_ROWS, low=1, high=CURSOR_ROWS_LIMIT)
    after = _place(call.query.get("cursor"))
    by_place = {_place_of(row): row for row in rows}
    wanted = sorted(
        (place for place in by_place if after is None or (place < after if newest_first else place > after)),
        reverse=newest_first,
    )[: limit + 1]
    cursor = _cursor(wanted[limit - 1]) if len(wanted) > limit else None
    return CursorPage(items=[show(by_place[place]) for place in wanted[:limit]], next_cursor=cursor)


def whole_number(call: Call[Any], name: str, *, default: int, low: int, high: int) -> int:
    """A whole number of a query; raises `InvalidArgument`."""
    text = call.query.get(name)
    if text is None:
        return default
    value = decimal(text, low=low, high=high)
    if value is None:
        raise InvalidArgument(f"must be a whole number from {low} to {high}", field=name)
    return value


def decimal(text: str, *, low: int, high: int) -> int | None:
    """The number that decimal digits write, in bounds and however many zeros are before it; else None."""
    digits = text.lstrip("0") or text[:1]
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > DIGITS:
        return None
    value = int(digits)
    return value if low <= value <= high else None


def flag(call: Call[Any], name: str) -> bool | None:
    """A flag of a query; None if it is not given."""
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


def _place_of(resource: AnyResource) -> tuple[int, str]:
    return resource.created_revision, resource.name
