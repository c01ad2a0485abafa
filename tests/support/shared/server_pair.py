"""An active server and one that stands by, over a database in memory and in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from support.shared.memory_engine import Link, MemoryDatabase, MemoryEngine
from support.shared.storekit import KINDS
from support.shared.virtual_loop import LoopClock, run

from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.kernel.store.servers.replica import Replica


@dataclass
class Pair:
    """An active server, and one that stands by."""

    active: Store
    first: Replica
    """The one that is active."""
    first_link: Link
    standby: Replica
    link: Link
    """From the one that stands by to the database."""


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    chance = random.Random(1)
    clock = LoopClock(chance)
    database = MemoryDatabase(clock.now_ns)
    links = [Link(chance=chance), Link(chance=chance, delay_seconds=0.02)]
    one, two = [
        await Replica.load(
            MemoryEngine(database, link),
            StoreSettings(path=Path("/nowhere")),
            server=name,
            kinds=KINDS,
            clock=clock,
        )
        for name, link in zip(("one", "two"), links, strict=True)
    ]
    async with one.active() as store:
        waiting = asyncio.create_task(two.seat.wait("two", 1))
        try:
            await asyncio.sleep(1)
            yield Pair(active=store, first=one, first_link=links[0], standby=two, link=links[1])
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


def with_pair(work: Callable[[Pair], Awaitable[None]]) -> None:
    async def both() -> None:
        async with pair() as servers:
            await work(servers)

    run(both())
