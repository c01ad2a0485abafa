"""When agents were heard, by whichever server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.shared import virtual_loop
from support.shared.presence_rig import CHANNEL, cluster, until

from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import InvalidArgument, Unavailable
from fleetplane.kernel.presence import LastSeen, last_seen
from fleetplane.kernel.presence.last_seen import WRITE_SECONDS
from fleetplane.kernel.store import Store, StoreSettings

TERM = 30.0
SLACK = 0.2
"""What questions and answers take here, in virtual seconds."""


def test_who_is_heard_by_one_server_is_not_silent_for_another() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b, c = [await servers.start(name) for name in "abc"]
            b.ears.note("one")
            a.ears.note("two")
            assert await a.ears.read() == {"two": pytest.approx(0.0, abs=SLACK)}
            await asyncio.sleep(2 * WRITE_SECONDS)
            b.ears.note("one")
            await asyncio.sleep(20)
            for server in (a, b, c):
                ages = await server.ears.read()
                assert ages == {"one": pytest.approx(20, abs=SLACK), "two": pytest.approx(30, abs=SLACK)}

    virtual_loop.run(scene())


def test_the_latest_moment_counts_whoever_writes_last() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b = await servers.start("a"), await servers.start("b")
            b.ears.note("one")
            await asyncio.sleep(3)
            a.ears.note("one")
            await a.ears.write()
            await b.ears.write()
            assert (await a.ears.read())["one"] == pytest.approx(0, abs=SLACK)
            assert (await b.ears.read())["one"] == pytest.approx(0, abs=SLACK)

    virtual_loop.run(scene())


def test_hearing_is_no_part_of_the_log_and_one_statement_for_all() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a = await servers.start("a")
            calls: list[int] = []
            hear = servers.database.hear

            def counted(channel: str, ages: dict[str, float]) -> None:
                calls.append(len(ages))
                hear(channel, ages)

            servers.database.hear = counted  # type: ignore[method-assign, assignment]
            groups = len(servers.database.groups)
            for number in range(3000):
                a.ears.note(f"agent{number}")
                a.ears.note(f"agent{number}")
            await until(lambda: len(servers.database.heard) == 3000)
            assert [count for count in calls if count] == [3000]
            assert len(servers.database.groups) == groups

    virtual_loop.run(scene())


def test_nobody_is_silent_in_the_first_term_of_a_judge() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b = await servers.start("a"), await servers.start("b")
            assert not a.ears.is_settled(TERM)
            await asyncio.sleep(TERM + WRITE_SECONDS)
            assert a.ears.is_settled(TERM)
            a.kill()
            await until(lambda: b.is_active)
            assert not b.ears.is_settled(TERM)  # although it stood by for longer
            await asyncio.sleep(TERM / 2)
            assert not b.ears.is_settled(TERM)
            await asyncio.sleep(TERM / 2 + WRITE_SECONDS)
            assert b.ears.is_settled(TERM)

    virtual_loop.run(scene())


def test_a_server_that_becomes_the_judge_without_having_stopped_gives_everybody_a_whole_term() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a = await servers.start("a")
            await asyncio.sleep(TERM + WRITE_SECONDS)
            assert a.ears.is_settled(TERM)
            a.ears.begin_to_judge()
            assert not a.ears.is_settled(TERM)
            await asyncio.sleep(TERM)
            assert a.ears.is_settled(TERM)

    virtual_loop.run(scene())


def test_nobody_is_silent_in_the_first_term_after_a_stall_whoever_looks_first() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a = await servers.start("a")
            await asyncio.sleep(TERM + WRITE_SECONDS)
            assert a.ears.is_settled(TERM)
            loop = asyncio.get_running_loop()
            assert isinstance(loop, virtual_loop.VirtualLoop)
            loop.hold(20)
            assert not a.ears.is_settled(TERM)  # before anybody else could run

    virtual_loop.run(scene())


def test_an_outage_loses_nothing_and_nobody_is_silent_in_the_first_term_after_it() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a = await servers.start("a")
            b = await servers.start("b")
            await asyncio.sleep(TERM + WRITE_SECONDS)
            assert b.ears.is_settled(TERM)
            b.ears.note("one")
            b.link.cut = True
            await asyncio.sleep(2 * WRITE_SECONDS)
            assert not b.ears.is_settled(TERM)
            with pytest.raises(Unavailable):
                await b.ears.read()
            b.link.cut = False
            await asyncio.sleep(2 * WRITE_SECONDS)
            # A statement that arrives late makes somebody seem heard later than was so, never earlier.
            assert 3 * WRITE_SECONDS < (await a.ears.read())["one"] <= 4 * WRITE_SECONDS + SLACK
            assert not b.ears.is_settled(TERM)
            await asyncio.sleep(TERM)
            assert b.ears.is_settled(TERM)

    virtual_loop.run(scene())


def test_what_could_not_be_written_is_written_with_what_came_since() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a, b = await servers.start("a"), await servers.start("b")
            hear, refused = servers.database.hear, list[int]()

            def failing(channel: str, ages: dict[str, float]) -> None:
                if len(refused) < 2 and ages:
                    refused.append(len(ages))
                    raise Unavailable("not now")
                hear(channel, ages)

            servers.database.hear = failing  # type: ignore[method-assign, assignment]
            b.ears.note("one")
            await until(lambda: refused)
            b.ears.note("two")
            await until(lambda: len(servers.database.heard) == 2)
            assert set(await a.ears.read()) == {"one", "two"}

    virtual_loop.run(scene())


def test_agents_that_are_removed_or_stay_away_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_seen, "SWEEP_SECONDS", 60.0)
    monkeypatch.setattr(last_seen, "KEEP_SECONDS", 90.0)

    async def scene() -> None:
        async with cluster() as servers:
            a = await servers.start("a")
            for agent in ("removed", "away", "stays"):
                a.ears.note(agent)
            await a.ears.write()
            await a.ears.forget("removed")
            assert set(await a.ears.read()) == {"away", "stays"}
            for _ in range(10):
                await asyncio.sleep(20)
                a.ears.note("stays")
            assert set(await a.ears.read()) == {"stays"}

    virtual_loop.run(scene())


def test_a_name_that_could_not_be_stored_is_refused_alone() -> None:
    async def scene() -> None:
        async with cluster() as servers:
            a = await servers.start("a")
            for bad in ("", "x" * 1025, "a\0b", "\ud800"):
                with pytest.raises(InvalidArgument):
                    a.ears.note(bad)
            a.ears.note("good")
            await a.ears.write()
            assert set(await a.ears.read()) == {"good"}

    virtual_loop.run(scene())


async def test_on_a_database_file_memory_is_all_there_is(tmp_path: Path) -> None:
    clock = SystemClock()
    async with Store.open(StoreSettings(path=tmp_path / "store.db"), kinds=[], clock=clock) as store:
        ears = LastSeen(store, clock, channel=CHANNEL)
        ears.note("one")
        await ears.write()
        assert set(await ears.read()) == {"one"}
        assert ears.is_settled(0.0)
        assert not ears.is_settled(3600.0)
        await ears.forget("one")
        assert await ears.read() == {}
        assert store.statistics().transactions == 0
