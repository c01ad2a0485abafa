"""Streams of one agent on several servers, in virtual time and without a network."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.fleet.stream_rig import Echo, EchoProtocol
from support.shared import virtual_loop
from support.shared.presence_rig import Cluster, Server, cluster, until

from fleetplane.fleet.streams.host import ADMISSIONS_PER_SECOND, AdmissionQueue, StreamHost, StreamPolicy
from fleetplane.fleet.streams.presence import Presences
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.errors import Conflict, FleetplaneError, PermissionDenied, Unavailable
from fleetplane.kernel.presence import ReplayedHello
from fleetplane.kernel.presence.registry import GATHER_SECONDS
from fleetplane.kernel.sessions import Sessions

NEVER = 2**62


class Call:
    """One stream of an agent, as its server sees it."""

    def __init__(self, host: StreamHost[Any, Any, Echo], agent: str, hello_at_ns: int = 0) -> None:
        self._said: asyncio.Queue[pb.AgentMessage | None] = asyncio.Queue()
        self._said.put_nowait(pb.AgentMessage(agent_id=agent, timestamp=hello_at_ns))
        self.told: list[pb.MasterMessage] = []
        self.opened = asyncio.Event()
        self.task = asyncio.create_task(host.serve(self._requests(), self))  # type: ignore[arg-type]

    async def _requests(self) -> AsyncIterator[pb.AgentMessage]:
        while (message := await self._said.get()) is not None:
            yield message

    async def send_initial_metadata(self, _fields: object) -> None:
        self.opened.set()

    def push(self, message: pb.MasterMessage) -> None:
        self.told.append(message)

    async def write(self, message: pb.MasterMessage) -> None:
        self.told.append(message)

    def end(self) -> None:
        self._said.put_nowait(None)

    async def outcome(self) -> FleetplaneError | None:
        """How its stream ended."""
        async with asyncio.timeout(60):
            try:
                await self.task
            except FleetplaneError as error:
                return error
        return None


class Host:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.protocol = EchoProtocol()
        self.presences = Presences[Echo]()
        self.host: StreamHost[pb.AgentMessage, pb.MasterMessage, Echo] = StreamHost(
            self.protocol,
            stream="echo",
            presences=self.presences,
            sessions=Sessions(),
            clock=server.clock,
            policy=StreamPolicy(),
            whereabouts=server.where,
        )

    async def opened(self, agent: str, hello_at_ns: int = 0) -> Call:
        call = Call(self.host, agent, hello_at_ns)
        async with asyncio.timeout(60):
            await call.opened.wait()
        return call


async def hosts(servers: Cluster) -> list[Host]:
    return [Host(await servers.start(name)) for name in "abc"]


def test_a_newer_stream_on_another_server_ends_the_older_which_says_nothing_of_the_agent() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b, _ = await hosts(servers)
            left: list[Echo] = []
            b.protocol.settle = settled(left)
            older = await b.opened("one")
            place = b.presences.get("one")
            newer = await a.opened("one")
            error = await older.outcome()
            assert isinstance(error, Unavailable)
            assert error.message == "superseded"
            assert [live.moved for live in left] == [True]
            live = a.presences.get("one")
            assert place is not None
            assert live is not None
            assert place.place < live.place == a.server.where.session_here("one")
            assert not live.moved
            newer.end()
            assert await newer.outcome() is None
            assert not live.moved
            assert a.server.where.named(a.server.store, "one") is None

    virtual_loop.run(scene())


def test_a_stream_that_ends_has_left_before_the_protocol_is_told() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b, _ = await hosts(servers)
            seen: list[tuple[bool, bool]] = []

            async def look(live: Echo) -> None:
                seen.append((live.moved, a.server.where.is_anywhere("one")))

            a.protocol.settle = look
            call = await a.opened("one")
            await until(lambda: b.server.where.is_anywhere("one"))
            call.end()
            assert await call.outcome() is None
            assert seen == [(False, False)]
            await until(lambda: not b.server.where.is_anywhere("one"))

    virtual_loop.run(scene())


def test_a_newer_stream_on_the_same_server_takes_over_without_a_gap() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b, _ = await hosts(servers)
            left: list[Echo] = []
            b.protocol.settle = settled(left)
            older = await b.opened("one")
            await until(lambda: a.server.where.is_anywhere("one"))
            gaps: list[float] = []
            looking = asyncio.create_task(note_gaps(a.server, "one", gaps))
            newer = await b.opened("one")
            assert await older.outcome() is not None
            await asyncio.sleep(5)
            looking.cancel()
            assert not gaps
            assert [live.moved for live in left] == [True]
            assert b.server.where.session_here("one") == a.server.where.named(a.server.store, "one")
            assert not newer.task.done()

    virtual_loop.run(scene())


def test_a_hello_that_was_used_on_another_server_is_refused_and_ends_nothing() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b, _ = await hosts(servers)
            call = await a.opened("one", hello_at_ns=1000)
            await until(lambda: b.server.where.is_anywhere("one"))
            for host in (a, b):
                assert isinstance(await Call(host.host, "one", 1000).outcome(), ReplayedHello)
            await asyncio.sleep(5)
            assert not call.task.done()
            assert a.presences.get("one") is not None

    virtual_loop.run(scene())


def test_an_older_stream_that_must_stay_keeps_its_place() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, _, _ = await hosts(servers)
            call = await a.opened("one")
            a.protocol.kept.add("one")
            outcomes = await asyncio.gather(*(Call(a.host, "one").outcome() for _ in range(3)))
            assert all(isinstance(error, PermissionDenied) for error in outcomes)
            assert not call.task.done()
            live = a.presences.get("one")
            assert live is not None
            assert live.place == a.server.where.named(a.server.store, "one")

    virtual_loop.run(scene())


def test_of_many_streams_of_one_agent_that_begin_at_once_everywhere_one_is_left() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            all_hosts = await hosts(servers)
            calls = [Call(host.host, "one") for host in all_hosts for _ in range(4)]
            await until(lambda: sum(not call.task.done() for call in calls) == 1)
            await asyncio.sleep(5)
            (there,) = [host for host in all_hosts if host.presences.get("one") is not None]
            live = there.presences.get("one")
            assert live is not None
            assert all(host.server.where.named(host.server.store, "one") == live.place for host in all_hosts)

    virtual_loop.run(scene())


def test_a_stream_whose_agent_went_elsewhere_while_it_was_being_opened_is_not_opened() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b, _ = await hosts(servers)
            waits, goes_on = asyncio.Event(), asyncio.Event()

            async def before() -> None:
                waits.set()
                await goes_on.wait()

            a.protocol.before = before
            call = Call(a.host, "one")
            await waits.wait()
            await b.opened("one")
            await until(lambda: a.server.where.session_here("one") is None)
            goes_on.set()
            assert isinstance(await call.outcome(), Conflict)
            assert a.presences.get("one") is None
            assert b.presences.get("one") is not None

    virtual_loop.run(scene())


@pytest.mark.parametrize("fails", ["settling", "admission", "cancelled"])
def test_a_stream_that_does_not_open_leaves_nobody_behind(fails: str) -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, _, _ = await hosts(servers)
            waits = asyncio.Event()

            async def before() -> None:
                waits.set()
                if fails == "cancelled":
                    await asyncio.sleep(NEVER)
                raise Unavailable("not now")

            if fails == "admission":
                a.protocol.fail_after_entering = True
            else:
                a.protocol.before = before
            call = Call(a.host, "one")
            if fails == "cancelled":
                await waits.wait()
                call.task.cancel()
                await asyncio.wait([call.task])
            else:
                assert await call.outcome() is not None
            await until(lambda: not a.server.where.is_anywhere("one"))
            assert a.server.where.session_here("one") is None
            a.protocol.before, a.protocol.fail_after_entering = None, False
            await a.opened("one")
            assert a.server.where.is_anywhere("one")

    virtual_loop.run(scene())


def test_a_crowd_is_let_in_at_a_rate_in_the_order_of_arrival_and_in_few_transactions() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, _, _ = await hosts(servers)
            began, groups = asyncio.get_running_loop().time(), len(servers.database.groups)
            calls = [Call(a.host, f"agent{n}") for n in range(1300)]
            await calls[-1].opened.wait()
            assert all(call.opened.is_set() for call in calls)
            took = asyncio.get_running_loop().time() - began
            assert 1200 / ADMISSIONS_PER_SECOND <= took <= 1200 / ADMISSIONS_PER_SECOND + 1
            assert len(servers.database.groups) - groups <= 1 + took / GATHER_SECONDS
            assert len(a.presences) == 1300

    virtual_loop.run(scene())


def test_who_waits_in_the_queue_does_not_hold_up_those_who_came_before() -> None:
    async def scene() -> None:
        loop, queue = asyncio.get_running_loop(), AdmissionQueue(per_second=10.0, burst=2)
        clock = virtual_loop.LoopClock(random.Random(1))
        began = loop.time()

        async def turn() -> float:
            await queue.turn(clock)
            return round(loop.time() - began, 3)

        assert await asyncio.gather(*(turn() for _ in range(5))) == [0.0, 0.0, 0.1, 0.2, 0.3]
        await asyncio.sleep(0.05)
        assert await turn() == 0.4
        began += 100
        await asyncio.sleep(began - loop.time())
        assert await asyncio.gather(*(turn() for _ in range(3))) == [0.0, 0.0, 0.1]

    virtual_loop.run(scene())


def test_an_agent_that_comes_and_goes_without_end_keeps_nobody_out() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, _, _ = await hosts(servers)
            for _ in range(5000):  # each goes while it waits for its turn
                call = Call(a.host, "restless")
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                call.task.cancel()
                await asyncio.wait([call.task])
            began = asyncio.get_running_loop().time()
            await a.opened("patient")
            assert asyncio.get_running_loop().time() - began < 1

    virtual_loop.run(scene())


def test_a_stream_whose_end_is_cut_short_has_left_all_the_same() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, _, _ = await hosts(servers)
            left: list[Echo] = []
            a.protocol.settle = settled(left)
            call = await a.opened("one")
            call.end()
            await asyncio.sleep(0.01)  # it is being ended: sessions of 50 ms are gathered
            call.task.cancel()
            await asyncio.wait([call.task])
            assert [live.moved for live in left] == [False]
            assert not a.server.where.is_anywhere("one")

    virtual_loop.run(scene())


def settled(left: list[Echo]) -> Any:
    async def settle(live: Echo) -> None:
        left.append(live)

    return settle


async def note_gaps(server: Server, agent: str, gaps: list[float]) -> None:
    while True:
        if not server.where.is_anywhere(agent):
            gaps.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.001)
