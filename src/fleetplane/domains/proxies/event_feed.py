"""All events of this server, in the order of their revisions, for any number of listeners.

One task watches the store and works every event out once. Listeners read at their own pace from
a ring; whoever falls off it is told how far they got, and can have what they missed from the
store's history. No listener can delay the feed or another listener.
"""

from __future__ import annotations

import asyncio
import heapq
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from fleetplane.domains.proxies import events
from fleetplane.domains.proxies.events import Told, told
from fleetplane.domains.proxies.kinds import (
    CONFIG_PART,
    CONFIG_VERSION,
    ConfigVersionSpec,
    PartSpec,
    version_name,
)
from fleetplane.kernel.events import Event
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Store
from fleetplane.kernel.watch import Batch, Watch

RING_EVENTS = 8192
"""Kept in memory for listeners: about 1 KB each, 8 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """A listener was too slow, and goes on after `revision`."""

    revision: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    told: Sequence[Told]
    position: int


class EventFeed:
    def __init__(self, store: Store, *, ring_events: int = RING_EVENTS) -> None:
        self._store = store
        self._limit = ring_events
        self._ring: list[Told] = []
        self._base = 0
        """The position of `_ring[0]`; positions count events since the feed began."""
        self._floor = store.revision
        """Everything after this revision is in the ring."""
        self.revision = store.revision
        """Everything up to here has been told."""
        self._bells: set[asyncio.Event] = set()

    def __repr__(self) -> str:
        return f"<EventFeed revision={self.revision} ring={len(self._ring)} listeners={len(self._bells)}>"

    # Reading.

    @property
    def position(self) -> int:
        """Where one stands who wants only what comes."""
        return self._base + len(self._ring)

    def position_after(self, revision: int) -> int | None:
        """Where one stands who had everything up to a revision; None if the ring begins later."""
        if revision < self._floor:
            return None
        return self._base + bisect_right(self._ring, revision, key=_revision_of)

    def read(self, position: int, *, limit: int) -> Reading | Missed:
        if position < self._base:
            return Missed(revision=self.revision, position=self.position)
        start = position - self._base
        found = self._ring[start : start + limit]
        return Reading(told=found, position=position + len(found))

    @contextmanager
    def bell(self) -> Iterator[asyncio.Event]:
        """Set whenever there is something new."""
        bell = asyncio.Event()
        self._bells.add(bell)
        try:
            yield bell
        finally:
            self._bells.discard(bell)

    async def history(self, after: int, until: int) -> AsyncIterator[Told]:
        """Events after one revision up to another, from the database; raises `Compacted`."""
        pages = [_Pages(self._store, kind, rank, after, until) for rank, kind in enumerate(events.KINDS)]
        heads = [head for page in pages if (head := await page.next()) is not None]
        heapq.heapify(heads)
        while heads:
            head = heads[0]
            for one in told(head.event, self):
                yield one
            following = await pages[head.rank].next()
            if following is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, following)

    # Following the store.

    async def run(self) -> None:
        """Until cancelled."""
        with ExitStack() as stack:
            watches = [
                stack.enter_context(self._store.watch(kind, after=self.revision)) for kind in events.KINDS
            ]
            waiting: list[Event] = []
            while True:
                batches = await _anything(watches)
                until = self._store.revision
                batches += await _all_up_to(watches, until)
                waiting += [event for batch in batches for event in batch.events]
                # What is newer than `until` may have company that its watch has not brought yet.
                ready = [event for event in waiting if event.revision <= until]
                waiting = [event for event in waiting if event.revision > until]
                self._publish(ready, until)

    def _publish(self, ready: list[Event], until: int) -> None:
        ready.sort(key=lambda event: (event.revision, _RANKS[event.resource.kind]))
        made = [one for event in ready for one in told(event, self)]
        self._ring += made
        self.revision = until
        if (surplus := len(self._ring) - self._limit) > 0:
            self._floor = self._ring[surplus - 1].revision
            self._base += surplus
            del self._ring[:surplus]
        if made:
            for bell in self._bells:
                bell.set()

    # What versions say, for events that are about the difference.

    def version(self, scope: str, number: int) -> ConfigVersionSpec | None:
        found = self._store.get(CONFIG_VERSION, scope, version_name(number))
        return found.spec if found is not None else None

    def part(self, scope: str, name: str) -> PartSpec | None:
        found = self._store.get(CONFIG_PART, scope, name)
        return found.spec if found is not None else None


_RANKS = {kind.name: rank for rank, kind in enumerate(events.KINDS)}


def _revision_of(one: Told) -> int:
    return one.revision


async def _anything(watches: Sequence[Watch]) -> list[Batch]:
    """Wait until one of them has something. A wait that is taken back loses nothing."""
    tasks = [asyncio.ensure_future(watch.next()) for watch in watches]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
    return [result for result in results if isinstance(result, Batch)]


async def _all_up_to(watches: Sequence[Watch], revision: int) -> list[Batch]:
    batches = []
    for watch in watches:
        while watch.revision < revision:
            batches.append(await watch.next(idle_seconds=0))
    return batches


@dataclass(frozen=True, slots=True, order=True)
class _Head:
    """The next event of one kind."""

    revision: int
    rank: int
    event: Event


class _Pages:
    """The logged events of one kind, page by page."""

    def __init__(self, store: Store, kind: AnyKind, rank: int, after: int, until: int) -> None:
        self._store = store
        self._kind = kind.name
        self._rank = rank
        self._after = after
        self._until = until
        self._page: list[Event] = []

    async def next(self) -> _Head | None:
        while not self._page and self._after < self._until:
            page = await self._store.history(self._kind, "", after=self._after, until=self._until)
            self._after = page.revision
            self._page = list(reversed(page.events))
        if not self._page:
            return None
        event = self._page.pop()
        return _Head(event.revision, self._rank, event)
