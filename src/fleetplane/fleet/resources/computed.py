"""Changes of what is computed and not stored, such as groups of instances or providers of GPUs.

Nothing says when such an object changes, and it has no revision of its own. So one task looks now and then
(where the domain can tell that nothing moved, it is not even computed), compares with what it knew, and keeps
the differences in order for every watcher. What is gone is remembered, so that a watch which goes on after a
revision is told everything again that is computed, and what is gone: it misses nothing, whatever it had seen.
A revision from before this task began is refused as compacted: what went then, nobody knows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from fleetplane.fleet.resources import objects
from fleetplane.fleet.resources.catalogue import Catalogue, CatalogueMember, ResourceEntry
from fleetplane.fleet.resources.changes import EntryChange, Version
from fleetplane.fleet.resources.declaration import ObservedPart, ResourceVerb
from fleetplane.kernel.events import EventType
from fleetplane.kernel.store import Store

log = structlog.get_logger(__name__)

LOOK_SECONDS = 1.0
"""Between two looks: how late a change is told at most, where looking takes no time."""
SHARE = 20
"""A look that took long is followed by this many times its length of rest: at most a twentieth of a core."""
KEPT_CHANGES = 4096
"""For watchers that are slower than the looks; one that is slower still is told everything again."""
KEPT_GONE = 4096
"""Objects that are remembered to be gone: about 1 KB each, 4 MB."""

_Name = tuple[str, str]
"""Stored scope and name."""


@dataclass(slots=True)
class _Source:
    """The objects that one domain computes of one resource, as they were at the last look."""

    entry: ResourceEntry
    member: CatalogueMember
    observed: ObservedPart
    version: Hashable = None
    known: dict[_Name, tuple[object, Version]] = field(default_factory=dict)


class ComputedObservations:
    """What is computed, looked at for all watchers together."""

    def __init__(self, store: Store, catalogue: Catalogue) -> None:
        self._store = store
        self._sources = tuple(_sources(catalogue))
        self._growing = tuple(_growing(catalogue))
        self._grown: list[Hashable] = []
        self._changes: list[EntryChange] = []
        self._base = 0
        self._gone: dict[tuple[str, _Name], EntryChange] = {}
        self._began = False
        self.floor = store.revision
        """A watch goes on only after a later revision than this: what was gone by then is not remembered."""
        self._bells: set[asyncio.Event] = set()

    def __repr__(self) -> str:
        known = sum(len(one.known) for one in self._sources)
        return f"<Observations objects={known} changes={len(self._changes)}>"

    # Reading.

    @property
    def position(self) -> int:
        """Of a reader that wants what changes from now on."""
        return self._base + len(self._changes)

    def after(self, position: int) -> Sequence[EntryChange] | None:
        """What changed since a position; None if that is no longer known."""
        return None if position < self._base else self._changes[position - self._base :]

    def gone(self, entries: Sequence[ResourceEntry]) -> list[EntryChange]:
        """Objects that were there once, and are not now."""
        return [change for change in self._gone.values() if change.entry in entries]

    @contextmanager
    def ringing(self, bell: asyncio.Event) -> Iterator[None]:
        """Set `bell` whenever there is something new."""
        self._bells.add(bell)
        try:
            yield
        finally:
            self._bells.discard(bell)

    # Looking.

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            began = time.monotonic()
            self.look()
            await asyncio.sleep(max(LOOK_SECONDS, SHARE * (time.monotonic() - began)))

    def look(self) -> None:
        """Compare with what was there the last time; the first time, only take note."""
        first, self._began = not self._began, True
        if first:
            self.floor = self._store.revision
        made = [change for source in self._sources for change in self._differences(source)]
        if first:
            made = []
        self._keep(made)
        grown = [observed.version(member.running) for member, observed in self._growing]
        if made or grown != self._grown:
            self._grown = grown
            for bell in self._bells:
                bell.set()

    def _differences(self, source: _Source) -> Iterator[EntryChange]:
        resource, observed = source.member.resource, source.observed
        try:
            version = observed.version(source.member.running)
            if version is not None and version == source.version:
                return
            listed = source.member.listed(self._store)
        except Exception:
            # Whoever lists them is told; nobody else is to suffer for it.
            log.exception("resources.not_observed", resource=resource.plural, domain=source.member.domain)
            return
        source.version = version
        before, source.known = source.known, {}
        for stored in listed:
            if not resource.shows(stored):
                continue
            name = stored.scope, stored.name
            matters, known = observed.matters(stored), before.get(name)
            if known is not None and known[0] == matters:
                source.known[name] = known
                continue
            after = Version(source.member, stored, objects.identity(resource, stored, self._store))
            source.known[name] = matters, after
            yield self._change(source, name, known[1] if known is not None else None, after)
        for name, (_, last) in before.items():
            if name not in source.known:
                yield self._change(source, name, last, None)

    def _change(
        self, source: _Source, name: _Name, before: Version | None, after: Version | None
    ) -> EntryChange:
        happened = EventType.ADDED if before is None else EventType.MODIFIED
        if after is None:
            happened = EventType.DELETED
        revision = self._store.revision
        change = EntryChange(revision, happened, self._store, entry=source.entry, before=before, after=after)
        key = f"{source.member.domain} {source.entry.resource.plural}", name
        if after is None:
            self._gone[key] = change
        else:
            self._gone.pop(key, None)
        return change

    def _keep(self, made: Sequence[EntryChange]) -> None:
        self._changes += made
        if (surplus := len(self._changes) - KEPT_CHANGES) > 0:
            self._base += surplus
            del self._changes[:surplus]
        while len(self._gone) > KEPT_GONE:
            del self._gone[next(iter(self._gone))]
            self.floor = self._store.revision


def _sources(catalogue: Catalogue) -> Iterator[_Source]:
    for entry, member, observed in _observed(catalogue):
        if member.resource.computed is not None:
            yield _Source(entry, member, observed)


def _growing(catalogue: Catalogue) -> Iterator[tuple[CatalogueMember, ObservedPart]]:
    for _, member, observed in _observed(catalogue):
        if member.resource.latest is not None:
            yield member, observed


def _observed(catalogue: Catalogue) -> Iterator[tuple[ResourceEntry, CatalogueMember, ObservedPart]]:
    for entry in catalogue.entries:
        for member in entry.members:
            observed = member.resource.observed
            if ResourceVerb.WATCH in member.resource.verbs and observed is not None:
                yield entry, member, observed


class GrowingFeed:
    """What one watcher is told of a resource that only grows, such as the audit log: from its durable record.

    Going on after a revision repeats what has that very revision, since several may have the same.
    """

    BATCH = 100
    MOST = 10_000
    """Read again at most for a watch that goes on: about 1 s."""

    def __init__(self, store: Store, entry: ResourceEntry) -> None:
        self._store = store
        self._entry = entry
        (self._member,) = entry.members
        self._told = 0
        self._version: Hashable = None

    def __repr__(self) -> str:
        return f"<GrowingFeed {self._entry.resource.plural} after={self._told}>"

    async def begin(self, after: int | None) -> bool:
        """Tell what comes from now on, or after a revision; whether that much can be read again."""
        newest = await self._latest(None, 1)
        self._told = int(newest[0].stored.name) if newest else 0
        if after is None or not newest:
            return True
        before: int | None = None
        for _ in range(self.MOST // self.BATCH):
            batch = await self._latest(before, self.BATCH)
            for one in batch:
                if one.stored.revision < after:
                    self._told = int(one.stored.name)
                    return True
                before = int(one.stored.name)
            if len(batch) < self.BATCH:
                self._told = (before or 1) - 1
                return self._told == 0  # older ones may have been archived
        return False

    async def fresh(self) -> list[EntryChange]:
        """What was not told yet, in order."""
        observed, resource = self._member.resource.observed, self._entry.resource
        version = None if observed is None else observed.version(self._member.running)
        if version is not None and version == self._version:
            return []
        found: list[Version] = []
        before: int | None = None
        while True:
            batch = await self._latest(before, self.BATCH)
            new = [one for one in batch if int(one.stored.name) > self._told]
            found += new
            if len(new) < self.BATCH:
                break
            before = int(new[-1].stored.name)
        if found:
            self._told = int(found[0].stored.name)
        if version == self._told:
            self._version = version  # else not everything can be read yet: ask again
        assert resource.latest is not None
        return [
            EntryChange(one.stored.revision, EventType.ADDED, self._store, entry=self._entry, after=one)
            for one in reversed(found)
        ]

    async def _latest(self, before: int | None, limit: int) -> list[Version]:
        resource = self._member.resource
        assert resource.latest is not None
        return [
            Version(self._member, one, objects.identity(resource, one, self._store))
            for one in await resource.latest(self._member.running, before, limit)
        ]
