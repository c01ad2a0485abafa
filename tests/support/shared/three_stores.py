"""Three real stores over one database in memory, in virtual time: one is active, two stand by."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from support.shared.memory_engine import Link, MemoryDatabase, MemoryEngine
from support.shared.virtual_loop import LoopClock

from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.kernel.store.servers.replica import Replica

NAMES = ("one", "two", "three")
SKEWS = (0.0, 3600.0, -3600.0)
"""What the clock of each server's machine is wrong by, in seconds."""


@asynccontextmanager
async def three_stores(
    kinds: Iterable[AnyKind], *, seed: int = 0, database: MemoryDatabase | None = None
) -> AsyncIterator[Sequence[Store]]:
    """As domains see them: the first writes, the others do inside `writing_here`. For `virtual_loop.run`."""
    chance, kinds = random.Random(seed), tuple(kinds)
    database = database or MemoryDatabase(LoopClock(chance).now_ns)
    stores: list[Store] = []
    async with AsyncExitStack() as stack:
        for name, skew in zip(NAMES, SKEWS, strict=True):
            standby = await Replica.load(
                MemoryEngine(database, Link(chance=chance)),
                StoreSettings(path=Path("/nowhere")),
                server=name,
                kinds=kinds,
                clock=LoopClock(chance, skew),
                audit_key=b"k" * 32,
            )
            await stack.enter_async_context(_running(standby, is_first=not stores))
            stores.append(standby.store.reader() if stores else standby.store)
        yield stores


@asynccontextmanager
async def _running(standby: Replica, *, is_first: bool) -> AsyncIterator[None]:
    if is_first:
        async with standby.active():
            yield
        return
    begun = asyncio.Event()

    async def meanwhile(_: Replica) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def run() -> None:
        async with standby.active(meanwhile):
            raise AssertionError("the first server is active")

    running = asyncio.create_task(run())
    try:
        await begun.wait()
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
