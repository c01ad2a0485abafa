"""What a server of the simulation does for agents: real whereabouts and a real ledger over its real store.

Its streams are connections that are late and break; otherwise it keeps the order of `fleet.streams`: a
session is entered, what older ones lost is dealt with, and only then is it open; its end is written before
what it loses.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from support.shared.agents_judge import AgentsJudge
from support.shared.repeating_client import KeyedServer, Made, Outside
from support.shared.storekit import SCOPE, THING, Spec, Status

from fleetplane.kernel import commands
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import Command, CommandLimits, Commands, CommandState
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.presence import PresenceRegistry
from fleetplane.kernel.store import Draft, Store
from fleetplane.web.rest.routes import Answer, Call

ROOM = 2
"""Commands that an agent has at once."""
CHANNEL = "agents"


@dataclass(kw_only=True)
class LedgerDefects:
    """What can be put in, to see that it is found."""

    lost_without_session: bool = False
    """The end of a session loses what was sent in a newer one, too."""
    first_state_from_memory: bool = False
    """A command for an agent that is not connected here is undeliverable."""
    sent_before_it_is_durable: bool = False
    new_session_of_an_older_one: bool = False
    """A session that begins late takes back what a newer one has."""
    deadlines_by_own_clock: bool = False
    """Every server ends what is late by its own clock."""
    key_is_kept_after_its_command: bool = False
    """That a command was issued for a key is recorded once its answer is known."""
    goodbye_without_presence: bool = False
    """Whoever loses an agent writes that it is disconnected, wherever it is by then."""


class World(Protocol):
    """What streams and hosts know of the simulation."""

    chance: random.Random
    defects: LedgerDefects
    judge: AgentsJudge
    recalled: int
    outside: Outside

    @property
    def agents(self) -> Sequence[Listener]: ...


class Listener(Protocol):
    """An agent, as a stream knows it."""

    name: str

    @property
    def sim(self) -> World: ...

    def heard(self, stream: Stream, what: str, command: Command | None) -> None: ...


class Stream:
    """A connection of an agent to a server."""

    def __init__(self, agent: Listener, host: Host) -> None:
        self.agent = agent
        self.host = host
        self.session = 0
        self.is_open = False
        """For the server, which may send."""
        self.flights: set[str] = set()
        self.inbox: asyncio.Queue[tuple[str, CommandState | None] | None] = asyncio.Queue()
        self.settled = asyncio.Event()

    def send(self, what: str, command: Command | None = None) -> None:
        """From the server to the agent."""
        self._later(lambda: self.agent.heard(self, what, command))

    def say(self, command: str, word: CommandState | None) -> None:
        """From the agent to the server: how a command ended, or (None) that it began."""
        self._later(lambda: self.inbox.put_nowait((command, word)))

    def end(self) -> None:
        self._later(lambda: self.inbox.put_nowait(None))

    def _later(self, act: Callable[[], object]) -> None:
        chance = self.agent.sim.chance
        late = chance.random() * (0.02 if chance.random() < 0.9 else 1.0)
        asyncio.get_running_loop().call_later(late, act)


class Host:
    """What a server does for agents, while it stands by or has the seat. Its own courier."""

    def __init__(self, sim: World, store: Store, clock: Clock) -> None:
        self.sim = sim
        self.store = store
        self.where = PresenceRegistry(store, clock, channel=CHANNEL)
        self.where.on_moved(self._moved)
        self._clock = clock
        self.streams: dict[str, Stream] = {}
        self.ledger = Commands(
            store,
            clock,
            channel=CHANNEL,
            courier=self,
            whereabouts=self.where,
            limits=CommandLimits(retry_seconds=1.0),
        )
        self.ledger.recover()
        self.keyed = KeyedServer(store, store.clock, sim.chance, sim.outside, self._commanded)
        self.is_up = True
        self._tasks: dict[asyncio.Task[None], None] = {}
        """In the order in which they began: that of a set is another one in every process."""

    async def _commanded(self, call: Call[Any]) -> Answer[Made]:
        """A command for one agent, of which its key is the content."""
        key = str(call.path["key"])
        call.answering(lambda issued: Answer(content=Made(issued.command.name)))
        command = await self.ledger.issue(
            SCOPE,
            "keyed",
            [self.sim.chance.choice(self.sim.agents).name],
            actor=call.signed("client"),
            payload=key.encode(),
            wait=True,
            repeatable=False,
            deliver_within_seconds=6.0,
            run_for_seconds=6.0,
        )
        return Answer(content=Made(command.name))

    # For the ledger.

    def is_present(self, target: str) -> bool:
        return target in self.streams

    def has_room(self, target: str) -> bool:
        return target in self.streams and len(self.streams[target].flights) < ROOM

    def deliver(self, target: str, command: Command) -> bool:
        if not self.has_room(target):
            return False
        stream = self.streams[target]
        self.sim.judge.sent(target, stream.session, command.name)
        stream.flights.add(command.name)
        stream.send("command", command)
        return True

    def recall(self, target: str, command: str, _reason: str) -> None:
        stream = self.streams.get(target)
        if stream is not None and command in stream.flights:
            self.sim.recalled += 1
            stream.flights.discard(command)
            stream.send("recall")
            self._begin(self._tolerated(self.ledger.room(target)))

    # Streams.

    def accept(self, stream: Stream) -> None:
        self._begin(self._serve(stream))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda ended: self._tasks.pop(ended, None))

    async def _tolerated(self, work: Coroutine[Any, Any, Any]) -> Any:
        with suppress(FleetplaneError):
            return await work

    async def _serve(self, stream: Stream) -> None:
        name = stream.agent.name
        try:
            older = self.streams.get(name)
            if older is not None:
                older.inbox.put_nowait(None)
                await older.settled.wait()
            stream.session = await self.where.enter(name)
        except (FleetplaneError, asyncio.CancelledError):
            stream.send("end")
            return
        try:
            await self.ledger.lost(name)
            await self.ledger.renewed(name, session=stream.session)
            await self._stand(name, stream.session, is_connected=True)
            if self.where.session_here(name) == stream.session and name not in self.streams:
                self.streams[name] = stream
                stream.send("welcome")
                self._begin(self._tolerated(self.ledger.room(name)))
                await self._read(stream)
        except FleetplaneError:
            pass
        finally:
            await self._settle(stream)

    async def _settle(self, stream: Stream) -> None:
        name = stream.agent.name
        if self.streams.get(name) is stream:
            del self.streams[name]
        self.sim.judge.over.add(stream.session)
        stream.send("end")
        try:
            if await self._tolerated(self.where.leave(name, stream.session)):
                await self._tolerated(self._stand(name, stream.session, is_connected=False))
            await self._tolerated(self.ledger.lost(name, session=stream.session))
        finally:
            stream.settled.set()

    async def _read(self, stream: Stream) -> None:
        name = stream.agent.name
        while (said := await stream.inbox.get()) is not None:
            command, word = said
            if word is None:
                await self.ledger.started(name, command)
                continue
            stream.flights.discard(command)
            if await self.ledger.ended(name, command, word):
                self.sim.judge.answered(name, command, word)
            await self.ledger.room(name)

    def _moved(self, agent: str, session: int) -> None:
        stream = self.streams.get(agent)
        if stream is not None and stream.session == session:
            stream.inbox.put_nowait(None)

    async def _stand(self, agent: str, session: int, *, is_connected: bool) -> None:
        """Write whether an agent is connected, if this is for this session to say."""
        anyhow = self.sim.defects.goodbye_without_presence and not is_connected

        def change(draft: Draft) -> None:
            if anyhow or self.where.named(draft, agent) == (session if is_connected else None):
                spec, status = Spec(value=session), Status(ready=is_connected)
                draft.put(THING, SCOPE, agent, spec=spec, status=status)

        key = THING.key(SCOPE, agent)
        await self.store.transact(change, actor="standing", action="stand", touches=[key])

    # Running.

    async def run_here(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.where.run_here())
                tasks.create_task(self.ledger.run_here())
                if self.sim.defects.deadlines_by_own_clock:
                    tasks.create_task(self._keep_deadlines())
        finally:
            self.close()

    async def run(self) -> None:
        await self.ledger.all_lost()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.where.run_here())
                tasks.create_task(self.where.run_for_all(self._gone))
                tasks.create_task(self._seen_to())
        finally:
            self.close()

    async def _seen_to(self) -> None:
        """A ledger whose deadlines could not be kept begins again."""
        while True:
            with suppress(ExceptionGroup):
                await commands.run(self.ledger, self._clock)
            await asyncio.sleep(1.0)

    async def _keep_deadlines(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            await self._tolerated(self.ledger.expire())

    async def _gone(self, agent: str, session: int) -> None:
        await self.ledger.lost(agent, session=session)
        await self._stand(agent, session, is_connected=False)

    def close(self) -> None:
        self.is_up = False
        self.keyed.kill()
        for task in tuple(self._tasks):
            task.cancel()
        for stream in self.streams.values():
            stream.send("end")
