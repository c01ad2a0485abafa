"""Pages of lists, in an order to which new rows only ever append."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from fleetplane.kernel.resources import AnyResource, Resource, SpecT, StatusT
from fleetplane.web.problems import Code, Problem, Rejected

T = TypeVar("T")
V = TypeVar("V")

PER_PAGE = 20
PER_PAGE_LIMIT = 100
PAGE_LIMIT = 1_000_000
"""Pages are numbered up to here; more rows than that do not fit into a server's memory."""


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    page: int
    per_page: int
    total: int


class Listing(msgspec.Struct, Generic[V], frozen=True, kw_only=True):
    """The envelope of every list."""

    data: Sequence[V]
    meta: Meta


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    page: int = 1
    per_page: int = PER_PAGE


def paging(query: Mapping[str, str]) -> Paging:
    """Both numbers out of range are told at once."""
    problems: list[Problem] = []
    page = number(query, "page", 1, low=1, high=PAGE_LIMIT, problems=problems)
    per_page = number(query, "per_page", PER_PAGE, low=1, high=PER_PAGE_LIMIT, problems=problems)
    if problems:
        raise Rejected(*problems)
    return Paging(page=page, per_page=per_page)


def number(
    query: Mapping[str, str], name: str, default: int, *, low: int, high: int, problems: list[Problem]
) -> int:
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
    return sorted(resources, key=_age)


def _age(resource: AnyResource) -> tuple[int, str]:
    return resource.created_revision, resource.name


def listing(rows: Sequence[T], at: Paging, show: Callable[[T], V]) -> Listing[V]:
    """One page; past the end it is empty, with the total right."""
    start = (at.page - 1) * at.per_page
    return Listing(
        data=[show(row) for row in rows[start : start + at.per_page]],
        meta=Meta(page=at.page, per_page=at.per_page, total=len(rows)),
    )
