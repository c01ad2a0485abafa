"""What a database owes that several servers share, beside the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.shared.postgres_server import PostgresServer

from fleetplane.kernel.store.engine import GroupAuthor
from fleetplane.kernel.store.engines.postgres import PostgresEngine

HOUR = 3600.0


@pytest.fixture
async def engines(postgres: PostgresServer) -> AsyncIterator[list[PostgresEngine]]:
    url = postgres.database()
    made = [await PostgresEngine.open(url) for _ in range(2)]
    yield made
    for engine in made:
        await engine.close()


async def test_the_latest_moment_that_an_agent_was_heard_counts(engines: list[PostgresEngine]) -> None:
    one, two = engines
    await one.hear("boards", {"a": 2 * HOUR, "b": HOUR})
    await two.hear("boards", {"a": HOUR, "b": 2 * HOUR, "ü": 0.0})
    await two.hear("gpus", {"c": 0.0})
    await one.hear("boards", {})
    for engine in engines:
        ages = await engine.heard("boards")
        assert set(ages) == {"a", "b", "ü"}
        assert all(HOUR <= ages[agent] < 2 * HOUR for agent in "ab")
        assert 0.0 <= ages["ü"] < HOUR
        assert await engine.heard("edge") == {}


async def test_two_servers_that_heard_the_same_agents_do_not_wait_in_a_circle(
    engines: list[PostgresEngine],
) -> None:
    names = [f"agent{n}" for n in range(500)]
    async with asyncio.timeout(60):
        for _ in range(5):
            await asyncio.gather(
                engines[0].hear("boards", dict.fromkeys(names, 0.0)),
                engines[1].hear("boards", dict.fromkeys(reversed(names), 0.0)),
            )
    assert len(await engines[0].heard("boards")) == len(names)


async def test_who_is_removed_or_was_not_heard_for_long_is_forgotten(engines: list[PostgresEngine]) -> None:
    engine = engines[0]
    await engine.hear("boards", {"removed": 0.0, "old": 3 * HOUR, "new": HOUR})
    await engine.hear("gpus", {"removed": 0.0, "old": 3 * HOUR})
    await engine.forget_heard("boards", ["removed", "nobody"])
    await engine.trim_heard("boards", 2 * HOUR)
    assert set(await engine.heard("boards")) == {"new"}
    assert set(await engine.heard("gpus")) == {"removed", "old"}


async def test_the_living_are_those_who_were_heard_of_recently_with_their_last_boot(
    engines: list[PostgresEngine],
) -> None:
    one, two = engines
    boot = await one.enlist("a")
    assert await two.living(HOUR) == {"a": boot}
    again = await two.enlist("a")
    other = await two.enlist("b")
    assert again > boot
    assert await one.living(HOUR) == {"a": again, "b": other}
    await one.leave(GroupAuthor("b", other))
    assert await one.living(HOUR) == {"a": again}
    assert await one.living(0.0) == {}
