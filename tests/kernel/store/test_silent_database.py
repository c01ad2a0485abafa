"""A database that is connected and says nothing: whoever waits for it can still be stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.shared.postgres_server import PostgresServer
from support.shared.rough_network import rough_network
from support.shared.storekit import KINDS, THING, put

from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.kernel.store.engine import Superseded
from fleetplane.kernel.store.engines.postgres import PostgresEngine
from fleetplane.kernel.store.servers import leader_lease

DEADLINE_SECONDS = 30.0
"""Less than the driver waits for by itself."""


async def _load(engine: PostgresEngine) -> None:
    async with engine.load([THING.name]) as contents:
        async for _ in contents.resources:
            pass


@pytest.mark.parametrize(
    "ask",
    [
        lambda engine: engine.mark(),
        lambda engine: engine.groups(after=0, limit=10),
        lambda engine: engine.history("thing", after=0, until=1, limit=10),
        lambda engine: engine.secret("x"),
        _load,
    ],
    ids=["mark", "groups", "history", "secret", "load"],
)
async def test_a_question_that_is_not_answered_can_be_cancelled(
    postgres: PostgresServer, ask: Callable[[PostgresEngine], Awaitable[object]]
) -> None:
    direct = f"127.0.0.1:{postgres.port}"
    async with rough_network(direct) as network:
        engine = await PostgresEngine.open(postgres.database().replace(direct, network.address))
        try:
            await ask(engine)
            network.hold()
            asking = asyncio.ensure_future(ask(engine))
            await asyncio.wait([asking], timeout=0.2)
            asking.cancel()
            async with asyncio.timeout(DEADLINE_SECONDS):
                with pytest.raises(asyncio.CancelledError):
                    await asking
            network.heal()
            await ask(engine)
        finally:
            network.cut()
            await engine.close()


async def test_the_active_server_gives_up_when_the_database_falls_silent(
    tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_lease, "LEAVE_SECONDS", 0.1)  # others learn it by its silence
    direct = f"127.0.0.1:{postgres.port}"
    async with asyncio.timeout(DEADLINE_SECONDS), rough_network(direct) as network:
        url = postgres.database().replace(direct, network.address)
        settings = StoreSettings(path=tmp_path / "store.db", url=url, server="one")

        async def serve() -> None:
            async with Store.open(settings, kinds=KINDS, clock=SystemClock()) as store:
                await put(store, "x")
                network.hold()
                await store.writing()

        with pytest.raises(Superseded, match="could not be renewed"):
            await serve()
