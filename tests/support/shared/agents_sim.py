"""Agents that move between real servers in virtual time, and the commands that they are given.

Beside `cluster_sim`, whose database, links and loop these servers share: each has real whereabouts and a real
ledger over its real store. Agents connect, move, half-live on the server that they left, answer late, twice
or never; servers are killed, cut off and stopped. What must hold is checked at every group that is written,
at every command that is sent or arrives, and at the end.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.shared.agents_defects import put_in
from support.shared.agents_host import Host, LedgerDefects, Stream
from support.shared.agents_judge import AgentsJudge
from support.shared.cluster_sim import KEY, TAKEOVER_SECONDS, Server, Violation, require
from support.shared.memory_engine import Defects, MemoryDatabase, MemoryEngine
from support.shared.repeating_client import MADE, KeyedServer, Outside, repeat
from support.shared.storekit import KINDS, SCOPE
from support.shared.virtual_loop import LoopClock, run

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import COMMAND, COMMAND_TARGET, Command, Commands, CommandState
from fleetplane.kernel.errors import FleetplaneError, Unavailable
from fleetplane.kernel.presence import PRESENCE
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.kernel.store.servers.replica import Replica

SERVERS = 3
AGENTS = 2
CLIENTS = 2
ATTEMPTS = 5
QUIET_SECONDS = 60.0
"""In which everything must have come to its end once nothing goes wrong any more."""


class AgentServer(Server):
    """One server, with the agents that are connected to it."""

    host: Host | None = None

    async def _run(self) -> None:
        sim = self._sim
        assert isinstance(sim, AgentSimulation)
        engine = MemoryEngine(sim.database, self.link)
        clock = LoopClock(sim.chance, sim.chance.choice([0.0, 3600.0, -3600.0]))
        standby = await Replica.load(
            engine,
            StoreSettings(path=Path("/nowhere"), ring_events=100_000, coalesce_after_events=100_000),
            server=self.name,
            kinds=(*KINDS, PRESENCE, COMMAND, COMMAND_TARGET),
            clock=clock,
            audit_key=KEY,
        )
        self.standing_by = standby
        store = standby.store

        async def meanwhile(_: Replica) -> None:
            self.host = sim.host(store, clock)
            await self.host.run_here()

        try:
            async with standby.active(meanwhile):
                self.is_active = True
                self.host = sim.host(store, clock)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self.host.run())
                    await store.writing()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        finally:
            self.is_active = False
            if self.host is not None:
                self.host.close()


class Agent:
    """One agent: connects, works, and moves on."""

    def __init__(self, sim: AgentSimulation, name: str) -> None:
        self.sim = sim
        self.name = name
        self.stream: Stream | None = None
        self._ended = asyncio.Event()
        self._known: dict[str, CommandState | None] = {}
        """Commands that it has seen, and how they ended here."""

    async def live(self) -> None:
        chance = self.sim.chance
        while True:
            host = self.sim.any_host()
            if host is not None:
                self._ended = asyncio.Event()
                before, self.stream = self.stream, Stream(self, host)
                host.accept(self.stream)
                if before is not None and chance.random() < 0.5:
                    before.end()  # else it half-lives
                await self._stay(chance.expovariate(0.3))
            await asyncio.sleep(chance.uniform(0.05, 0.5))

    async def _stay(self, seconds: float) -> None:
        """Until the stream has ended, or it is time to move; when everything is calm, nobody moves."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        if self.sim.calm:
            await self._ended.wait()

    def heard(self, stream: Stream, what: str, command: Command | None) -> None:
        if what == "end" and stream is self.stream:
            self._ended.set()
        if command is not None:
            self.sim.judge.arrived(self.name, stream.session, command)
            self._work(command)

    def _work(self, command: Command) -> None:
        chance, loop = self.sim.chance, asyncio.get_running_loop()
        if command.name in self._known:  # repeated: it says the same again
            self._say(command.name, self._known[command.name])
            return
        self._known[command.name] = None
        luck = 1.0 if self.sim.calm else chance.random()
        if luck < 0.1:
            return  # it never says a word
        if luck < 0.4:
            self._say(command.name, None)
        word = (
            chance.choice([CommandState.OK, CommandState.OK, CommandState.FAILED])
            if not self.sim.calm
            else CommandState.OK
        )
        seconds = chance.uniform(0.0, 6.0 if luck < 0.3 else 0.5)
        for _ in range(2 if luck < 0.5 else 1):
            loop.call_later(seconds, self._answer, command.name, word)
            seconds += chance.uniform(0.0, 2.0)

    def _answer(self, command: str, word: CommandState) -> None:
        self._known[command] = word
        self._say(command, word)

    def _say(self, command: str, word: CommandState | None) -> None:
        if self.stream is not None:
            self.stream.say(command, word)


@dataclass
class Issued:
    """Commands that clients were told of."""

    commands: list[Key] = field(default_factory=list)
    cancelled: int = 0


class AgentSimulation:
    def __init__(
        self,
        seed: int,
        *,
        seconds: float = 5.0,
        defects: LedgerDefects | None = None,
        delay_seconds: float = 0.002,
    ) -> None:
        self.chance = random.Random(seed)
        self.defects = defects or LedgerDefects()
        self.delay_seconds = delay_seconds
        self.loss = self.chance.choice([0.0, 0.01, 0.05])
        self._seconds = seconds
        self._has_keys = seed % 2 == 0
        """Whether somebody asks with keys."""
        self.calm = False
        self.ends: list[str] = []
        self.issued = Issued()
        self.outside = Outside()
        self.recalled = 0
        self._wrong: list[BaseException] = []

    def run(self) -> None:
        run(self._run())

    def host(self, store: Store, clock: Clock) -> Host:
        made = Host(self, store, clock)
        put_in(self.defects, made, clock)
        return made

    def any_host(self) -> Host | None:
        hosts = [server.host for server in self.servers if server.host is not None and server.host.is_up]
        return self.chance.choice(hosts) if hosts else None

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._note)
        self.database = MemoryDatabase(LoopClock(self.chance).now_ns, Defects())
        self.judge = AgentsJudge(self.database)
        self.servers = [AgentServer(self, f"s{n}") for n in range(SERVERS)]  # type: ignore[arg-type]
        self.agents = [Agent(self, f"agent{n}") for n in range(AGENTS)]
        tasks = [loop.create_task(server.live()) for server in self.servers]
        tasks += [loop.create_task(agent.live()) for agent in self.agents]
        tasks += [loop.create_task(self._client()) for _ in range(CLIENTS)]
        tasks += [loop.create_task(self._trouble())]
        if self._has_keys:
            tasks += [loop.create_task(self._repeater())]
        end = loop.create_task(asyncio.sleep(self._seconds))
        try:
            await asyncio.wait([end, *tasks], return_when=asyncio.FIRST_COMPLETED)
            self._look(tasks)
            self.calm, self.loss = True, 0.0
            for server in self.servers:
                server.link.loss, server.link.cut = 0.0, False
                server.link.stopped.set()
            await self._within(QUIET_SECONDS, lambda: not self.judge.open, tasks)
            await self._served(tasks)
            told, keyed = self.outside.told, self.judge.keyed
            wrong = {key: names for key, names in told.items() if names != {keyed.get(key)}}
            require(not wrong, f"{wrong} were told, and {keyed} are the commands")
        finally:
            for task in (end, *tasks):
                task.cancel()
            for server in self.servers:
                server.kill()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*left, return_exceptions=True)
            if self._wrong:
                raise self._wrong[0]

    def _look(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            if task.done():
                task.result()
        if self._wrong:
            raise self._wrong[0]

    def _note(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if (error := context.get("exception")) is not None and not isinstance(error, FleetplaneError):
            self._wrong.append(error)

    async def _within(
        self, seconds: float, holds: Callable[[], object], tasks: list[asyncio.Task[None]]
    ) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while not holds():
            self._look(tasks)
            if asyncio.get_running_loop().time() > deadline:
                raise Violation(f"not so after {seconds:.0f} s: {self.judge.open or self._standing()}")
            await asyncio.sleep(0.5)

    def _standing(self) -> dict[str, object]:
        return {
            agent.name: (
                self.judge.named(agent.name),
                [server.host.where.session_here(agent.name) for server in self.servers if server.host],
                self.judge.connected.get(agent.name),
            )
            for agent in self.agents
        }

    async def _served(self, tasks: list[asyncio.Task[None]]) -> None:
        """Everything is mended: every agent has one session, is said to be connected, and does what it is
        told by any server."""
        for number in range(SERVERS):
            outcomes: dict[CommandState, int] = {}
            for _ in range(ATTEMPTS):  # what went wrong before may still cost a server its life
                await self._within(TAKEOVER_SECONDS + 30.0, self._is_settled, tasks)
                outcomes = await self._asked(self.servers[number])
                self._look(tasks)
                if outcomes == {CommandState.OK: AGENTS}:
                    break
                await asyncio.sleep(2.0)
            require(
                outcomes == {CommandState.OK: AGENTS}, f"all are connected, and of a command came {outcomes}"
            )

    async def _asked(self, server: AgentServer) -> dict[CommandState, int]:
        assert server.host is not None
        ledger, names = server.host.ledger, [agent.name for agent in self.agents]
        try:
            command = await ledger.issue(SCOPE, "last", names, actor="client", repeatable=False)
            finished = await ledger.finished(command)
        except FleetplaneError:
            return {}
        assert finished.status is not None
        return finished.status.outcomes

    def _is_settled(self) -> bool:
        hosts = [server.host for server in self.servers if server.host is not None and server.host.is_up]
        if len(hosts) < SERVERS or not any(server.is_active for server in self.servers):
            return False
        for agent in self.agents:
            sessions = [host.streams[agent.name].session for host in hosts if agent.name in host.streams]
            named = self.judge.named(agent.name)
            if sessions != [named] or self.judge.connected.get(agent.name) != (named, True):
                return False
        return True

    # Clients.

    async def _client(self) -> None:
        while not self.calm:
            await asyncio.sleep(self.chance.expovariate(1.5))
            host = self.any_host()
            if host is None:
                continue
            with suppress(FleetplaneError, TimeoutError):
                async with asyncio.timeout(10.0):
                    if self.chance.random() < 0.2 and self.issued.commands:
                        await self._cancel(host.ledger)
                    else:
                        await self._issue(host.ledger)

    async def _repeater(self) -> None:
        """Somebody who asks with a key, and again wherever he can until he hears the answer."""
        chance = self.chance
        for number in itertools.count():
            await asyncio.sleep(chance.expovariate(0.7))
            if not self.calm:
                await repeat(
                    f"{MADE}{number}", self._keyed, self.outside, pause=lambda: chance.expovariate(4.0)
                )

    def _keyed(self) -> KeyedServer | None:
        host = self.any_host()
        return None if host is None else host.keyed

    async def _issue(self, ledger: Commands) -> None:
        chance = self.chance
        names = chance.sample([agent.name for agent in self.agents], chance.randint(1, AGENTS))
        hold = chance.random() < 0.3
        command = await ledger.issue(
            SCOPE,
            "go",
            names,
            actor="client",
            wait=chance.random() < 0.5,
            repeatable=chance.random() < 0.5,
            hold=hold,
            deliver_within_seconds=chance.uniform(1.0, 6.0),
            run_for_seconds=chance.uniform(1.0, 6.0),
        )
        self.issued.commands.append(command.key)
        if hold:
            await ledger.release(command, names)

    async def _cancel(self, ledger: Commands) -> None:
        key = self.chance.choice(self.issued.commands[-4:])
        with suppress(Unavailable):
            await ledger.cancel(key.scope, key.name, actor="client")
            self.issued.cancelled += 1

    # Trouble.

    async def _trouble(self) -> None:
        while not self.calm:
            await asyncio.sleep(self.chance.expovariate(0.4))
            if self.calm:
                return
            server = self.chance.choice(self.servers)
            link, loop, later = server.link, asyncio.get_running_loop(), self.chance.uniform(0.1, 12.0)
            match self.chance.randrange(3):
                case 0:
                    server.kill()
                case 1:
                    link.cut = True
                    loop.call_later(later, lambda link=link: setattr(link, "cut", False))  # type: ignore[misc]
                case _:
                    link.stopped.clear()
                    loop.call_later(later, link.stopped.set)
        await asyncio.get_running_loop().create_future()
