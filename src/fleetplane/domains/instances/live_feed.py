"""A tenant's groups and instances as server-sent events, for pages that stay open.

    reset                everything known so far is void; every instance follows
    instance             one instance, as it is now
    instance_deleted     one whose record is gone
    health               how some instances are, by id, where that changed
    groups               all groups, in place of those known so far
    group, group_deleted one that changed, or is gone
    errors               the latest errors, in place of those known so far
    now                  the end of everything up to a revision of the store, which is its mark

Instances are told from the store's own watch: who comes back with a mark is told what happened
since, also across a restart of the server, and everything anew if that is no longer kept.
Groups, health and errors follow from more than the store; they are told by difference from what
the reader was told on this connection, and whole when it begins.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager

from fleetplane.domains.instances import views
from fleetplane.domains.instances.error_feed import ErrorFeed
from fleetplane.domains.instances.kinds import INSTANCE, Instance, tenant_scope
from fleetplane.domains.instances.overview import Overview
from fleetplane.domains.instances.views import Health, ShownError, ShownGroup
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Compacted, ResourceExhausted, Unauthenticated, Unavailable
from fleetplane.kernel.store import Store
from fleetplane.kernel.watch import Event, EventType, Watch
from fleetplane.web.streaming import event as block
from fleetplane.web.times import spelled

TICK_SECONDS = 1.0
"""How late a change that is not in the store, such as a freeze that ran out, may be told."""
BEAT_SECONDS = 5.0
"""How often an idle reader gets a new mark, and its token is looked at again. Over HTTP/1 one who left is
noticed when something is sent, so this is also how long they count."""
GATHER_SECONDS = 0.1
"""Between two tellings: a group that grows to 500 tells of it ten times a second."""
STREAMS_LIMIT = 64
"""Open for one tenant; a page has one."""
SLICE = 200
"""Instances in one piece of a snapshot: about 100 kB."""
ERRORS_SHOWN = 50
MARK_DIGITS = 18
"""A revision has no more."""


class LiveFeed:
    def __init__(self, store: Store, overview: Overview, errors: ErrorFeed, clock: Clock) -> None:
        self._store = store
        self._overview = overview
        self._errors = errors
        self._clock = clock
        self._open: dict[str, int] = {}
        self._watches: set[Watch] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<LiveFeed open={self.open_streams}>"

    @property
    def open_streams(self) -> int:
        return sum(self._open.values())

    def close(self) -> None:
        """End every stream now; readers come back by themselves."""
        self._closed = True
        for watch in list(self._watches):
            watch.close()

    def follow(self, tenant: str, *, mark: str, check: Callable[[], None]) -> AsyncGenerator[bytes]:
        """Everything after a mark; `check` raises `Unauthenticated` once the reader may not read on."""
        if self._closed:
            raise Unavailable("the server is shutting down; come back later")
        if self._open.get(tenant, 0) >= STREAMS_LIMIT:
            raise ResourceExhausted(
                f"{STREAMS_LIMIT} streams are open for this tenant, the most there may be"
            )
        return self._followed(tenant, revision_of(mark), check)

    async def _followed(
        self, tenant: str, after: int | None, check: Callable[[], None]
    ) -> AsyncGenerator[bytes]:
        with self._counted(tenant):
            while True:
                try:
                    async with aclosing(self._from(tenant, after, check)) as chunks:
                        async for chunk in chunks:
                            yield chunk
                except Compacted:  # at once, or by one who reads more slowly than history is forgotten
                    after = None
                except (Unauthenticated, Unavailable):
                    return  # the reader learns why when it comes back

    async def _from(self, tenant: str, after: int | None, check: Callable[[], None]) -> AsyncGenerator[bytes]:
        told = Told(tenant, self._overview)
        scope = tenant_scope(tenant)
        if after is None:
            after, present = self._store.snapshot(INSTANCE, scope)
            yield block("reset", {})
            for start in range(0, len(present), SLICE):
                yield b"".join(told.snapshot(present[start : start + SLICE]))
        with self._watching(scope, after) as watch:
            idle_seconds, beat_ns = 0.0, 0  # at first whatever was missed, and then a mark in any case
            while True:
                batch = await watch.next(idle_seconds=idle_seconds)
                news = [*self._news(told, batch.events)]
                if news or self._clock.now_ns() - beat_ns >= BEAT_SECONDS * 1e9:
                    beat_ns = self._clock.now_ns()
                    check()
                    yield b"".join([*news, self._now(batch.revision)])
                if batch.events:
                    await self._clock.sleep(GATHER_SECONDS)
                idle_seconds = TICK_SECONDS

    def _news(self, told: Told, events: Iterable[Event]) -> Iterator[bytes]:
        yield from told.instances(events)
        yield from told.groups()
        yield from told.health()
        yield from told.errors(self._errors)

    def _now(self, revision: int) -> bytes:
        return block("now", {"at": spelled(self._clock.now_ns())}, mark=str(revision))

    @contextmanager
    def _watching(self, scope: str, after: int) -> Iterator[Watch]:
        with self._store.watch(INSTANCE, scope, after=after) as watch:
            self._watches.add(watch)
            try:
                yield watch
            finally:
                self._watches.discard(watch)

    @contextmanager
    def _counted(self, tenant: str) -> Iterator[None]:
        self._open[tenant] = self._open.get(tenant, 0) + 1
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]


class Told:
    """What one reader was told on one connection, and the difference from what is."""

    def __init__(self, tenant: str, overview: Overview) -> None:
        self._tenant = tenant
        self._overview = overview
        self._groups: dict[str, ShownGroup] | None = None
        self._health: dict[str, Health] = {}
        self._seen_health: Mapping[str, Health] | None = None
        self._errors: Sequence[ShownError] | None = None
        self._errors_told = -1

    def snapshot(self, present: Iterable[Instance]) -> Iterator[bytes]:
        for instance in present:
            yield self._instance(instance)

    def instances(self, events: Iterable[Event]) -> Iterator[bytes]:
        for event in events:
            if event.type is EventType.DELETED:
                self._health.pop(event.resource.name, None)
                yield block("instance_deleted", {"id": event.resource.name})
            else:
                yield self._instance(event.resource)

    def _instance(self, instance: Instance) -> bytes:
        shown = self._overview.instance(instance)
        self._health[shown.id] = shown.health
        return block("instance", shown)

    def health(self) -> Iterator[bytes]:
        found = self._overview.healths(self._tenant)
        if found is self._seen_health:
            return
        self._seen_health = found
        changed = {name: word for name, word in found.items() if self._health.get(name) != word}
        if changed:
            self._health |= changed
            yield block("health", changed)

    def groups(self) -> Iterator[bytes]:
        current = {group.name: group for group in self._overview.groups(self._tenant)}
        before, self._groups = self._groups, current
        if before is None:
            yield block("groups", list(current.values()))
            return
        for name in before.keys() - current.keys():
            yield block("group_deleted", {"name": name})
        for name, group in current.items():
            if before.get(name) != group:
                yield block("group", group)

    def errors(self, feed: ErrorFeed) -> Iterator[bytes]:
        if feed.told == self._errors_told:
            return
        self._errors_told = feed.told
        latest = [views.error(trouble) for trouble in feed.recent(self._tenant, ERRORS_SHOWN)]
        if latest != self._errors:
            self._errors = latest
            yield block("errors", latest)


def revision_of(mark: str) -> int | None:
    """The revision that a reader has seen; None for a mark that is none of ours."""
    return int(mark) if mark.isdecimal() and mark.isascii() and len(mark) <= MARK_DIGITS else None
