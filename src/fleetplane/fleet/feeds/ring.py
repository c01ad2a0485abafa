"""Events of several kinds in the order of their revisions, kept in a ring; resumable by revision.

One task watches the store and makes every event once. Readers read at their own pace from the ring; a reader
that falls behind it learns how far it got, and can read what it missed from the store's history. No reader
delays the ring or another reader.
"""

from __future__ import annotations

import asyncio
import heapq
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from fleetplane.kernel.events import Event
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Store
from fleetplane.kernel.watch import EventBatch, Watch

REACH_LOOK_SECONDS = 0.02
RING_EVENTS = 8192
"""Kept in memory for readers: about 1 KB each, 8 MB."""

Place = tuple[int, int]
"""A revision, and which of the events that its change means."""
WHOLE = 1 << 16
"""In a place: all of them."""
UNKNOWN_PART = -1
"""In a place: the reader knows the revision only. Of several events all are repeated, so none is lost."""


class RingEvent(Protocol):
    """An event that knows its place."""

    @property
    def revision(self) -> int: ...

    @property
    def part(self) -> int:
        """Which of the events that the same change means, from 0."""
        ...


E = TypeVar("E", bound=RingEvent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """A reader was too slow, and goes on after `revision`."""

    revision: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RingRead(Generic[E]):
    events: Sequence[E]
    position: int


class EventRing(Generic[E]):
    def __init__(
        self,
        store: Store,
        *,
        kinds: Sequence[AnyKind],
        events_of: Callable[[Event], Iterator[E]],
        ring_events: int = RING_EVENTS,
        pace_seconds: float = 0.0,
    ) -> None:
        """`events_of` makes the events of one change; of one revision, `kinds` come in their order.

        With `pace_seconds`, the ring rests that long after each look at the store, so that following a busy
        one costs little.
        """
        self._pace_seconds = pace_seconds
        self._store = store
        self._kinds = tuple(kinds)
        self._ranks = {kind.name: rank for rank, kind in enumerate(self._kinds)}
        self._events_of = events_of
        self._limit = ring_events
        self._ring: list[E] = []
        self._base = 0
        """The position of `_ring[0]`; positions count events since the start."""
        self._floor: Place = (store.revision, WHOLE)
        """Everything after this place is in the ring."""
        self.revision = store.revision
        """Everything up to here is, or was, in the ring."""
        self._bells: set[asyncio.Event] = set()

    def __repr__(self) -> str:
        return f"<EventRing revision={self.revision} ring={len(self._ring)} readers={len(self._bells)}>"

    # Reading.

    @property
    def position(self) -> int:
        """The position of a reader that wants new events only."""
        return self._base + len(self._ring)

    def position_after(self, after: Place) -> int | None:
        """The position of a reader that had everything up to a place; None if the ring begins later."""
        if after < self._floor:
            return None
        revision, part = after
        behind = bisect_right(self._ring, (revision, WHOLE if part == UNKNOWN_PART else part), key=_place_of)
        first = bisect_left(self._ring, (revision, 0), key=_place_of)
        return self._base + (first if part == UNKNOWN_PART and behind - first > 1 else behind)

    def read(self, position: int, *, limit: int) -> RingRead[E] | Missed:
        if position < self._base:
            return Missed(revision=self.revision, position=self.position)
        start = position - self._base
        found = self._ring[start : start + limit]
        return RingRead(events=found, position=position + len(found))

    async def reached(self, revision: int) -> bool:
        """Wait for a revision that a reader knows from another server; False if it is not known here."""
        if revision <= self.revision:
            return True
        if not self._store.shared or not await self._store.reached(revision):
            return False
        # What it brought is on its way here; other kinds may have had the revisions since.
        while self.revision < revision and self._is_behind:
            await self._store.clock.sleep(REACH_LOOK_SECONDS)
        return True

    @property
    def _is_behind(self) -> bool:
        return any(self._store.kind_revision(kind) > self.revision for kind in self._kinds)

    @contextmanager
    def ringing(self, bell: asyncio.Event) -> Iterator[None]:
        """Set `bell` whenever there is something new."""
        self._bells.add(bell)
        try:
            yield
        finally:
            self._bells.discard(bell)

    async def history(self, after: Place, until: int) -> AsyncIterator[E]:
        """Events after a place up to a revision, from the database; raises `Compacted`."""
        begin = after[0] - 1 if after[1] < WHOLE else after[0]
        pages = [_Pages(self._store, kind, rank, begin, until) for rank, kind in enumerate(self._kinds)]
        heads = [head for page in pages if (head := await page.next()) is not None]
        heapq.heapify(heads)
        while heads:
            head = heads[0]
            for one in _unseen([*self._events_of(head.event)], after):
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
                stack.enter_context(self._store.watch(kind, after=self.revision)) for kind in self._kinds
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
                if self._pace_seconds:
                    await asyncio.sleep(self._pace_seconds)

    def _publish(self, ready: list[Event], until: int) -> None:
        ready.sort(key=lambda event: (event.revision, self._ranks[event.resource.kind]))
        made = [one for event in ready for one in self._events_of(event)]
        self._ring += made
        self.revision = until
        if (surplus := len(self._ring) - self._limit) > 0:
            self._floor = _place_of(self._ring[surplus - 1])
            self._base += surplus
            del self._ring[:surplus]
        if made:
            for bell in self._bells:
                bell.set()


def _place_of(one: RingEvent) -> Place:
    return one.revision, one.part


def _unseen(parts: Sequence[E], after: Place) -> Sequence[E]:
    """The events of one change that a reader lacks who had everything up to a place."""
    if after[1] == UNKNOWN_PART and len(parts) == 1:
        after = after[0], WHOLE
    return [one for one in parts if _place_of(one) > after]


async def _anything(watches: Sequence[Watch]) -> list[EventBatch]:
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
    return [result for result in results if isinstance(result, EventBatch)]


async def _all_up_to(watches: Sequence[Watch], revision: int) -> list[EventBatch]:
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
