"""Several servers over one database in memory, in virtual time, each with the whereabouts of one channel."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.shared.memory_engine import Link, MemoryDatabase, MemoryEngine
from support.shared.storekit import KINDS
from support.shared.virtual_loop import LoopClock

from fleetplane.kernel.commands import COMMAND, COMMAND_TARGET
from fleetplane.kernel.presence import PRESENCE, LastSeen, PresenceRegistry, PresenceSpec
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.kernel.store.servers.replica import Replica

CHANNEL = "edge"
STORED = (*KINDS, PRESENCE, COMMAND, COMMAND_TARGET)
PATIENCE_SECONDS = 300.0
"""Of virtual time."""


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not holds():
            await asyncio.sleep(0.01)


@dataclass(kw_only=True)
class Server:
    """One process of a server."""

    store: Store
    link: Link
    clock: LoopClock
    where: PresenceRegistry
    ears: LastSeen
    moved: list[tuple[str, int]] = field(default_factory=list)
    ended: list[tuple[str, int]] = field(default_factory=list)
    """What was told while this server had the seat."""
    on_ended: Callable[[str, int], None] = lambda _agent, _session: None
    is_active: bool = False
    task: asyncio.Task[None] | None = None

    def begin_anew(self) -> None:
        """Forget who is here, as a server does that takes the seat and is built again."""
        self.where = PresenceRegistry(self.store, self.clock, channel=CHANNEL)
        self.ears = LastSeen(self.store, self.clock, channel=CHANNEL)

    def kill(self) -> None:
        """The process is gone, and nothing of it reaches the database any more."""
        self.link.cut = True
        assert self.task is not None
        self.task.cancel()

    def presence(self, agent: str) -> PresenceSpec | None:
        found = self.store.get(PRESENCE, CHANNEL, agent)
        return None if found is None else found.spec


class Cluster:
    def __init__(self, seed: int = 1) -> None:
        self.chance = random.Random(seed)
        self.loss = 0.0
        """The share of calls to the database of which the request or the answer is lost."""
        self.database = MemoryDatabase(LoopClock(self.chance).now_ns)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, name: str) -> Server:
        """A server that follows; the first of all is active."""
        link, clock = Link(chance=self.chance, loss=self.loss), LoopClock(self.chance)
        engine = MemoryEngine(self.database, link)
        settings = StoreSettings(path=Path("/nowhere"))
        standby = await Replica.load(engine, settings, server=name, kinds=STORED, clock=clock)
        server = Server(
            store=standby.store,
            link=link,
            clock=clock,
            where=PresenceRegistry(standby.store, clock, channel=CHANNEL),
            ears=LastSeen(standby.store, clock, channel=CHANNEL),
        )
        begun = asyncio.Event()
        server.task = asyncio.create_task(self._live(server, standby, begun))
        self._tasks.append(server.task)
        if len(self._tasks) == 1:
            await until(lambda: server.is_active)
        await begun.wait()
        return server

    async def _live(self, server: Server, standby: Replica, begun: asyncio.Event) -> None:
        async def meanwhile(_: Replica) -> None:
            begun.set()
            server.where.on_moved(lambda *told: server.moved.append(told))
            with server.store.writing_here():
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(server.where.run_here())
                    tasks.create_task(server.ears.run_here())

        async def ended(agent: str, session: int) -> None:
            server.ended.append((agent, session))
            server.on_ended(agent, session)

        async with standby.active(meanwhile) as store:
            server.is_active = True
            begun.set()
            server.begin_anew()
            server.where.on_moved(lambda *told: server.moved.append(told))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(server.where.run_here())
                tasks.create_task(server.where.run_for_all(ended))
                tasks.create_task(server.ears.run_here())
                await store.writing()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def cluster(seed: int = 1) -> AsyncIterator[Cluster]:
    made = Cluster(seed)
    try:
        yield made
    finally:
        await made.stop()
