"""Lists, page by page. A page goes on after an object's place in the order, not after a number of objects.

What is added or removed between two pages makes nobody miss an object that stays, or see one twice. Every
page carries the revision of the first one: a watch after it misses nothing that happened between the pages.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from fleetplane.fleet.resources import scopes, selection
from fleetplane.fleet.resources.access import Sight
from fleetplane.fleet.resources.catalogue import FoundObject, ResourceEntry
from fleetplane.fleet.resources.declaration import ViewReader
from fleetplane.fleet.resources.selection import ObjectSelection, Rank, SortOrder
from fleetplane.kernel.errors import InvalidArgument

LIMIT = 100
LIMIT_MOST = 1000
"""Objects of one page: about 1 KB each, so 1 MB."""
TURN = 200
"""Objects after which others have their turn: at about 20 µs each, 4 ms."""
TOKEN_LIMIT = 4096
"""Characters; three sort keys of 1 KB and two names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListQuery:
    """What a list is asked for."""

    scope: str = scopes.ROOT
    selection: ObjectSelection = selection.EVERYTHING
    order: tuple[SortOrder, ...] = ()
    limit: int = LIMIT
    after: str = ""
    """`continue` of the page before."""
    digest: str = ""
    """Of everything above but the limit: a page goes on only with the list that it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectPage:
    """One page of objects in plain values."""

    items: Sequence[dict[str, Any]]
    revision: int
    following: str | None
    """Where the next page begins; None after the last."""


class ContinueToken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a page ended. Nothing in it is trusted: it only says after which place to go on."""

    digest: str
    revision: int
    ranks: list[tuple[int, int | float | str | bool]]
    scope: str
    name: str
    uid: str


def list_query(values: Mapping[str, str], plural: str, *, limit: int) -> ListQuery:
    """The query of a request; raises `InvalidArgument`."""
    parts = [values.get(name, "") for name in ("scope", "labels", "fields", "sort")]
    digest = hashlib.blake2b("\0".join((plural, *parts)).encode(), digest_size=8).hexdigest()
    return ListQuery(
        scope=scopes.parsed(values.get("scope", "")),
        selection=selection.selection(values),
        order=selection.order(values.get("sort", "")),
        limit=limit,
        after=values.get("continue", ""),
        digest=digest,
    )


async def page(
    entry: ResourceEntry, reading: ViewReader, revision: int, query: ListQuery, sight: Sight
) -> ObjectPage:
    """The objects that a caller may see, at and below a scope.

    Others are served meanwhile: a selector may have to look at every object that there is.
    """
    sight.check_list(entry.permissions, query.scope)
    token = decoded(query, revision) if query.after else None
    key = _sort_key(query.order)
    last = key((list(token.ranks), token.scope, token.name, token.uid)) if token is not None else None
    looks = bool(query.order) or not query.selection.is_everything
    rows: list[tuple[_Place, FoundObject]] = []
    for number, found in enumerate(entry.all(reading), start=1):
        if number % TURN == 0:
            await asyncio.sleep(0)
        if not is_seen(found, query.scope, sight):
            continue
        shown = found.shown(reading) if looks else {}
        if looks and not query.selection.matches(shown):
            continue
        place = _place(found, shown, query.order)
        if last is None or key(place) > last:
            rows.append((place, found))
    rows.sort(key=lambda row: key(row[0]))
    began = token.revision if token is not None else revision
    more = len(rows) > query.limit
    return ObjectPage(
        items=[found.shown(reading) for _, found in rows[: query.limit]],
        revision=began,
        following=encoded(query, began, rows[query.limit - 1][0]) if more else None,
    )


def is_seen(found: FoundObject, scope: str, sight: Sight) -> bool:
    """Whether an object lies at or below a scope and the caller may read it."""
    where = found.called.scope
    return scopes.covers(scope, where) and sight.may(found.member.resource.permission, where)


_Place = tuple[list[Rank], str, str, str]
"""Of two objects that have the same name in one scope, the uid decides."""


def _place(found: FoundObject, shown: dict[str, Any], order: Sequence[SortOrder]) -> _Place:
    return selection.ranks(shown, order), found.called.scope, found.called.name, found.stored.uid


def _sort_key(order: Sequence[SortOrder]) -> Callable[[_Place], Any]:
    def compare(one: _Place, other: _Place) -> int:
        for key, left, right in zip(order, one[0], other[0], strict=True):
            if left != right:
                return (1 if left > right else -1) * (-1 if key.descending else 1)
        return (one[1:] > other[1:]) - (one[1:] < other[1:])

    if not order:
        return lambda place: place[1:]
    return functools.cmp_to_key(compare)


def encoded(query: ListQuery, revision: int, place: _Place) -> str:
    ranks, scope, name, uid = place
    token = ContinueToken(
        digest=query.digest, revision=revision, ranks=ranks, scope=scope, name=name, uid=uid
    )
    return base64.urlsafe_b64encode(msgspec.json.encode(token)).rstrip(b"=").decode()


def decoded(query: ListQuery, revision: int) -> ContinueToken:
    refused = InvalidArgument(
        "is no continuation of this list",
        field="continue",
        hint="begin the list anew, with the same selectors and order on every page",
    )
    if len(query.after) > TOKEN_LIMIT:
        raise refused
    try:
        raw = base64.b64decode(query.after + "=" * (-len(query.after) % 4), altchars=b"-_", validate=True)
        token = msgspec.json.decode(raw, type=ContinueToken)
    except (ValueError, binascii.Error, msgspec.MsgspecError) as error:
        raise refused from error
    if token.digest != query.digest or len(token.ranks) != len(query.order):
        raise refused
    if not 0 <= token.revision <= revision or not all(map(_is_rank, token.ranks)):
        raise refused
    return token


def _is_rank(found: tuple[int, int | float | str | bool]) -> bool:
    sort, value = found
    return {0: value == 0, 1: not isinstance(value, str), 2: isinstance(value, str)}.get(sort, False)
