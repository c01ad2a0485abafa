"""Histories of agents that come, move, half-die and go while servers are killed, each made from a seed."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field

import pytest
from support.shared import virtual_loop
from support.shared.presence_rig import Cluster, Server, cluster, until

from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.presence.departures import RECONNECT_SECONDS
from fleetplane.kernel.presence.registry import ORPHANS_LOOK_SECONDS
from fleetplane.kernel.store.servers.leader_lease import LIFE_SECONDS

SEEDS = int(os.environ.get("PRESENCE_SEEDS", "6"))
AGENTS = 12
SECONDS = 60.0
QUIET_SECONDS = 2 * (LIFE_SECONDS + RECONNECT_SECONDS) + ORPHANS_LOOK_SECONDS + RECONNECT_SECONDS


@dataclass(kw_only=True)
class History:
    servers: Cluster
    names: list[str] = field(default_factory=lambda: ["a", "b", "c"])
    up: dict[str, Server] = field(default_factory=dict)
    current: dict[str, tuple[Server, int]] = field(default_factory=dict)
    """The session that each agent has and believes in, on a server that was not killed."""
    late: list[asyncio.Task[None]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    goodbyes: int = 0
    told: int = 0
    over: bool = False

    def check_ended(self, agent: str, session: int) -> None:
        """Nobody is told of the end of the session that an agent has."""
        self.told += 1
        found = self.current.get(agent)
        if found is not None and found[1] == session and self.is_up(found[0]):
            self.wrong.append(f"{agent} is at {session} on a server that lives")

    def is_up(self, server: Server) -> bool:
        return server in self.up.values() and server.task is not None and not server.task.done()

    async def agent(self, name: str) -> None:
        chance = self.servers.chance
        hello = 0
        await asyncio.sleep(chance.uniform(0, 5))
        while not self.over:
            living = [server for server in self.up.values() if self.is_up(server)]
            if not living:
                await asyncio.sleep(1)
                continue
            server = chance.choice(living)
            hello += 1
            try:
                async with asyncio.timeout(5):
                    session = await server.where.enter(name, hello_at_ns=hello)
            except (FleetplaneError, TimeoutError):
                await asyncio.sleep(chance.uniform(0.1, 3))
                continue
            if server.where.session_here(name) != session:
                continue
            self.current[name] = (server, session)
            await self._stay(name, server, session)
            await asyncio.sleep(chance.choice([0.0, 0.0, chance.uniform(0, 3), chance.uniform(0, 30)]))

    async def _stay(self, name: str, server: Server, session: int) -> None:
        chance = self.servers.chance
        until_at = asyncio.get_running_loop().time() + chance.uniform(0, 10)
        while asyncio.get_running_loop().time() < until_at:
            if not self.is_up(server) or server.where.session_here(name) != session:
                break
            await asyncio.sleep(0.1)
        if self.over:
            return
        del self.current[name]
        if self.is_up(server):
            # Its stream ends now, or is noticed to be dead long after the agent went elsewhere.
            delay = chance.choice([0.0, 0.0, chance.uniform(0, 20)])
            self.late.append(asyncio.create_task(self._goodbye(name, server, session, delay)))

    async def _goodbye(self, name: str, server: Server, session: int, delay: float) -> None:
        await asyncio.sleep(delay)
        if self.is_up(server) and await server.where.leave(name, session):
            self.goodbyes += 1
            found = self.current.get(name)
            if found is not None and found[1] == session:
                self.wrong.append(f"{name} said goodbye of session {session}, which it has")

    async def trouble(self) -> None:
        chance = self.servers.chance
        while not self.over:
            await asyncio.sleep(chance.uniform(5, 20))
            name = chance.choice(self.names)
            self.up.pop(name).kill()
            for agent, (server, _) in tuple(self.current.items()):
                if server not in self.up.values():
                    del self.current[agent]
            await asyncio.sleep(chance.uniform(0.1, 25))
            await self.start(name)

    async def start(self, name: str) -> None:
        while True:
            try:
                server = await self.servers.start(name)
                break
            except FleetplaneError:  # its first question was lost
                await asyncio.sleep(1)
        server.on_ended = self.check_ended
        self.up[name] = server

    async def run(self) -> None:
        for name in self.names:
            await self.start(name)
        self.servers.loss = self.servers.chance.choice([0.0, 0.01, 0.03])
        agents = [asyncio.create_task(self.agent(f"agent{n}")) for n in range(AGENTS)]
        trouble = asyncio.create_task(self.trouble())
        await asyncio.sleep(SECONDS)
        self.over = True
        for task in (*agents, trouble):
            task.cancel()
        done = await asyncio.gather(*agents, trouble, return_exceptions=True)
        for server in self.up.values():
            server.link.loss = 0.0
        self.servers.loss = 0.0
        for name in [name for name in self.names if name not in self.up or not self.is_up(self.up[name])]:
            await self.start(name)
        done += await asyncio.gather(*self.late, return_exceptions=True)
        assert not [one for one in done if isinstance(one, AssertionError)]
        await until(lambda: any(server.is_active for server in self.up.values()))
        await asyncio.sleep(QUIET_SECONDS)
        self.check_end()

    def check_end(self) -> None:
        """Everybody agrees on where each agent is, and nobody else believes to have it."""
        assert not self.wrong
        for number in range(AGENTS):
            agent = f"agent{number}"
            here = [server for server in self.up.values() if server.where.session_here(agent) is not None]
            named = {server.where.named(server.store, agent) for server in self.up.values()}
            assert len(named) == 1
            (session,) = named
            assert [server.where.session_here(agent) for server in here] == ([session] if session else [])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_presence_has_one_winner_and_nobody_is_told_gone_who_is_there(seed: int) -> None:
    async def scene() -> None:
        async with cluster(seed) as servers:
            await History(servers=servers).run()

    virtual_loop.run(scene())
