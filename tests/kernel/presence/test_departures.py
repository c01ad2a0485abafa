"""What becomes of the sessions of servers that are gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.shared import virtual_loop
from support.shared.presence_rig import CHANNEL, cluster, until

from fleetplane.kernel.presence import PRESENCE, departures
from fleetplane.kernel.presence.departures import RECONNECT_SECONDS
from fleetplane.kernel.store.servers.leader_lease import LIFE_SECONDS

AGENTS = [f"agent{n:03}" for n in range(600)]


def test_sessions_of_a_server_that_is_gone_end_after_one_reconnect_period_and_are_told_once() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b, c = [await servers.start(name) for name in "abc"]
            sessions = dict(zip(AGENTS, await asyncio.gather(*map(b.where.enter, AGENTS)), strict=True))
            stay = await c.where.enter("stays")
            began = asyncio.get_running_loop().time()
            b.kill()
            moves = await c.where.enter(AGENTS[0])  # comes back in time
            del sessions[AGENTS[0]]
            await until(lambda: len(a.ended) == len(sessions))
            assert asyncio.get_running_loop().time() - began >= LIFE_SECONDS - 2 + RECONNECT_SECONDS
            assert dict(a.ended) == sessions
            await asyncio.sleep(30)
            assert len(a.ended) == len(sessions)
            assert not any(a.where.is_anywhere(agent) for agent in sessions)
            assert a.where.named(a.store, "stays") == stay
            assert a.where.named(a.store, AGENTS[0]) == moves

    virtual_loop.run(scene())


def test_who_takes_the_seat_gives_the_agents_of_the_one_before_a_whole_reconnect_period() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b = await servers.start("a"), await servers.start("b")
            session = await a.where.enter("one")
            a.kill()
            await until(lambda: b.is_active)
            taken = asyncio.get_running_loop().time()
            assert b.where.named(b.store, "one") == session  # nobody's state flips
            await until(lambda: b.ended)
            assert asyncio.get_running_loop().time() - taken >= RECONNECT_SECONDS
            assert b.ended == [("one", session)]

    virtual_loop.run(scene())


def test_a_server_that_starts_again_under_its_name_does_not_keep_its_former_sessions() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b = await servers.start("a"), await servers.start("b")
            lost, back = await asyncio.gather(b.where.enter("lost"), b.where.enter("back"))
            b.kill()
            again = await servers.start("b")
            newer = await again.where.enter("back")
            assert newer > back
            await until(lambda: a.ended)
            await asyncio.sleep(30)
            assert a.ended == [("lost", lost)]
            assert not again.moved
            assert a.where.named(a.store, "back") == newer

    virtual_loop.run(scene())


def test_a_server_that_starts_with_thousands_of_presences_flips_nobody() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b = await servers.start("a"), await servers.start("b")
            await asyncio.gather(*map(b.where.enter, AGENTS))
            await until(lambda: a.store.count(PRESENCE, CHANNEL) == len(AGENTS))
            before = a.store.kind_revision(PRESENCE)
            fourth = await servers.start("d")
            await asyncio.sleep(60)
            assert a.store.kind_revision(PRESENCE) == fourth.store.kind_revision(PRESENCE) == before
            assert not a.ended
            assert not b.moved
            assert all(fourth.where.server_of(agent) == "b" for agent in AGENTS)

    virtual_loop.run(scene())


def test_sessions_that_a_server_had_before_it_took_the_seat_are_ended_unless_they_come_back() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b = await servers.start("a"), await servers.start("b")
            lost, back = await asyncio.gather(b.where.enter("lost"), b.where.enter("back"))
            a.kill()
            await until(lambda: b.is_active)
            newer = await b.where.enter("back")
            await until(lambda: b.ended)
            await asyncio.sleep(30)
            assert b.ended == [("lost", lost)]
            assert back < newer == b.where.session_here("back")
            assert b.where.named(b.store, "lost") is None

    virtual_loop.run(scene())


def test_an_agent_that_comes_back_while_its_server_is_written_off_stays() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b, c = [await servers.start(name) for name in "abc"]
            await b.where.enter("one")
            transact, newer = a.store.transact, list[int]()

            async def later(*given: Any, **named: Any) -> Any:
                if named["action"] == "presence.gone":
                    newer.append(await c.where.enter("one"))
                return await transact(*given, **named)

            a.store.transact = later  # type: ignore[method-assign]
            b.kill()
            await until(lambda: newer)
            await asyncio.sleep(30)
            assert not a.ended
            assert a.where.named(a.store, "one") == newer[0]

    virtual_loop.run(scene())


def test_a_judge_that_was_held_up_begins_a_new_reconnect_period() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b = await servers.start("a"), await servers.start("b")
            session = await b.where.enter("one")
            b.link.stopped.clear()  # it says nothing, and hears nothing
            await asyncio.sleep(LIFE_SECONDS + RECONNECT_SECONDS - 2)  # it is gone, and soon for long enough
            loop = asyncio.get_running_loop()
            assert isinstance(loop, virtual_loop.VirtualLoop)
            loop.hold(4)
            await asyncio.sleep(2)
            b.link.stopped.set()
            await asyncio.sleep(30)
            assert not a.ended
            assert b.where.session_here("one") == session == a.where.named(a.store, "one")

    virtual_loop.run(scene())


def test_who_could_not_ask_for_a_while_holds_it_against_nobody() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b = await servers.start("a"), await servers.start("b")
            session = await b.where.enter("one")
            # All stand still, longer than a life and a reconnect period, and only then does time go on.
            virtual = asyncio.get_running_loop()
            assert isinstance(virtual, virtual_loop.VirtualLoop)
            virtual.hold(4.0)
            await asyncio.sleep(30)
            assert not a.ended
            assert a.where.named(a.store, "one") == session

    virtual_loop.run(scene())


def test_what_a_dead_server_had_begun_to_end_is_told() -> None:
    """Its agents left, and it died before it could write down what follows from that."""

    async def scene() -> None:
        async with cluster() as servers:
            a, b = await servers.start("a"), await servers.start("b")
            session = await b.where.enter("one")
            assert await b.where.leave("one", session)
            b.kill()
            await until(lambda: a.ended)
            assert a.ended == [("one", session)]

    virtual_loop.run(scene())


def test_agents_that_stay_away_or_are_removed_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "KEEP_SECONDS", 150.0)

    async def scene() -> None:
        async with cluster() as servers:
            a, b = await servers.start("a"), await servers.start("b")
            away, stays, removed = [await b.where.enter(name) for name in ("away", "stays", "removed")]
            await b.where.leave("away", away)
            await a.where.forget("removed")
            await until(lambda: b.moved == [("removed", removed)])
            await asyncio.sleep(140)
            assert a.presence("away") is not None
            assert a.presence("removed") is None
            await until(lambda: a.presence("away") is None)
            assert b.where.session_here("stays") == stays
            assert a.where.named(a.store, "stays") == stays

    virtual_loop.run(scene())
