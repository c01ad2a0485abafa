"""Every change after a revision, in order, for any number of watchers.

A watcher is a cursor into one ring of recent events shared by all, plus at most one waiting
future. Publishing appends to the ring and wakes those who wait for that kind and scope;
nothing is queued per watcher, so nobody's slowness costs a writer or another watcher
anything, and a thousand watchers cost a thousand wake-ups and one shared batch. Those that have a sink
are not even woken: what happened is prepared once for all of them and handed to each.

Where a watcher is served from depends on how far behind it is:

    within the ring, close    every event
    within the ring, far      the last state of each object (coalesced by key)
    fallen off the ring       the last state of each object, from the memory view and tombstones
    before all of these       every event, page by page, from the database's log
    before the log            `Compacted`

Decides what a watcher sees and when; does not know transports, nor how history is stored.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import iscoroutine
from types import TracebackType
from typing import Any, Protocol, Self

from fleetplane.kernel.access import covers
from fleetplane.kernel.errors import Compacted, ResourceExhausted, Unavailable
from fleetplane.kernel.events import Event, EventBatch, EventPage, EventType, coalesce, enclosing, revision_of
from fleetplane.kernel.resources import AnyResource

SHARED_BATCHES_LIMIT = 256
"""Batches kept for watchers at the same place; watchers of one state share one."""

Sink = Callable[[Any], Awaitable[None] | None]
"""Takes what its audience prepared, without waiting: None when done, else what the consumer must await
before the next."""

_NOTHING = EventBatch(revision=0)
"""What a watch takes that has seen everything."""

__all__ = [
    "Audience",
    "Event",
    "EventBatch",
    "EventPage",
    "EventType",
    "Hub",
    "Sink",
    "Source",
    "Watch",
    "WatchLimits",
    "coalesce",
    "enclosing",
]


class Audience:
    """Watchers whose sinks are handed the same: here, the batch as it is."""

    def prepare(self, batch: EventBatch) -> Any:
        """What each sink is given of a batch; called once for all that are told of it."""
        return batch

    def told(self, batch: EventBatch, sinks: int) -> None:
        """So many sinks more were given it."""


_PLAIN = Audience()


class Source(Protocol):
    """Where a watcher looks when the ring does not reach back far enough."""

    def changed_since(self, kind: str, scope: str, revision: int) -> Iterable[AnyResource]:
        """Live resources changed after `revision`."""
        ...

    async def history(self, kind: str, scope: str, *, after: int, until: int) -> EventPage:
        """Logged events; raises `Compacted` if some after `after` are no longer kept."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    ring_events: int = 4096
    """Recent events held in memory; at about 1 KB each, 4 MB shared by all watchers."""
    coalesce_after_events: int = 256
    """A watcher further behind than this many events of its own gets only last states."""
    tombstones: int = 4096
    """Deletions remembered for watchers that fell off the ring."""
    watchers: int = 16_384


class Hub:
    """The ring, the tombstones and those who wait."""

    def __init__(self, source: Source, limits: WatchLimits, *, revision: int, compacted: int) -> None:
        self.limits = limits
        self.revision = revision
        self.compacted = compacted
        """Every event after this revision is still kept somewhere."""
        self.closed = False
        self.watchers = 0
        self.coalesced = 0
        """Events that slow watchers were spared."""
        self.refilled = 0
        """Times that a watcher had fallen off the ring and was served from the memory view."""
        self._source = source
        self._events: list[Event] = []
        self._base = 0
        """The position of `_events[0]`; positions count events since the hub began."""
        self._floor = revision
        """Cursors at or above this revision find everything they need in the ring."""
        self._tombstones: deque[AnyResource] = deque()
        self._tombstone_floor = revision
        self._waiting: dict[str, dict[str, dict[Watch, None]]] = {}
        self._shared: dict[tuple[str, str, int], EventBatch] = {}

    def __repr__(self) -> str:
        return f"<Hub revision={self.revision} ring={len(self._events)} watchers={self.watchers}>"

    @property
    def ring_length(self) -> int:
        return len(self._events)

    @property
    def tombstone_count(self) -> int:
        return len(self._tombstones)

    def open(self, kind: str, scope: str, after: int | None) -> Watch:
        if self.closed:
            raise Unavailable("the store is closed")
        if self.watchers >= self.limits.watchers:
            raise ResourceExhausted(f"{self.watchers} watches are open, the most there may be")
        cursor = self.revision if after is None else after
        if cursor > self.revision:
            raise Compacted(f"revision {cursor} is in the future; the newest is {self.revision}")
        if cursor < self.compacted:
            raise Compacted(f"revision {cursor} is no longer kept; history begins after {self.compacted}")
        self.watchers += 1
        return Watch(self, kind, scope, cursor)

    def publish(self, events: Sequence[Event], revision: int) -> None:
        """Make whole transactions, now durable, known to all; `revision` is that of the last."""
        start, before = self._base + len(self._events), self.revision
        self.revision = revision
        self._shared.clear()
        self._events.extend(events)
        self._tombstones.extend(event.resource for event in events if event.type is EventType.DELETED)
        self._trim()
        touched = dict.fromkeys([(event.resource.kind, event.resource.scope) for event in events])
        waiting = {
            (kind, around): scopes[around]
            for kind, scope in touched
            if (scopes := self._waiting.get(kind))
            for around in enclosing(scope)
            if around in scopes
        }
        for (kind, scope), watches in waiting.items():
            self._tell(kind, scope, watches, start, before)
            if not watches and self._waiting[kind].get(scope) is watches:
                del self._waiting[kind][scope]

    def _tell(self, kind: str, scope: str, watches: dict[Watch, None], position: int, revision: int) -> None:
        """Tell those who wait of what happened at `position`; whoever was handed it waits on where it is."""
        batch = self._since(kind, scope, position) if position >= self._base else _NOTHING
        messages: dict[Audience, Any] = {_PLAIN: batch}
        audience, message, sinks = _PLAIN, batch, 0
        for watch in tuple(watches):
            sink = watch._sink
            if sink is None or watch._wait is None or batch is _NOTHING:
                watches.pop(watch, None)
                watch._wake(position, revision)
                continue
            try:
                if watch._audience is not audience:
                    if watch._audience not in messages:
                        messages[watch._audience] = watch._audience.prepare(batch)
                    audience.told(batch, sinks)
                    audience, message, sinks = watch._audience, messages[watch._audience], 0
                sinks += 1
                if (owed := sink(message)) is None:
                    continue
                watch._owed = owed
            except Exception as error:
                watch._failure = error
            watches.pop(watch, None)
            watch._wake(self._base + len(self._events), batch.revision)
        audience.told(batch, sinks)

    def _trim(self) -> None:
        if (surplus := len(self._events) - self.limits.ring_events) > 0:
            self._floor = self._events[surplus - 1].revision
            self._base += surplus
            del self._events[:surplus]
        while len(self._tombstones) > self.limits.tombstones:
            self._tombstone_floor = self._tombstones.popleft().revision

    def close(self) -> None:
        self.closed = True
        waiting, self._waiting = self._waiting, {}
        for scopes in waiting.values():
            for watches in scopes.values():
                for watch in watches:  # which has everything until now, and nothing of what is still applied
                    watch._wake(self._base + len(self._events), self.revision)

    # What watches ask.

    def _park(self, watch: Watch) -> None:
        try:
            self._waiting[watch.kind][watch.scope][watch] = None
        except KeyError:  # the first to wait here since the last event
            self._waiting.setdefault(watch.kind, {})[watch.scope] = {watch: None}

    def _leave(self, watch: Watch) -> None:
        self.watchers -= 1
        scopes = self._waiting.get(watch.kind, {})
        watches = scopes.get(watch.scope, {})
        watches.pop(watch, None)
        if not watches:
            scopes.pop(watch.scope, None)

    def _position(self, revision: int) -> int | None:
        """Where a cursor at `revision` stands in the ring, or None if the ring begins later."""
        if revision < self._floor:
            return None
        return self._base + bisect_right(self._events, revision, key=revision_of)

    def _since(self, kind: str, scope: str, position: int) -> EventBatch:
        """Everything in the ring from `position`, which must not have fallen off."""
        at = (kind, scope, position)
        batch = self._shared.get(at)
        if batch is None:
            events: list[Event] = [
                event
                for event in self._events[position - self._base :]
                if event.resource.kind == kind and covers(scope, event.resource.scope)
            ]
            if len(events) > self.limits.coalesce_after_events:
                events = self._spare(events)
            batch = EventBatch(revision=self.revision, events=events)
            if len(self._shared) < SHARED_BATCHES_LIMIT:
                self._shared[at] = batch
        return batch

    def _spare(self, events: list[Event]) -> list[Event]:
        kept = coalesce(events)
        self.coalesced += len(events) - len(kept)
        return kept

    def _refill(self, kind: str, scope: str, cursor: int) -> EventBatch | None:
        """What changed since `cursor`, from the memory view; None if deletions are forgotten."""
        if cursor < self._tombstone_floor:
            return None
        self.refilled += 1
        events = [
            Event(type=EventType.DELETED, resource=last, revision=last.revision)
            for last in self._tombstones
            if last.created_revision <= cursor < last.revision
            and last.kind == kind
            and covers(scope, last.scope)
        ]
        for resource in self._source.changed_since(kind, scope, cursor):
            unseen = resource.created_revision > cursor
            sort = EventType.ADDED if unseen else EventType.MODIFIED
            events.append(Event(type=sort, resource=resource, revision=resource.revision))
        events.sort(key=revision_of)
        return EventBatch(revision=self.revision, events=events)


class Watch:
    """One watcher: take batches with `next()` or by iterating, one consumer at a time."""

    __slots__ = (
        "_audience",
        "_closed",
        "_deadline",
        "_failure",
        "_hub",
        "_loop",
        "_owed",
        "_parked",
        "_position",
        "_replaying",
        "_revision",
        "_sink",
        "_timer",
        "_wait",
        "kind",
        "scope",
    )

    def __init__(self, hub: Hub, kind: str, scope: str, cursor: int) -> None:
        self.kind = kind
        self.scope = scope
        self._revision = cursor
        self._hub = hub
        self._position = hub._position(cursor)
        self._replaying = self._position is None
        self._parked = False
        """Caught up, and listed with the hub: it has everything until the hub wakes it."""
        self._wait: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sink: Sink | None = None
        self._audience = _PLAIN
        self._owed: Awaitable[None] | None = None
        self._failure: Exception | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<Watch {self.kind} scope={self.scope!r} revision={self.revision}>"

    @property
    def revision(self) -> int:
        """Everything up to here has been delivered."""
        return self._hub.revision if self._parked else self._revision

    async def next(self, *, idle_seconds: float | None = None) -> EventBatch:
        """The next events; or, after `idle_seconds` without any, a bookmark at the current revision."""
        if idle_seconds is None:
            return await self._next(None)
        return await self._next(asyncio.get_running_loop().time() + idle_seconds)

    async def _next(self, deadline: float | None) -> EventBatch:
        # One coroutine from the consumer down to the future it waits for: with a thousand
        # watchers, every one between them is resumed a thousand times per event.
        if self._wait is not None:
            raise RuntimeError(f"{self!r} has a consumer already")
        while True:
            if self._closed or self._hub.closed:
                self._check_open()
            if self._owed is not None or self._failure is not None:
                await self._settle_sink()
            batch = self._take()
            if batch is None:
                batch = await self._replay()
            if batch.events:
                return batch
            if self._replaying:
                continue
            wait = self._begin_wait(deadline)
            try:
                await wait
            finally:
                self._wait = None
            if self._parked:
                self._check_open()
                return EventBatch(revision=self.revision)

    def _take(self) -> EventBatch | None:
        """What memory can give; None if the database must be asked."""
        hub = self._hub
        if self._parked or self._position == hub._base + len(hub._events):
            return _NOTHING
        if self._replaying:
            self._position = hub._position(self.revision)
            self._replaying = self._position is None
            if self._replaying:
                return None
        position = self._position
        if position is not None and position >= hub._base:
            batch = hub._since(self.kind, self.scope, position)
        else:
            refill = hub._refill(self.kind, self.scope, self.revision)
            if refill is None:
                self._replaying = True
                return None
            batch = refill
        self._revision = batch.revision
        self._position = hub._base + len(hub._events)
        return batch

    async def _replay(self) -> EventBatch:
        """One page of history; the ring takes over as soon as it reaches back to the cursor."""
        hub = self._hub
        page = await hub._source.history(self.kind, self.scope, after=self.revision, until=hub.revision)
        self._revision = page.revision
        return EventBatch(revision=page.revision, events=page.events)

    def _begin_wait(self, deadline: float | None) -> asyncio.Future[None]:
        """What is done when the hub wakes this watch, or when the deadline comes: then it stays parked."""
        if not self._parked:
            self._hub._park(self)
            self._parked = True
        loop = self._loop
        if loop is None:
            self._loop = loop = asyncio.get_running_loop()
        self._wait = wait = loop.create_future()
        if deadline is not None:
            self._arm(loop, deadline)
        return wait

    def _arm(self, loop: asyncio.AbstractEventLoop, deadline: float) -> None:
        """See that the deadline is noticed. A timer is moved on only when it fires, not for each event."""
        self._deadline = deadline
        if self._timer is None or self._timer.when() > deadline:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(deadline, self._ring)

    def _ring(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        if self._wait is None or self._wait.done():
            return
        if loop.time() >= self._deadline:
            self._wait.set_result(None)
        else:
            self._timer = loop.call_at(self._deadline, self._ring)

    def _wake(self, position: int, revision: int) -> None:
        """Something happened at `position`, and nothing for this watch before it."""
        self._parked = False
        self._position = position
        self._revision = revision
        self._end()

    # Pushing.

    def push_to(self, sink: Sink, audience: Audience = _PLAIN) -> None:
        """Give `sink` what happens while the consumer waits in `next`, and let the consumer sleep on.

        The sink is called by whoever publishes, with what `audience` made of the batch for all whose
        watches have the same one. What it cannot finish, or raises, reaches the consumer: `next` awaits or
        raises it before anything else.
        """
        self._sink = sink
        self._audience = audience

    async def _settle_sink(self) -> None:
        owed, self._owed = self._owed, None
        if owed is not None:
            await owed
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _end(self) -> None:
        if self._wait is not None and not self._wait.done():
            self._wait.set_result(None)

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the watch is closed")
        if self._hub.closed:
            raise Unavailable("the store is closed")

    def close(self) -> None:
        """End the watch; a reader that waits for the next batch gets an error. May be called again."""
        if self._closed:
            return
        self._revision = self.revision  # what happens from now on is not delivered
        self._closed, self._parked, self._sink = True, False, None
        self._hub._leave(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if iscoroutine(self._owed):  # never begun
            self._owed.close()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EventBatch:
        if self._closed:
            raise StopAsyncIteration
        try:
            return await self._next(None)
        except Unavailable:
            if self._closed:
                raise StopAsyncIteration from None
            raise
