"""Presence and who was heard, on a real database that several servers share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.shared.postgres_server import PostgresServer

from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.presence import (
    PRESENCE,
    LastSeen,
    PresenceRegistry,
    ReplayedHello,
    departures,
    last_seen,
)
from fleetplane.kernel.store import StoreSettings
from fleetplane.kernel.store.engines import postgres_schema
from fleetplane.kernel.store.engines.postgres import PostgresEngine
from fleetplane.kernel.store.servers import leader_lease
from fleetplane.kernel.store.servers.replica import Replica

DEADLINE_SECONDS = 60.0
CHANNEL = "edge"
AGENTS = [f"agent{n}" for n in range(300)]


@pytest.fixture
def url(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database for servers of this process, which lose nothing by being held up."""
    patient = {
        name: text.replace(f"secs => {leader_lease.LIFE_SECONDS}", f"secs => {DEADLINE_SECONDS}")
        for name, text in postgres_schema.FUNCTIONS.items()
    }
    monkeypatch.setattr(postgres_schema, "FUNCTIONS", patient)
    for module, name in (
        (leader_lease, "LIFE_SECONDS"),
        (leader_lease, "GIVE_UP_SECONDS"),
        (leader_lease, "FRESH_SECONDS"),
        (last_seen, "ASK_SECONDS"),
    ):
        monkeypatch.setattr(module, name, DEADLINE_SECONDS)
    return postgres.database()


class Server:
    def __init__(self, standby: Replica) -> None:
        clock = SystemClock()
        self.store = standby.store
        self.where = PresenceRegistry(standby.store, clock, channel=CHANNEL)
        self.ears = LastSeen(standby.store, clock, channel=CHANNEL)
        self.moved: list[tuple[str, int]] = []
        self.ended: list[tuple[str, int]] = []
        self.is_active = False
        self.where.on_moved(lambda *told: self.moved.append(told))

    async def note(self, agent: str, session: int) -> None:
        self.ended.append((agent, session))


async def until(holds: object) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not holds():  # type: ignore[operator]
            await asyncio.sleep(0.01)


@asynccontextmanager
async def server(url: str, folder: Path, name: str) -> AsyncIterator[Server]:
    """One that follows and writes, and is active if it is the first."""
    engine = await PostgresEngine.open(url)
    settings = StoreSettings(path=folder / name / "store.db", url=url, server=name)
    standby = await Replica.load(engine, settings, server=name, kinds=[PRESENCE], clock=SystemClock())
    made = Server(standby)

    async def live() -> None:
        async with standby.active(lambda _: made.where.run_here()) as store, asyncio.TaskGroup() as tasks:
            tasks.create_task(made.where.run_here())
            tasks.create_task(made.where.run_for_all(made.note))
            made.is_active = True
            await store.writing()

    living = asyncio.create_task(live())
    try:
        yield made
    finally:
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
        await engine.close()


async def test_agents_are_known_and_move_on_all_servers_in_few_transactions(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(departures, "RECONNECT_SECONDS", 0.5)
    async with server(url, tmp_path, "a") as a, asyncio.timeout(DEADLINE_SECONDS):
        await until(lambda: a.is_active)
        async with server(url, tmp_path, "b") as b:
            async with server(url, tmp_path, "c") as c:
                before = a.store.statistics().transactions
                first = await asyncio.gather(*(a.where.enter(name, hello_at_ns=1) for name in AGENTS))
                assert a.store.statistics().transactions - before < len(AGENTS) / 10
                await until(lambda: all(map(c.where.is_anywhere, AGENTS)))
                second = await asyncio.gather(*(c.where.enter(name, hello_at_ns=2) for name in AGENTS))
                await until(lambda: len(a.moved) == len(AGENTS))
                assert sorted(a.moved) == sorted(zip(AGENTS, first, strict=True))
                with pytest.raises(ReplayedHello):
                    await b.where.enter(AGENTS[0], hello_at_ns=2)
                assert not await a.where.leave(AGENTS[0], first[0])
                stays = await b.where.enter(AGENTS[0], hello_at_ns=3)
            # It has left the database, so nobody waits for it to be silent.
            await until(lambda: len(a.ended) == len(AGENTS) - 1)
            assert sorted(a.ended) == sorted(list(zip(AGENTS, second, strict=True))[1:])
            assert a.where.named(a.store, AGENTS[0]) == stays
            await until(lambda: not any(map(b.where.is_anywhere, AGENTS[1:])))


async def test_who_was_heard_by_one_server_was_heard_for_all(url: str, tmp_path: Path) -> None:
    async with server(url, tmp_path, "a") as a, server(url, tmp_path, "b") as b:
        for name in AGENTS:
            b.ears.note(name)
        await b.ears.write()
        ages = await a.ears.read()
        assert set(ages) == set(AGENTS)
        assert all(0.0 <= age < DEADLINE_SECONDS for age in ages.values())
        await a.ears.forget(AGENTS[0])
        assert set(await b.ears.read()) == set(AGENTS[1:])
