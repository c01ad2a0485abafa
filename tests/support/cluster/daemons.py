"""Simulated edge daemons that move between the servers of a cluster: a connection and real keys each, all of
them in this process.

They speak just enough HTTP/2 for one stream, believe the server, and count what they are told to do. A daemon
whose stream ends comes back to another server by itself, as real ones do behind a balancer.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.json_format import MessageToDict
from support.cluster.members import DEADLINE_SECONDS, Member, until
from support.edge.edge_signer import TENANT, Identity, Signer, enrolled, ok

from bench.http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GREETING,
    HEADERS,
    PING,
    RESET,
    SETTINGS,
    framed,
    head,
    literal,
)
from fleetplane.domains.edge.identity.policy import IdentityPolicy, ServerKey
from fleetplane.domains.edge.identity.tokens import NodeTokens
from fleetplane.domains.edge.kinds import EDGE_NODE, NodeState, tenant_scope
from fleetplane.domains.edge.server import BLUEPRINT
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.fleetplane.edge.v1 import tolerant_pb2
from fleetplane.kernel.access import Role
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.presence import PRESENCE
from fleetplane.kernel.presence.departures import PresenceSpec
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.kernel.store.engines.postgres import PostgresEngine

CONNECT = "/aegis.cluster.v1.NodeClusterService/ConnectEdge"
STREAM = 1
FRAME_HEAD_BYTES, PREFIX_BYTES = 9, 5
BATCH = 256
BEAT_SECONDS = 30.0
FIRST_PAUSE_SECONDS = (0.25, 2.25)
"""Before the first attempt to come back: as the shipped daemon spreads them."""
PAUSE_SECONDS = (0.5, 1.5)
ANSWER_SECONDS = 20.0
DONE = ok()


@dataclass(slots=True)
class Population:
    """Enrolled before the servers start; see `prepare` of `server_cluster`."""

    number: int
    folder: Path
    """For the lock and the mark of who enrols them."""
    identities: list[Identity] = field(default_factory=list)
    operator: str = ""
    """A token that may run commands on them."""

    async def enrol(self, url: str, master_key: str) -> None:
        clock = SystemClock()
        kinds = list(dict.fromkeys((*KERNEL_KINDS, *BLUEPRINT.kinds)))
        settings = StoreSettings(path=self.folder / "enrols" / "store.db", url=url, server="enrols")
        async with Store.open(settings, kinds=kinds, clock=clock) as store:
            master = MasterKey.from_text(master_key, clock)
            key = await ServerKey.load_or_create(store, master)
            tokens = await NodeTokens.load(
                store,
                master,
                clock,
                issuer=IdentityPolicy().role.issuer,
                endpoint=lambda: "127.0.0.1:50056",
                server_public_key=key.public_key,
            )
            while len(self.identities) < self.number:
                some = min(BATCH, self.number - len(self.identities))
                self.identities += await asyncio.gather(
                    *(enrolled(store, tokens, clock) for _ in range(some))
                )
            operators = await Operators.load(store, master, clock)
            self.operator = await operators.tokens.create(
                "crowd", roles=frozenset({Role("edge.admin")}), scope=tenant_scope(TENANT), actor="test"
            )


class Line(asyncio.Protocol):
    """One connection with one stream on it."""

    def __init__(self, identity: Identity, on_message: Callable[[Line, bytes], None]) -> None:
        self._sign = Signer(identity=identity, clock=SystemClock())
        self._on_message = on_message
        self._transport: asyncio.Transport
        self._buffer = self._carry = b""
        self.opened = asyncio.Event()
        """The server has accepted the hello."""
        self.ended = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self.opened.is_set() and not self.ended.is_set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        fields = head(CONNECT, "fleetplane") + literal(b"x-aegis-edge-dialect", b"documented")
        transport.write(GREETING + framed(HEADERS, END_HEADERS, STREAM, fields))
        self._say(tolerant_pb2.EdgeEvent(hello=self._sign.hello(digest=True)))

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= FRAME_HEAD_BYTES:
            end = FRAME_HEAD_BYTES + int.from_bytes(self._buffer[:3], "big")
            if len(self._buffer) < end:
                return
            frame, self._buffer = self._buffer[:end], self._buffer[end:]
            self._frame(frame[3], frame[4], frame[FRAME_HEAD_BYTES:])

    def _frame(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == DATA:
            self._data(payload)
        elif kind == SETTINGS and not flags & ACK:
            self._transport.write(framed(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self._transport.write(framed(PING, ACK, 0, payload))
        elif kind == RESET or (kind == HEADERS and flags & END_STREAM):
            self.close()
        elif kind == HEADERS:
            self.opened.set()

    def _data(self, payload: bytes) -> None:
        self._carry += payload
        while len(self._carry) >= PREFIX_BYTES:
            end = PREFIX_BYTES + int.from_bytes(self._carry[1:PREFIX_BYTES], "big")
            if len(self._carry) < end:
                return
            message, self._carry = self._carry[PREFIX_BYTES:end], self._carry[end:]
            self._on_message(self, message)

    def _say(self, event: tolerant_pb2.EdgeEvent) -> None:
        if not self.ended.is_set():
            body = event.SerializeToString()
            self._transport.write(framed(DATA, 0, STREAM, struct.pack(">BI", 0, len(body)) + body))

    def beat(self) -> None:
        self._say(tolerant_pb2.EdgeEvent(heartbeat=self._sign.heartbeat()))

    def answer(self, command_id: str) -> None:
        self._say(tolerant_pb2.EdgeEvent(command_result=self._sign.result(command_id, DONE)))

    def close(self) -> None:
        self.ended.set()
        self._transport.abort()


@dataclass(slots=True, eq=False)
class RoamingDaemon:
    identity: Identity
    crowd: Crowd
    line: Line | None = None
    server: str = ""
    """Where its line is, or was last."""
    stays_away: bool = False
    lost_at: float | None = None
    away_seconds: float = 0.0
    """The longest time between two lines."""

    @property
    def node_id(self) -> str:
        return self.identity.node_id

    @property
    def is_served(self) -> bool:
        return self.line is not None and self.line.is_open

    async def live(self, first: Member) -> None:
        """Keep a line to one of the servers until cancelled."""
        chance, member = self.crowd.random, first
        while True:
            line = await self.dial(member.edge)
            if line is not None:
                self.line, self.server = line, member.name
                if self.lost_at is not None:
                    self.away_seconds = max(self.away_seconds, time.monotonic() - self.lost_at)
                    self.lost_at = None
                await self._talk(line)
                self.lost_at = time.monotonic()
                await asyncio.sleep(chance.uniform(*FIRST_PAUSE_SECONDS))
            else:
                await asyncio.sleep(chance.uniform(*PAUSE_SECONDS))
            while self.stays_away:
                await asyncio.sleep(PAUSE_SECONDS[0])
            member = chance.choice([one for one in self.crowd.members if one.is_wanted])

    async def dial(self, address: str) -> Line | None:
        """A line that the server has accepted; None if it has not."""
        host, _, port = address.rpartition(":")
        line = Line(self.identity, self._hear)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await loop.create_connection(lambda: line, host, int(port))
                waits = [asyncio.ensure_future(one.wait()) for one in (line.opened, line.ended)]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for one in waits:
                        one.cancel()
        except OSError:  # a time-out as well
            if hasattr(line, "_transport"):
                line.close()
            return None
        return line if line.is_open else None

    async def _talk(self, line: Line) -> None:
        while not line.ended.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_SECONDS):
                    await line.ended.wait()
            line.beat()

    def _hear(self, line: Line, raw: bytes) -> None:
        command = pb.EdgeCommand.FromString(raw)
        if command.WhichOneof("command") == "invoke_tool":
            call = command.invoke_tool
            tag = json.dumps(MessageToDict(call.args), sort_keys=True)
            self.crowd.done[call.command_id, self.node_id] += 1
            self.crowd.done_by[tag, self.node_id] += 1
            asyncio.get_running_loop().call_later(
                self.crowd.random.uniform(*self.crowd.work_seconds), self._answer, line, call.command_id
            )

    def _answer(self, line: Line, command_id: str) -> None:
        """On the line that there is by now: it may be another than the one the command came on."""
        (self.line or line).answer(command_id)


@dataclass(slots=True)
class Crowd:
    """All daemons, and what they were told to do."""

    members: Sequence[Member]
    random: random.Random
    work_seconds: tuple[float, float] = (0.0, 0.0)
    """How long a command takes, at least and at most."""
    daemons: list[RoamingDaemon] = field(default_factory=list)
    done: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Executions by the id of the command and daemon."""
    done_by: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By arguments and daemon, under whichever id they came."""

    def at(self, member: Member) -> list[RoamingDaemon]:
        return [one for one in self.daemons if one.server == member.name]

    def unserved(self) -> list[RoamingDaemon]:
        return [one for one in self.daemons if not one.is_served and not one.stays_away]

    async def all_served(self, seconds: float = DEADLINE_SECONDS) -> float:
        return await until(
            lambda: not self.unserved(), lambda: f"{len(self.unserved())} daemons are not served", seconds
        )


@asynccontextmanager
async def crowd(
    members: Sequence[Member],
    identities: Sequence[Identity],
    *,
    seed: int = 1,
    first: Sequence[Member] = (),
) -> AsyncIterator[Crowd]:
    """Daemons spread evenly over the servers `first`, or all that run. Not waited for."""
    made = Crowd(members=members, random=random.Random(seed))
    made.daemons += [RoamingDaemon(identity, made) for identity in identities]
    running = first or [one for one in members if one.is_wanted]
    tasks = [
        asyncio.create_task(one.live(running[number % len(running)]))
        for number, one in enumerate(made.daemons)
    ]
    try:
        yield made
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for one in made.daemons:
            if one.line is not None:
                one.line.close()
        wrong = [one for one in ended if not isinstance(one, asyncio.CancelledError)]
        assert not wrong, wrong[:3]


@dataclass(slots=True)
class Book:
    """What the database's log says of daemons, past all servers."""

    engine: PostgresEngine
    number: int = 0
    presences: dict[str, PresenceSpec] = field(default_factory=dict)
    states: dict[str, list[NodeState]] = field(default_factory=dict)
    """Each state that was written of a daemon and is another than the one before."""

    async def read(self) -> None:
        while (page := await self.engine.groups(after=self.number, limit=500)).groups:
            for group in page.groups:
                self.number = group.mark.number
                for row in group.log:
                    if row.kind == PRESENCE.name:
                        presence = PRESENCE.decode(row.body)
                        self.presences[presence.name] = presence.spec
                    elif row.kind == EDGE_NODE.name:
                        node = EDGE_NODE.decode(row.body)
                        states = self.states.setdefault(node.name, [])
                        if node.status is not None and states[-1:] != [node.status.state]:
                            states.append(node.status.state)

    def misplaced(self, daemons: Sequence[RoamingDaemon]) -> list[RoamingDaemon]:
        """Of whom something else is written than where they are."""

        def is_right(one: RoamingDaemon) -> bool:
            found = self.presences.get(one.node_id)
            states = self.states.get(one.node_id)
            return (
                found is not None
                and found.is_open
                and found.server == one.server
                and states is not None
                and states[-1:] == [NodeState.CONNECTED]
            )

        return [one for one in daemons if one.is_served and not is_right(one)]

    async def until(self, holds: Callable[[], object], what: str, seconds: float = DEADLINE_SECONDS) -> None:
        begun = time.monotonic()
        await self.read()
        while not holds():
            assert time.monotonic() - begun < seconds, what
            await asyncio.sleep(0.2)
            await self.read()


@asynccontextmanager
async def book(url: str) -> AsyncIterator[Book]:
    engine = await PostgresEngine.open(url)
    try:
        yield Book(engine)
    finally:
        await engine.close()
