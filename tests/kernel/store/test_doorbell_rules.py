"""When a doorbell rings and when it reads, on a bus in memory and in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from support.shared.virtual_loop import LoopClock, run

from fleetplane.kernel.errors import Unavailable
from fleetplane.kernel.store.notifiers.notifier import (
    IDLE_SECONDS,
    LAST_RETRY_SECONDS,
    BusKind,
    CommitNotifier,
    Heard,
    message,
)

LINEAGE = "a" * 32


class MemoryLine:
    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.cut = asyncio.Event()

    async def ring(self, message: bytes) -> None:
        self.sent.append(message)
        await self.gate.wait()

    async def check(self) -> None:
        await self.gate.wait()

    async def lost(self) -> str:
        await self.cut.wait()
        return "cut"


class MemoryBus:
    kind = BusKind.NATS

    def __init__(self) -> None:
        self.there = True
        self.tries = 0
        self.current = MemoryLine()

    @asynccontextmanager
    async def line(self, lineage: str, heard: Heard) -> AsyncIterator[MemoryLine]:
        self.tries += 1
        if not self.there:
            raise Unavailable("it is away")
        self.current = MemoryLine()
        yield self.current


class Rig:
    """A doorbell whose log ends at `head`, and whose memory has got to `known`."""

    def __init__(self) -> None:
        self.bus = MemoryBus()
        self.known = self.head = 0
        self.reads = 0
        clock = LoopClock(random.Random(1))
        self.bell = CommitNotifier(self.bus, LINEAGE, clock, known=lambda: self.known, read=self._read)

    async def _read(self) -> None:
        self.reads += 1
        await asyncio.sleep(0.001)
        self.known = self.head

    def hear(self, number: int) -> None:
        self.bell.heard(message(LINEAGE, number))


def with_rig(work: Callable[[Rig], Awaitable[None]]) -> None:
    async def both() -> None:
        rig = Rig()
        running = asyncio.create_task(rig.bell.run())
        await asyncio.sleep(1)
        try:
            await work(rig)
            assert not running.done()
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    run(both())


def test_after_each_connecting_the_log_is_read_once() -> None:
    async def work(rig: Rig) -> None:
        assert (rig.reads, rig.bell.state.connected) == (1, True)
        rig.head = 7  # rung while nobody listened
        rig.bus.current.cut.set()
        await asyncio.sleep(1)
        assert (rig.reads, rig.known, rig.bell.counts.connections) == (2, 7, 2)

    with_rig(work)


def test_one_message_is_under_way_at_a_time_and_the_next_has_the_newest_number() -> None:
    async def work(rig: Rig) -> None:
        rig.bus.current.gate.clear()
        for number in range(1, 101):
            rig.bell.ring(number)
            await asyncio.sleep(0.001)
        rig.bus.current.gate.set()
        await asyncio.sleep(0.1)
        assert rig.bus.current.sent == [message(LINEAGE, 1), message(LINEAGE, 100)]
        assert (rig.bell.counts.rung, rig.bell.counts.coalesced) == (2, 98)

    with_rig(work)


def test_what_is_known_is_not_read_again() -> None:
    async def work(rig: Rig) -> None:
        rig.known = rig.head = 9
        rig.hear(9)
        rig.hear(3)
        await asyncio.sleep(1)
        assert (rig.reads, rig.bell.counts.known) == (1, 2)

    with_rig(work)


def test_forged_numbers_cost_a_read_each_tenth_of_a_second_and_a_true_one_is_not_lost_among_them() -> None:
    async def work(rig: Rig) -> None:
        for _ in range(1000):
            rig.hear(10**15)
            await asyncio.sleep(0.001)
        assert rig.reads <= 2 + 1.2 / IDLE_SECONDS
        rig.head = 1
        rig.hear(1)
        await asyncio.sleep(2 * IDLE_SECONDS)
        assert rig.known == 1

    with_rig(work)


def test_a_bus_that_is_away_is_tried_ever_less_often() -> None:
    async def work(rig: Rig) -> None:
        rig.bus.there = False
        rig.bus.current.cut.set()
        await asyncio.sleep(3600)
        assert 3600 / LAST_RETRY_SECONDS <= rig.bus.tries <= 2 * 3600 / LAST_RETRY_SECONDS + 10
        assert rig.bell.state.trouble == "it is away"
        rig.bus.there = True
        await asyncio.sleep(LAST_RETRY_SECONDS)
        assert rig.bell.state.connected

    with_rig(work)


def test_a_bus_that_does_not_answer_is_left() -> None:
    async def work(rig: Rig) -> None:
        rig.bus.current.gate.clear()
        await asyncio.sleep(60)
        assert rig.bell.counts.connections == 2

    with_rig(work)
