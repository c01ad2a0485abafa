"""One watch: a set of resources, each at and below a scope, as server-sent events.

    added, modified, deleted   an object of the selection, id: the revision
    bookmark                   nothing of interest up to this revision
    compacted                  what follows is no longer kept: list again, and watch from there
    measured                   figures or lines of logs have come that the caller may read, if it asked

A watch begins with a snapshot, which ends in a bookmark, unless it goes on after a revision. An object that
leaves the selection, or what the caller may see, is told as deleted. Events and bookmarks carry ids such that
going on after one of them misses nothing. A watcher is a place in the ring that all share; one that is too
slow for it goes on from the log. What is not stored is told as `computed` finds it, with the id of what was
told before: who goes on after a revision is told all of it again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

import msgspec

from fleetplane.fleet.feeds.ring import WHOLE, Missed
from fleetplane.fleet.resources import listing, scopes, selection, tables
from fleetplane.fleet.resources.access import Sight
from fleetplane.fleet.resources.catalogue import Catalogue, FoundObject, ResourceEntry
from fleetplane.fleet.resources.changes import ChangeRing, EntryChange, Version
from fleetplane.fleet.resources.computed import ComputedObservations, GrowingFeed
from fleetplane.fleet.resources.declaration import AnyPublicResource, ResourceVerb
from fleetplane.fleet.resources.measuring import Measurements
from fleetplane.fleet.resources.selection import ObjectSelection
from fleetplane.kernel.errors import Compacted, FleetplaneError, InvalidArgument, ResourceExhausted
from fleetplane.kernel.events import EventType
from fleetplane.kernel.store import Store

ALL = "*"
"""Every resource that the caller may read, but for what only grows: that is named."""
OF_LIMIT = 64
"""Resources of one watch; there are about twenty."""
IDLE_SECONDS = 5.0
"""How long a watch sleeps at most before it looks whether its caller may still read, and tells a bookmark."""
READ_EVENTS = 128
"""Changes taken from the ring at a time: about 128 KB are on their way to one watcher."""
MEASURED_SECONDS = 10.0
"""Between two events that tell of new figures: who shows some asks for them again."""
LOOK_SECONDS = 1.0
"""Between two looks of one watch whether new figures are for its caller."""
STREAMS_OF_CALLER = 32
STREAMS = 2048
"""Watches at once; each costs a task and one chunk, so 256 MB if every reader stalls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchQuery:
    """What is watched."""

    wanted: Sequence[tuple[ResourceEntry, str]]
    """Resources, each with the scope at and below which it is watched."""
    selection: ObjectSelection = selection.EVERYTHING
    after: int | None = None
    as_table: bool = False
    with_objects: bool = False
    """Rows of tables that carry the whole objects, too."""
    measured: bool = False
    """Also tell when something was measured that lies in what is watched and that the caller may read."""


def parsed_of(text: str, catalogue: Catalogue, sight: Sight) -> Sequence[tuple[ResourceEntry, str]]:
    """Resources and scopes such as `gpus,instances@/tenants/acme`; `*` are all that the caller may read."""
    hint = "write resources with commas between them, such as gpus,instances@/tenants/acme"
    if text.count(",") >= OF_LIMIT:
        raise InvalidArgument(f"names more than {OF_LIMIT} resources", field="of", hint=hint)
    found: dict[tuple[str, str], tuple[ResourceEntry, str]] = {}
    for part in text.split(","):
        word, _, where = part.strip().partition("@")
        if not word:
            raise InvalidArgument("is empty", field="of", hint=hint)
        scope = scopes.parsed(where, field="of")
        if word == ALL:
            sight.check_touches(scope)
            named: Sequence[ResourceEntry] = [
                one
                for one in catalogue.entries
                if is_watched(one) and one.resource.latest is None and sight.sees(one.permissions, scope)
            ]
        else:
            named = (catalogue.named(word),)
            sight.check_list(named[0].permissions, scope)
            if not is_watched(named[0]):
                raise InvalidArgument(f"{word} cannot be watched", field="of")
        for entry in named:
            found[entry.resource.plural, scope] = (entry, scope)
    return tuple(found.values())


def is_watched(entry: ResourceEntry) -> bool:
    """Whether a resource can be watched."""
    return ResourceVerb.WATCH in entry.resource.verbs


def told(change: EntryChange, query: WatchQuery, sight: Sight) -> str:
    """What one watcher is told of a change: the type of an event, or nothing.

    Raises `Compacted` where the log does not say whether the watcher knew the object.
    """
    if change.entry is None:
        return ""
    places = [scope for entry, scope in query.wanted if entry is change.entry]
    if not places:
        return ""

    def reaches(version: Version) -> bool:
        scope = version.called.scope
        return any(scopes.covers(place, scope) for place in places) and sight.may(
            version.member.resource.permission, scope
        )

    had = (
        change.before is not None
        and reaches(change.before)
        and (query.selection.is_everything or query.selection.matches(change.shown_before))
    )
    has = (
        change.after is not None
        and reaches(change.after)
        and (query.selection.is_everything or query.selection.matches(change.shown_after))
    )
    if change.is_logged:
        return _told_from_log(change, reaches, had=had, has=has)
    if has:
        return "modified" if had else "added"
    return "deleted" if had else ""


def _told_from_log(change: EntryChange, reaches: Callable[[Version], bool], *, had: bool, has: bool) -> str:
    version = change.after or change.before
    assert version is not None
    if has:
        return "added" if change.type is EventType.ADDED else "modified"
    if had:
        return "deleted"
    if reaches(version):
        # It may have been of the selection before: who does not know it ignores that it is gone.
        return "deleted" if change.type is EventType.MODIFIED else ""
    if change.type is not EventType.ADDED and (version.member.resource.moves or not version.called.scope):
        raise Compacted("an object may have left what this watch shows, and the log does not say so")
    return ""


class Watching:
    """Every open watch."""

    def __init__(
        self,
        store: Store,
        changes: ChangeRing,
        observations: ComputedObservations,
        measurements: Measurements,
    ) -> None:
        self._store = store
        self._changes = changes
        self._observations = observations
        self._measurements = measurements
        self._open: Counter[str] = Counter()
        self._bells: set[asyncio.Event] = set()
        self._ending = False

    def __repr__(self) -> str:
        return f"<Watching streams={self._open.total()} {self._changes!r}>"

    @property
    def streams(self) -> int:
        return self._open.total()

    def end(self) -> None:
        """End every watch, and those that still come: their callers go on elsewhere, after their last id."""
        self._ending = True
        for bell in self._bells:
            bell.set()

    def check_room(self, caller: str) -> None:
        """Refuse one watch too many."""
        if self._open[caller] >= STREAMS_OF_CALLER or self._open.total() >= STREAMS:
            raise ResourceExhausted(
                f"{self._open[caller]} watches of {caller} are open",
                hint="watch several resources with one stream: of=gpus,instances",
            )

    async def stream(
        self, query: WatchQuery, caller: str, look: Callable[[], Sight]
    ) -> AsyncGenerator[bytes]:
        """The events of a watch, until it is compacted or its caller may not read any more.

        `look` says what the caller may see now; it raises once the credential is no longer good.
        """
        self._open[caller] += 1
        try:
            async with aclosing(self._events(query, look)) as events:
                async for chunk in events:
                    yield chunk
        except Compacted as error:
            yield _event("compacted", _problem(error), mark=0)
        except FleetplaneError:
            return  # whoever comes back is told why
        finally:
            self._open[caller] -= 1
            if not self._open[caller]:
                del self._open[caller]

    async def _events(self, query: WatchQuery, look: Callable[[], Sight]) -> AsyncGenerator[bytes]:
        ring, bell, unstored = self._changes.ring, asyncio.Event(), _Unstored(self._store, query)
        with ring.ringing(bell), self._observations.ringing(bell), self._ringing(bell):
            await unstored.begin(self._observations)
            cursor = self._store.revision if query.after is None else query.after
            if not await self._store.reached(cursor):
                raise Compacted(f"revision {cursor} is in the future; the newest is {self._store.revision}")
            position = ring.position_after((cursor, WHOLE))
            if query.after is None:
                for chunk in self._snapshot(query, look()):
                    yield chunk
                yield _bookmark(cursor)
            marked = cursor
            measured = _Measured(self._measurements, query) if query.measured else None
            while not self._ending:
                sight = look()
                if measured is not None and measured.is_news(sight):
                    yield _event("measured", b"{}", mark=0)
                if position is None:
                    position, until = ring.position, ring.revision
                    async for chunk in unstored.grown(sight, cursor):
                        yield chunk
                    async with aclosing(self._changes.logged(cursor, until)) as logged:
                        async for change in logged:
                            if chunk := _told(change, query, sight):
                                yield chunk
                    cursor = max(cursor, until)
                bell.clear()
                reading = ring.read(position, limit=READ_EVENTS)
                if isinstance(reading, Missed):
                    position = None
                    continue
                position, reached = reading.position, self._changes.complete_until
                # Before any event of the ring: whoever goes on after one has seen what was done with it.
                async for chunk in unstored.grown(sight, cursor):
                    yield chunk
                if any(change.entry is None for change in reading.events):
                    sight = look()
                chunks = [_told(one, query, sight) for one in reading.events if one.revision > cursor]
                if chunk := b"".join(chunks):
                    marked = reading.events[-1].revision
                    yield chunk
                if reading.events:
                    cursor = max(cursor, reading.events[-1].revision)
                    continue
                cursor = max(cursor, reached)
                for chunk in unstored.changed(sight, cursor):
                    yield chunk
                if await _idle(bell) and cursor > marked:
                    marked = cursor
                    yield _bookmark(cursor)

    @contextmanager
    def _ringing(self, bell: asyncio.Event) -> Iterator[None]:
        self._bells.add(bell)
        try:
            yield
        finally:
            self._bells.discard(bell)

    def _snapshot(self, query: WatchQuery, sight: Sight) -> Iterator[bytes]:
        """What there is. Its events have no ids: who leaves before the end begins anew."""
        captured = [(scope, entry.all(self._store)) for entry, scope in query.wanted]
        seen: set[str] = set()
        chunk: list[bytes] = []
        for scope, found in captured:
            for one in found:
                if not listing.is_seen(one, scope, sight):
                    continue
                if len(query.wanted) > 1:
                    if one.stored.uid in seen:  # of overlapping scopes
                        continue
                    seen.add(one.stored.uid)
                shown = one.shown(self._store)
                if query.selection.matches(shown):
                    chunk.append(_event("added", _content(one, shown, query), mark=0))
                if len(chunk) >= READ_EVENTS:
                    yield b"".join(chunk)
                    chunk.clear()
        if chunk:
            yield b"".join(chunk)


class _Measured:
    """Whether something was measured since one watch told so."""

    def __init__(self, measurements: Measurements, query: WatchQuery) -> None:
        self._measurements = measurements
        self._watched = frozenset(scope for _, scope in query.wanted)
        self._told = measurements.mark
        self._after = -math.inf

    def is_news(self, sight: Sight) -> bool:
        """Now and then at most: figures come all the time. Nothing of what the caller may not read."""
        now, mark = time.monotonic(), self._measurements.mark
        if mark == self._told or now < self._after:
            return False
        after, self._told = self._told, mark
        self._after = now + LOOK_SECONDS
        if not self._measurements.is_news(after, self._watched, sight):
            return False
        self._after = now + MEASURED_SECONDS
        return True


class _Unstored:
    """What one watch tells of resources that are not stored."""

    def __init__(self, store: Store, query: WatchQuery) -> None:
        self._store = store
        self._query = query
        self._computed = [
            entry
            for entry, _ in query.wanted
            if any(one.resource.computed is not None for one in entry.members)
        ]
        growing = {entry.resource.plural: entry for entry, _ in query.wanted if entry.resource.latest}
        self._feeds = [GrowingFeed(store, entry) for entry in growing.values()]
        self._observations: ComputedObservations | None = None
        self._position = 0

    async def begin(self, observations: ComputedObservations) -> None:
        """Take the place from which to go on; raises `Compacted` where that is not known any more."""
        after = self._query.after
        for feed in self._feeds:
            if not await feed.begin(after):
                raise Compacted(f"more was done since revision {after} than is read again")
        if self._computed:
            observations.look()
            self._observations, self._position = observations, observations.position
            if after is not None:
                if after <= observations.floor:
                    raise Compacted(f"what was computed at revision {after} is not known any more")
                self._position = -1  # everything again: see `changed`

    async def grown(self, sight: Sight, cursor: int) -> AsyncGenerator[bytes]:
        """What was added to what only grows."""
        for feed in self._feeds:
            for change in await feed.fresh():
                if chunk := _told(change, self._query, sight, mark=cursor):
                    yield chunk

    def changed(self, sight: Sight, cursor: int) -> Iterator[bytes]:
        """Changes of what is computed; all of it, where it is not known what was told."""
        if self._observations is None:
            return
        found = self._observations.after(self._position)
        self._position = self._observations.position
        if found is None:
            yield from self._everything(sight)
            yield _bookmark(cursor)
            return
        if chunk := b"".join(_told(one, self._query, sight, mark=cursor) for one in found):
            yield chunk

    def _everything(self, sight: Sight) -> Iterator[bytes]:
        """Without ids: who leaves before the end is told it again."""
        assert self._observations is not None
        for change in self._observations.gone(self._computed):
            if chunk := _told(change, self._query, sight, mark=0):
                yield chunk
        for entry, scope in self._query.wanted:
            if entry not in self._computed:
                continue
            for one in entry.all(self._store):
                if listing.is_seen(one, scope, sight):
                    shown = one.shown(self._store)
                    if self._query.selection.matches(shown):
                        yield _event("modified", _content(one, shown, self._query), mark=0)


async def _idle(bell: asyncio.Event) -> bool:
    """Wait for something new; whether there was nothing for a while."""
    try:
        async with asyncio.timeout(IDLE_SECONDS):
            await bell.wait()
    except TimeoutError:
        return True
    return False


def _told(change: EntryChange, query: WatchQuery, sight: Sight, *, mark: int | None = None) -> bytes:
    """The event of a change, with the id `mark` where that is not the change's revision."""
    word = told(change, query, sight)
    if not word:
        return b""
    mark = change.revision if mark is None else mark
    gone = word == "deleted" and change.before is not None
    if query.as_table:
        version, shown = (change.before, change.shown_before) if gone else (change.after, change.shown_after)
        assert version is not None
        return _event(word, _row(version.member.resource, shown, query), mark=mark)
    if word == "deleted" and change.before is None:  # of the log: what it has become is not for this watch
        assert change.after is not None
        shown = change.shown_after
        bare = {"kind": shown["kind"], "metadata": shown["metadata"]}
        return _event(word, msgspec.json.encode(bare), mark=mark)
    return _event(word, change.encoded_before if gone else change.encoded_after, mark=mark)


def _content(found: FoundObject, shown: dict[str, object], query: WatchQuery) -> bytes:
    if query.as_table:
        return _row(found.member.resource, shown, query)
    return msgspec.json.encode(shown)


def _row(resource: AnyPublicResource, shown: tables.Shown, query: WatchQuery) -> bytes:
    row = tables.row(resource, shown)
    if query.with_objects:
        return msgspec.json.encode(tables.FullRow(cells=row.cells, object=row.object, value=shown))
    return msgspec.json.encode(row)


def _event(word: str, data: bytes, *, mark: int) -> bytes:
    identity = b"id: %d\n" % mark if mark else b""
    return b"%sevent: %s\ndata: %s\n\n" % (identity, word.encode(), data)


def _bookmark(revision: int) -> bytes:
    return _event("bookmark", b'{"revision":%d}' % revision, mark=revision)


def _problem(error: Compacted) -> bytes:
    told_why = {"reason": "Compacted", "detail": error.message, "hint": error.advice}
    return msgspec.json.encode(told_why)
