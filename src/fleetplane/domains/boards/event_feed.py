"""What happens to boards, worked out once and handed to every listener's mailbox.

Nobody's slowness delays the feed or another listener: a mailbox holds so many messages and then
forgets its oldest, and counts them, so that its listener can be told.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack

import psutil

from fleetplane.domains.boards.events import Memory, Told, Topic, system_metrics
from fleetplane.domains.boards.gpio_kinds import GPIO_DEVICE
from fleetplane.domains.boards.kinds import BOARD, CLUSTER, SCOPE
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Store
from fleetplane.kernel.watch import Watch

MAILBOX_LIMIT = 256
"""Messages waiting for one listener: about half a kilobyte each."""
SYSTEM_SECONDS = 10.0
"""Between two messages about the server itself, while somebody wants them."""
KINDS: Collection[AnyKind] = (CLUSTER, BOARD, GPIO_DEVICE)


class Mailbox:
    """What waits for one listener."""

    def __init__(self, wants: Callable[[Topic], bool], *, limit: int = MAILBOX_LIMIT) -> None:
        self._wants = wants
        self._limit = limit
        self._waiting: deque[Told | str] = deque()
        self._room = asyncio.Event()
        self.bell = asyncio.Event()
        """Set whenever there is something to do."""
        self.missed = 0
        """Forgotten since the listener was told last."""

    def __len__(self) -> int:
        return len(self._waiting)

    def wants(self, topic: Topic) -> bool:
        return self._wants(topic)

    def post(self, told: Told) -> None:
        """Never waits."""
        if not self._wants(told.topic):
            return
        if len(self._waiting) >= self._limit:
            self._waiting.popleft()
            self.missed += 1
        self._waiting.append(told)
        self.bell.set()

    async def put(self, text: str) -> None:
        """A message made for this listener alone, once there is room."""
        while len(self._waiting) >= self._limit:
            self._room.clear()
            await self._room.wait()
        self._waiting.append(text)
        self.bell.set()

    def take(self) -> Told | str | None:
        if not self._waiting:
            return None
        self._room.set()
        return self._waiting.popleft()

    def take_missed(self) -> int:
        missed, self.missed = self.missed, 0
        return missed


class EventFeed:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._memory = Memory()
        self._mailboxes: set[Mailbox] = set()
        self.told = 0
        """Messages worked out so far."""

    def __repr__(self) -> str:
        return f"<EventFeed listeners={len(self._mailboxes)} told={self.told}>"

    def join(self, mailbox: Mailbox) -> None:
        self._mailboxes.add(mailbox)

    def leave(self, mailbox: Mailbox) -> None:
        self._mailboxes.discard(mailbox)

    async def run(self) -> None:
        """Until cancelled."""
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            for kind in KINDS:
                # Primed before anyone can change anything: there is no wait between the two.
                revision, found = self._store.snapshot(kind, SCOPE)
                self._memory.prime(found)
                watch = await stack.enter_async_context(self._store.watch(kind, SCOPE, after=revision))
                tasks.create_task(self._follow(watch), name=f"boards/events/{kind.name}")
            tasks.create_task(self._measure(), name="boards/events/system")

    async def _follow(self, watch: Watch) -> None:
        async for batch in watch:
            for event in batch.events:
                for told in self._memory.told(event):
                    self._publish(told)

    async def _measure(self) -> None:
        process = psutil.Process()
        process.cpu_percent()  # the first answer is about nothing
        while True:
            await self._clock.sleep(SYSTEM_SECONDS)
            if not any(mailbox.wants(Topic.SYSTEM) for mailbox in self._mailboxes):
                continue
            self._publish(
                system_metrics(
                    cpu=process.cpu_percent(), memory=round(process.memory_percent(), 3),
                    tasks=len(asyncio.all_tasks()), at_ns=self._clock.now_ns(),
                )
            )  # fmt: skip

    def _publish(self, told: Told) -> None:
        self.told += 1
        for mailbox in self._mailboxes:
            mailbox.post(told)
