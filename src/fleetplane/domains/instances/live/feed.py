"""A tenant's groups and instances as server-sent events, for pages that stay open.

    reset                everything known so far is void; every instance follows
    instance             one instance, as it is now
    instance_deleted     one whose record is gone
    health               how some instances are, by id, where that changed
    groups               all groups, in place of those known so far
    group, group_deleted one that changed, or is gone
    errors               the latest errors, in place of those known so far
    now                  the end of everything up to a revision of the store, which is its mark

An instance that changed carries its own revision as its mark; those that are told as a whole after a
reset carry none, and `now` at their end is from where to go on.

Instances are told from the store's own watch: who comes back with a mark is told what happened
since, also across a restart of the server, and everything anew if that is no longer kept.
Groups, health and errors follow from more than the store; they are told by difference from what
the reader was told on this connection, and whole when it begins.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager

from fleetplane.domains.instances.kinds import INSTANCE, Instance, tenant_scope
from fleetplane.domains.instances.live.errors import ErrorFeed
from fleetplane.domains.instances.rest import views
from fleetplane.domains.instances.rest.overview import Overview
from fleetplane.domains.instances.rest.views import Health, ShownError, ShownGroup
from fleetplane.fleet.feeds.differences import Differences
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    Compacted,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import spelled
from fleetplane.kernel.watch import Event, EventType, Watch
from fleetplane.web.streaming import event as block

TICK_SECONDS = 1.0
"""The longest delay of a change that is not in the store, such as an expired freeze."""
BEAT_SECONDS = 5.0
"""How often an idle reader gets a new mark, and its token is looked at again. Over HTTP/1 one who left is
noticed when something is sent, so this is also how long they count."""
GATHER_SECONDS = 0.1
"""Seconds between two messages: a group that grows to 500 sends ten a second."""
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
        """Everything after a mark; `check` raises once the reader may not read on."""
        if self._closed:
            raise Unavailable("the server is shutting down; try again later")
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
                except (PermissionDenied, Unauthenticated, Unavailable):
                    return  # the reader learns why when it comes back

    async def _from(self, tenant: str, after: int | None, check: Callable[[], None]) -> AsyncGenerator[bytes]:
        sent = SentTables(tenant, self._overview)
        scope = tenant_scope(tenant)
        if after is None:
            after, present = self._store.snapshot(INSTANCE, scope)
            yield block("reset", {})
            for start in range(0, len(present), SLICE):
                yield b"".join(sent.snapshot(present[start : start + SLICE]))
        with self._watching(scope, after) as watch:
            idle_seconds, beat_ns = 0.0, 0  # at first whatever was missed, and then a mark in any case
            while True:
                batch = await watch.next(idle_seconds=idle_seconds)
                news = [*self._news(sent, batch.events)]
                if news or self._clock.now_ns() - beat_ns >= BEAT_SECONDS * 1e9:
                    beat_ns = self._clock.now_ns()
                    check()
                    yield b"".join([*news, self._now(batch.revision)])
                if batch.events:
                    await self._clock.sleep(GATHER_SECONDS)
                idle_seconds = TICK_SECONDS

    def _news(self, sent: SentTables, events: Iterable[Event]) -> Iterator[bytes]:
        yield from sent.instances(events)
        yield from sent.groups()
        yield from sent.health()
        yield from sent.errors(self._errors)

    def _now(self, revision: int) -> bytes:
        return block("now", {"at": spelled(self._clock.now_ns())}, mark=str(revision))

    @contextmanager
    def _watching(self, scope: str, after: int) -> Iterator[Watch]:
        with self._store.watch(INSTANCE, scope, after=after) as watch:
            if self._closed:  # while the snapshot was sent: nobody would end this watch
                raise Unavailable("the server is shutting down; try again later")
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


class SentTables:
    """What one reader was sent on one connection, as tables that are sent by difference."""

    def __init__(self, tenant: str, overview: Overview) -> None:
        self._tenant = tenant
        self._overview = overview
        self._groups: Differences[str, ShownGroup] = Differences()
        self._health: Differences[str, Health] = Differences()
        self._errors: Sequence[ShownError] | None = None
        self._errors_told = -1

    def snapshot(self, present: Iterable[Instance]) -> Iterator[bytes]:
        for instance in present:
            yield self._instance(instance)

    def instances(self, events: Iterable[Event]) -> Iterator[bytes]:
        for event in events:
            if event.type is EventType.DELETED:
                self._health.forget(event.resource.name)
                yield block("instance_deleted", {"id": event.resource.name}, mark=str(event.revision))
            else:
                yield self._instance(event.resource, mark=str(event.revision))

    def _instance(self, instance: Instance, *, mark: str = "") -> bytes:
        shown = self._overview.instance(instance)
        self._health.put(shown.id, shown.health)
        return block("instance", shown, mark=mark)

    def health(self) -> Iterator[bytes]:
        if changed := self._health.changed(self._overview.healths(self._tenant)):
            yield block("health", changed)

    def groups(self) -> Iterator[bytes]:
        current = {group.name: group for group in self._overview.groups(self._tenant)}
        if self._groups.is_new:
            self._groups.changed(current)
            yield block("groups", list(current.values()))
            return
        for name in self._groups.gone(current):
            yield block("group_deleted", {"name": name})
        for group in self._groups.changed(current).values():
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
