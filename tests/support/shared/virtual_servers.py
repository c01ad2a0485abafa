"""Several servers over one database in memory, in virtual time, each of which runs something of a domain."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from support.shared.memory_engine import Link, MemoryDatabase, MemoryEngine
from support.shared.virtual_loop import LoopClock

from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.kernel.store.servers.replica import Replica

PATIENCE_SECONDS = 600.0
"""Of virtual time."""


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not holds():
            await asyncio.sleep(0.01)


@dataclass(kw_only=True)
class VirtualServer:
    """One process of a server."""

    name: str
    store: Store
    link: Link
    clock: LoopClock
    standby: Replica
    is_active: bool = False
    task: asyncio.Task[None] | None = None

    def kill(self) -> None:
        """The process is gone, and nothing of it reaches the database any more."""
        self.link.cut = True
        assert self.task is not None
        self.task.cancel()


Work = Callable[[VirtualServer], Awaitable[None]]


async def _nothing(_: VirtualServer) -> None:
    await asyncio.Event().wait()


class VirtualServers:
    """`here` runs on each server that stands by, `active` on the one that is active."""

    def __init__(self, kinds: Iterable[AnyKind], here: Work, active: Work) -> None:
        self._kinds = list(kinds)
        self._here, self._active = here, active
        self._chance = random.Random(1)
        self._tasks: list[asyncio.Task[None]] = []
        self.database = MemoryDatabase(LoopClock(self._chance).now_ns)

    async def start(self, name: str) -> VirtualServer:
        """A server that follows; the first of all is active."""
        link, clock = Link(chance=self._chance), LoopClock(self._chance)
        standby = await Replica.load(
            MemoryEngine(self.database, link),
            StoreSettings(path=Path("/nowhere")),
            server=name,
            kinds=self._kinds,
            clock=clock,
        )
        server = VirtualServer(name=name, store=standby.store, link=link, clock=clock, standby=standby)
        begun = asyncio.Event()
        server.task = asyncio.create_task(self._live(server, begun))
        self._tasks.append(server.task)
        if len(self._tasks) == 1:
            await until(lambda: server.is_active)
        await begun.wait()
        return server

    async def _live(self, server: VirtualServer, begun: asyncio.Event) -> None:
        async def meanwhile(_: Replica) -> None:
            begun.set()
            with server.store.writing_here():
                await self._here(server)

        async with server.standby.active(meanwhile) as store:
            server.is_active = True
            begun.set()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(store.writing())
                await self._active(server)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def virtual_servers(
    kinds: Iterable[AnyKind], *, here: Work = _nothing, active: Work = _nothing
) -> AsyncIterator[VirtualServers]:
    made = VirtualServers(kinds, here, active)
    try:
        yield made
    finally:
        await made.stop()
