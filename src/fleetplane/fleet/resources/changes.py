"""Changes of every public resource, in the order of their revisions, for any number of watchers.

One task follows the store (`fleet/feeds/ring.py`) and makes every change once; an object is encoded when
somebody first wants it. What each object was called is remembered, so that a deletion is told to whoever
could see the object, although what named its scope may be gone already.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import msgspec

from fleetplane.fleet.feeds.ring import RING_EVENTS, WHOLE, EventRing
from fleetplane.fleet.feeds.state_events import StateChange, StateEvents
from fleetplane.fleet.resources import objects
from fleetplane.fleet.resources.catalogue import Catalogue, CatalogueMember, ResourceEntry
from fleetplane.fleet.resources.declaration import ResourceVerb, ViewReader
from fleetplane.fleet.resources.objects import ObjectIdentity
from fleetplane.kernel.boundary import contained
from fleetplane.kernel.events import Event, EventType
from fleetplane.kernel.identity.revocation import REVOCATION
from fleetplane.kernel.resources import AnyResource, Key, Kind, Resource, SpecT, StatusT
from fleetplane.kernel.store import Store

PACE_SECONDS = 0.02
"""Between two looks at the store: a busy writer is followed fifty times a second, whatever its pace."""
RECALLED_REVISIONS = 20_000
"""Of the log, read back at a start: at some 50 µs each, 1 s beside all else."""
_ENCODER = msgspec.json.Encoder()


class Version(msgspec.Struct, frozen=True, eq=False):
    """An object as it was after one change."""

    member: CatalogueMember
    stored: AnyResource
    called: ObjectIdentity


class EntryChange:
    """One change of one object; without an entry, of something that may end a watch."""

    part = 0

    def __init__(
        self,
        revision: int,
        type_: EventType,
        reading: ViewReader,
        *,
        entry: ResourceEntry | None = None,
        before: Version | None = None,
        after: Version | None = None,
        is_logged: bool = False,
    ) -> None:
        self.revision = revision
        self.type = type_
        self.entry = entry
        self.before = before
        """Of a deletion, the last version."""
        self.after = after
        """None if it is gone."""
        self.is_logged = is_logged
        """Read from the log, which does not have what was there before a modification."""
        self._reading = reading

    @cached_property
    def shown_before(self) -> Mapping[str, Any]:
        assert self.before is not None
        return _shown(self.before, self._reading)

    @cached_property
    def shown_after(self) -> Mapping[str, Any]:
        assert self.after is not None
        return _shown(self.after, self._reading)

    @cached_property
    def encoded_before(self) -> bytes:
        return _ENCODER.encode(self.shown_before)

    @cached_property
    def encoded_after(self) -> bytes:
        return _ENCODER.encode(self.shown_after)


def _shown(version: Version, reading: ViewReader) -> Mapping[str, Any]:
    return version.member.shown(version.stored, version.called, reading)


def _changed(
    stored: AnyResource, version: Version, before: Version | None, after: Version | None
) -> StateChange:
    return StateChange(
        member=version.member,
        called=version.called,
        revision=stored.revision,
        at_ns=stored.updated_at_ns,
        before=before.stored if before is not None else None,
        after=after.stored if after is not None else None,
    )


class _Then:
    """The store, with what was there at the event that is followed and is gone since then.

    The ring comes to an event a moment after it: what names the object's scope may be deleted by then, and
    whoever has listed the object in that moment waits for its deletion.
    """

    def __init__(self, store: Store, known: Mapping[Key, Version]) -> None:
        self._store = store
        self._known = known

    def get(self, kind: Kind[SpecT, StatusT], scope: str, name: str) -> Resource[SpecT, StatusT] | None:
        found = self._store.get(kind, scope, name)
        if found is None and (version := self._known.get(kind.key(scope, name))) is not None:
            return cast("Resource[SpecT, StatusT]", version.stored)
        return found

    def list(self, kind: Kind[SpecT, StatusT], scope: str = "") -> Sequence[Resource[SpecT, StatusT]]:
        return self._store.list(kind, scope)


class ChangeRing:
    """The ring of recent changes, and the log of older ones."""

    def __init__(
        self,
        store: Store,
        catalogue: Catalogue,
        *,
        states: StateEvents | None = None,
        ring_events: int = RING_EVENTS,
    ) -> None:
        """`states` is told of every change of a state."""
        self._states = states or StateEvents()
        self._began = store.revision
        self._store = store
        self._catalogue = catalogue
        self._known: dict[Key, Version] = {
            found.stored.key: Version(found.member, found.stored, found.called)
            for entry in catalogue.entries
            if ResourceVerb.WATCH in entry.resource.verbs and entry.resource.is_stored
            for found in entry.all(store)
        }
        self._then = _Then(store, self._known)
        self._kinds = kinds = (*catalogue.kinds, REVOCATION)
        self.ring: EventRing[EntryChange] = EventRing(
            store, kinds=kinds, events_of=self._followed, ring_events=ring_events, pace_seconds=PACE_SECONDS
        )
        self._log: EventRing[EntryChange] = EventRing(store, kinds=kinds, events_of=self._logged)

    def __repr__(self) -> str:
        return f"<Changes objects={len(self._known)} {self.ring!r}>"

    async def run(self) -> None:
        """Follow the store, until cancelled."""
        await self.ring.run()

    @property
    def complete_until(self) -> int:
        """Up to which revision everything public is, or was, in the ring: others may have changed since."""
        if all(self._store.kind_revision(kind) <= self.ring.revision for kind in self._kinds):
            return max(self.ring.revision, self._store.revision)
        return self.ring.revision

    async def logged(self, after: int, until: int) -> AsyncGenerator[EntryChange]:
        """Changes after a revision up to another, from the database; raises `Compacted`."""
        async for change in self._log.history((after, WHOLE), until):
            yield change

    def _followed(self, event: Event) -> Iterator[EntryChange]:
        """The change that an event is, with what was there before; asked once for each event, in order."""
        stored = event.resource
        if stored.kind == REVOCATION.name:
            yield EntryChange(event.revision, event.type, self._store)
            return
        entry, member = self._catalogue.by_kind[stored.kind]
        before = self._known.pop(stored.key, None)
        after = None
        if event.type is not EventType.DELETED and member.resource.shows(stored):
            called = objects.identity(member.resource, stored, self._then)
            self._known[stored.key] = after = Version(member, stored, called)
        if (found := after or before) is not None:
            with contained("fleetwide/state-events", stored.key):
                self._states.note(_changed(stored, found, before, after))
            yield EntryChange(
                event.revision, event.type, self._store, entry=entry, before=before, after=after
            )

    async def recall(self) -> None:
        """Make the events of states of before this process from the log, as far as it goes back."""
        after = max(self._store.statistics().compacted, self._began - RECALLED_REVISIONS)
        known: dict[Key, Version] = {}
        found: list[StateChange] = []
        async for change in self.logged(after, self._began):
            version = change.after or change.before
            if version is None or version.member.resource.state is None:
                continue
            before = known.pop(version.stored.key, None)
            if change.after is not None:
                known[version.stored.key] = change.after
            if before is not None or change.type is EventType.ADDED:
                found.append(_changed(version.stored, version, before, change.after))
        self._states.recalled(found)

    def _logged(self, event: Event) -> Iterator[EntryChange]:
        stored = event.resource
        found = self._catalogue.by_kind.get(stored.kind)
        if found is None:
            return
        entry, member = found
        if stored.spec is None or not member.resource.shows(stored):
            return
        version = Version(member, stored, objects.identity(member.resource, stored, self._store))
        gone = event.type is EventType.DELETED
        yield EntryChange(
            event.revision,
            event.type,
            self._store,
            entry=entry,
            before=version if gone else None,
            after=None if gone else version,
            is_logged=True,
        )
