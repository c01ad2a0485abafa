"""Where agents have their sessions, among several servers and on a database file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.shared import virtual_loop
from support.shared.memory_engine import SECOND_NS
from support.shared.presence_rig import CHANNEL, Server, cluster, until

from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import Conflict, InvalidArgument
from fleetplane.kernel.presence import PRESENCE, PresenceRegistry, ReplayedHello
from fleetplane.kernel.store import Store, StoreSettings

NOW = 1_700_000_000 * SECOND_NS


async def entered(server: Server, *agents: str) -> list[int]:
    return list(await asyncio.gather(*(server.where.enter(agent) for agent in agents)))


def test_an_agent_that_enters_is_known_on_every_server() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b = await servers.start("a"), await servers.start("b")
            session = await b.where.enter("one")
            await until(lambda: a.where.is_anywhere("one"))
            assert (a.where.server_of("one"), b.where.server_of("one")) == ("b", "b")
            assert (a.where.session_here("one"), b.where.session_here("one")) == (None, session)
            assert a.where.named(a.store, "one") == session
            assert await b.where.leave("one", session)
            await until(lambda: not a.where.is_anywhere("one"))
            assert a.where.server_of("one") == ""
            assert b.where.session_here("one") is None

    virtual_loop.run(scene())


def test_the_newest_session_wins_and_the_late_goodbye_of_the_older_writes_nothing() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b, c = [await servers.start(name) for name in "abc"]
            first = await b.where.enter("one")
            await until(lambda: c.where.is_anywhere("one"))
            second = await c.where.enter("one")
            assert second > first
            await until(lambda: b.moved)
            assert b.moved == [("one", first)]
            assert b.where.session_here("one") is None
            groups = len(servers.database.groups)
            assert not await b.where.leave("one", first)
            assert len(servers.database.groups) == groups
            await until(lambda: a.where.server_of("one") == "c")
            assert a.where.named(a.store, "one") == second

    virtual_loop.run(scene())


def test_a_goodbye_that_does_not_know_of_the_newer_session_yet_ends_nothing() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b = await servers.start("a"), await servers.start("b")
            first = await b.where.enter("one")
            await until(lambda: a.where.is_anywhere("one"))
            second = await a.where.enter("one")
            assert b.where.session_here("one") == first  # it has not read the log yet
            assert not await b.where.leave("one", first)
            assert a.where.named(a.store, "one") == second

    virtual_loop.run(scene())


def test_many_who_come_at_once_are_few_transactions() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a = await servers.start("a")
            before, entries = len(servers.database.groups), len(servers.database.audit)
            sessions = await entered(a, *(f"agent{n}" for n in range(3000)))
            assert len(servers.database.groups) - before <= 13  # 3,000 / 256, and one
            assert len(servers.database.audit) - entries <= 13
            assert len(set(sessions)) <= 13
            assert all(a.where.is_anywhere(f"agent{n}") for n in range(3000))

    virtual_loop.run(scene())


def test_a_hello_that_was_used_is_refused_on_every_server_also_after_the_session_ended() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b = await servers.start("a"), await servers.start("b")
            session = await a.where.enter("one", hello_at_ns=NOW, digest=b"one")
            for late in (NOW, NOW - 1):
                with pytest.raises(ReplayedHello):
                    await b.where.enter("one", hello_at_ns=late, digest=b"two")
            with pytest.raises(ReplayedHello):  # a hello that does not say its time
                await b.where.enter("one", digest=b"one")
            assert a.where.session_here("one") == session
            assert not a.moved
            await a.where.leave("one", session)
            with pytest.raises(ReplayedHello):
                await b.where.enter("one", hello_at_ns=NOW)
            assert await b.where.enter("one", hello_at_ns=NOW + 1) > session
            assert await b.where.enter("other", hello_at_ns=NOW) > session

    virtual_loop.run(scene())


def test_a_hello_without_a_time_does_not_make_room_for_an_old_one() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a = await servers.start("a")
            await a.where.enter("one", hello_at_ns=NOW)
            await a.where.enter("one")
            with pytest.raises(ReplayedHello):
                await a.where.enter("one", hello_at_ns=NOW)

    virtual_loop.run(scene())


def test_a_session_that_was_replaced_before_it_is_answered_is_refused() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b = await servers.start("a"), await servers.start("b")
            transact = a.store.transact

            async def held_up(*given: Any, **named: Any) -> Any:
                done = await transact(*given, **named)
                newer = await b.where.enter("one")
                await until(lambda: a.where.named(a.store, "one") == newer)
                return done

            a.store.transact = held_up  # type: ignore[method-assign]
            with pytest.raises(Conflict, match="superseded"):
                await a.where.enter("one")
            assert a.where.session_here("one") is None
            assert a.where.server_of("one") == "b"

    virtual_loop.run(scene())


def test_a_replayed_hello_fails_nobody_who_comes_with_it() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a = await servers.start("a")
            await a.where.enter("one", hello_at_ns=NOW)
            outcomes = await asyncio.gather(
                a.where.enter("one", hello_at_ns=NOW),
                a.where.enter("two", hello_at_ns=NOW),
                a.where.enter("x" * 2000),
                a.where.enter("three", digest=b"d" * 65),
                a.where.enter("four", hello_at_ns=2**63),
                return_exceptions=True,
            )
            kinds = [ReplayedHello, int, InvalidArgument, InvalidArgument, InvalidArgument]
            assert [type(outcome) for outcome in outcomes] == kinds

    virtual_loop.run(scene())


def test_of_two_sessions_of_one_agent_that_come_at_once_the_later_is_the_newer() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a = await servers.start("a")
            first, second = await entered(a, "one", "one")
            assert first < second == a.where.session_here("one")
            assert not await a.where.leave("one", first)
            assert a.where.is_anywhere("one")

    virtual_loop.run(scene())


def test_a_session_whose_stream_was_cancelled_meanwhile_is_ended() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a = await servers.start("a")
            entering = asyncio.create_task(a.where.enter("one"))
            await asyncio.sleep(0.0501)  # gathered, and on its way to the database
            entering.cancel()
            await until(lambda: (found := a.presence("one")) is not None and not found.is_open)
            assert not a.where.is_anywhere("one")
            assert a.where.session_here("one") is None

    virtual_loop.run(scene())


def test_on_a_database_file_nothing_is_stored(tmp_path: Path) -> None:
    async def scene() -> None:
        clock = SystemClock()
        settings = StoreSettings(path=tmp_path / "store.db")
        async with Store.open(settings, kinds=[PRESENCE], clock=clock) as store:
            where = PresenceRegistry(store, clock, channel=CHANNEL)
            assert not where.shared
            assert where.session_here("one") is None
            assert await where.enter("one", hello_at_ns=NOW) == 0
            assert await where.enter("one", hello_at_ns=NOW) == 0  # replays are not its concern
            assert where.is_anywhere("one")
            assert where.named(store, "one") == 0 == where.session_here("one")
            assert not await where.leave("one", 0)  # the newer is there
            assert where.is_anywhere("one")
            assert await where.leave("one", 0)
            assert not where.is_anywhere("one")
            assert where.server_of("one") == ""
            await where.forget("one")
            assert store.statistics().transactions == 0

    asyncio.run(scene())
