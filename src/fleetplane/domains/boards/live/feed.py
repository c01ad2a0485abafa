"""Events of boards, made once and posted to the mailbox of every listener that wants them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import psutil

from fleetplane.domains.boards.kinds import BOARD, CLUSTER, SCOPE
from fleetplane.domains.boards.live.events import BoardEvent, SentStates, Topic, system_metrics
from fleetplane.domains.boards.pins.kinds import GPIO_DEVICE
from fleetplane.fleet.feeds.mailbox import Mailbox
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Store

SYSTEM_SECONDS = 10.0
"""Between two messages about the server itself, while somebody wants them."""
KINDS: Collection[AnyKind] = (CLUSTER, BOARD, GPIO_DEVICE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeedClient:
    """One client of the feed."""

    wants: Callable[[Topic], bool]
    mailbox: Mailbox[BoardEvent]


class EventFeed:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._memory = SentStates()
        self._listeners: set[FeedClient] = set()
        self.posted = 0
        """Events posted so far."""

    def __repr__(self) -> str:
        return f"<EventFeed listeners={len(self._listeners)} posted={self.posted}>"

    @contextmanager
    def joined(self, listener: FeedClient) -> Iterator[None]:
        self._listeners.add(listener)
        try:
            yield
        finally:
            self._listeners.discard(listener)

    async def run(self) -> None:
        """Until cancelled."""
        async with Boundary() as tasks:
            for kind in KINDS:
                tasks.keep(f"boards/events/{kind.name}", partial(self._follow, kind))
            tasks.keep("boards/events/system", self._measure)

    async def _follow(self, kind: AnyKind) -> None:
        revision, found = self._store.snapshot(kind, SCOPE)
        self._memory.prime(found)
        async with self._store.watch(kind, SCOPE, after=revision) as watch:
            async for batch in watch:
                for event in batch.events:
                    for made in self._memory.events_of(event):
                        self._publish(made)

    async def _measure(self) -> None:
        process = psutil.Process()
        process.cpu_percent()  # the first answer is about nothing
        while True:
            await self._clock.sleep(SYSTEM_SECONDS)
            if not any(listener.wants(Topic.SYSTEM) for listener in self._listeners):
                continue
            self._publish(
                system_metrics(
                    cpu=process.cpu_percent(),
                    memory=round(process.memory_percent(), 3),
                    tasks=len(asyncio.all_tasks()),
                    at_ns=self._clock.now_ns(),
                )
            )

    def _publish(self, event: BoardEvent) -> None:
        self.posted += 1
        for listener in self._listeners:
            if listener.wants(event.topic):
                listener.mailbox.post(event)
