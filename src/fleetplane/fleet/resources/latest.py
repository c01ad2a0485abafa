"""Lists of what only grows and is kept on disk, such as the audit log: newest first, page by page.

There may be millions, so that a page looks at a bounded number. One that finds fewer than asked for still
says where to go on.
"""

from __future__ import annotations

from fleetplane.fleet.resources import listing, objects, scopes
from fleetplane.fleet.resources.access import Sight
from fleetplane.fleet.resources.catalogue import FoundObject, ResourceEntry
from fleetplane.fleet.resources.declaration import ViewReader
from fleetplane.fleet.resources.listing import ListQuery, ObjectPage
from fleetplane.kernel.errors import InvalidArgument, NotFound

BATCH = 100
SCANNED_MOST = 2000
"""Entries that one page looks at: at about 0.1 ms each, 0.2 s."""
NAME_DIGITS = 18


async def page(
    entry: ResourceEntry, reading: ViewReader, revision: int, query: ListQuery, sight: Sight
) -> ObjectPage:
    """The newest that fit the selection, after those of the page before."""
    sight.check_list(entry.permissions, query.scope)
    if query.order:
        raise InvalidArgument("is not possible here: the newest come first", field="sort")
    token = listing.decoded(query, revision) if query.after else None
    before = _number(token.name) if token is not None else None
    began = token.revision if token is not None else revision
    items: list[dict[str, object]] = []
    scanned, following = 0, None
    while scanned < SCANNED_MOST:
        batch = await _batch(entry, before, BATCH, reading)
        for found in batch:
            scanned += 1
            before = _number(found.stored.name)
            shown = found.shown(reading)
            if not listing.is_seen(found, query.scope, sight) or not query.selection.matches(shown):
                continue
            items.append(shown)
            if len(items) == query.limit:
                break
        else:
            if len(batch) < BATCH:
                return ObjectPage(items=items, revision=began, following=None)
            continue
        break
    following = listing.encoded(query, began, ([], scopes.ROOT, str(before), ""))
    return ObjectPage(items=items, revision=began, following=following)


async def find(entry: ResourceEntry, reading: ViewReader, name: str, scope: str, sight: Sight) -> FoundObject:
    """One of them, by its number."""
    sight.check_list(entry.permissions, scope)
    if name.isascii() and name.isdecimal() and len(name) <= NAME_DIGITS:
        for found in await _batch(entry, int(name) + 1, 1, reading):
            if found.called.name == name and listing.is_seen(found, scope, sight):
                return found
    raise NotFound(f"there is no {entry.resource.name} {name[:64]!r} at {scope}")


async def _batch(
    entry: ResourceEntry, before: int | None, limit: int, reading: ViewReader
) -> list[FoundObject]:
    (member,) = entry.members
    assert member.resource.latest is not None
    return [
        FoundObject(member=member, stored=one, called=objects.identity(member.resource, one, reading))
        for one in await member.resource.latest(member.running, before, limit)
    ]


def _number(name: str) -> int:
    if not (name.isascii() and name.isdecimal()) or len(name) > NAME_DIGITS:
        raise InvalidArgument("is no continuation of this list", field="continue")
    return int(name)
