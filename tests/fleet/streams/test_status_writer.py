"""Many notes, few transactions, and nothing lost when the store refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fleetplane.fleet.streams.status_writer import BATCH, RETRY_SECONDS, StatusWriter
from fleetplane.kernel.errors import FleetplaneError, Unavailable
from fleetplane.sim.clock import VirtualClock


class Written:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.batches: list[dict[str, int]] = []
        self.refused: list[int] = []
        self.refusing = False
        self.writer: StatusWriter[int] = StatusWriter(self.clock, self.write, failed=self.failed)

    async def write(self, batch: Sequence[tuple[str, int]]) -> None:
        if self.refusing:
            raise Unavailable("the disk is full")
        self.batches.append(dict(batch))

    def failed(self, count: int, _error: FleetplaneError) -> None:
        self.refused.append(count)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self.writer.run())
            yield
            task.cancel()


async def test_what_is_noted_together_is_written_together_and_the_last_note_counts() -> None:
    here = Written()
    async with here.running():
        for number in range(BATCH + 10):
            here.writer.note(f"agent-{number}", 0)
        here.writer.note("agent-0", 7)
        await here.clock.advance(1)
    assert [len(batch) for batch in here.batches] == [BATCH, 10]
    assert here.batches[0]["agent-0"] == 7


async def test_what_could_not_be_written_is_tried_again_with_what_came_meanwhile() -> None:
    here = Written()
    async with here.running():
        here.refusing = True
        here.writer.note("a", 1)
        here.writer.note("b", 1)
        await here.clock.advance(RETRY_SECONDS / 2)
        here.writer.note("b", 2)
        here.refusing = False
        await here.clock.advance(2 * RETRY_SECONDS)
    assert here.refused == [2]
    assert here.batches == [{"a": 1, "b": 2}]


async def test_a_flush_writes_all_at_once_without_the_writer_running() -> None:
    here = Written()
    for number in range(3 * BATCH):
        here.writer.note(str(number), number)
    await here.writer.flush()
    assert sum(len(batch) for batch in here.batches) == 3 * BATCH
