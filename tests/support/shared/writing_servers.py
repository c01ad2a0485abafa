"""Several servers that write to one database in memory, in virtual time; the first is active."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from support.shared.memory_engine import Link, MemoryDatabase, MemoryEngine
from support.shared.virtual_loop import LoopClock

from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.kernel.store.servers.standby import Standby

DELAY_SECONDS = 0.02
"""Of the way to the database: what each server knows of the others is never quite new."""


@asynccontextmanager
async def writing_servers(kinds: Iterable[AnyKind], *, number: int = 2) -> AsyncIterator[list[Store]]:
    """The stores of as many servers; those that stand by write, too."""
    chance = random.Random(1)
    clock = LoopClock(chance)
    database = MemoryDatabase(clock.now_ns)
    kinds = list(kinds)
    servers = [
        await Standby.load(
            MemoryEngine(database, Link(chance=chance, delay_seconds=DELAY_SECONDS)),
            StoreSettings(path=Path("/nowhere")),
            server=f"server-{one}",
            kinds=kinds,
            clock=clock,
        )
        for one in range(number)
    ]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(servers[0].active())
        for standby in servers[1:]:
            writes = asyncio.get_running_loop().create_future()

            async def stand_by(server: Standby, writes: asyncio.Future[None] = writes) -> None:
                async def say(_server: Standby) -> None:
                    writes.set_result(None)
                    await asyncio.Event().wait()

                async with server.active(say):
                    raise AssertionError("the first server keeps its seat")

            task = asyncio.create_task(stand_by(standby))
            stack.push_async_callback(_ended, task)
            await writes
        yield [one.store for one in servers]


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
