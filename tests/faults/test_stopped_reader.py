"""A server that stops while it reads a large answer under the lock: others wait for seconds, not for ever."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from support.shared.enginekit import group
from support.shared.postgres_server import PostgresServer
from support.shared.rough_network import rough_network

from fleetplane.kernel.errors import Unavailable
from fleetplane.kernel.store.engine import GroupPage, WriteGroup
from fleetplane.kernel.store.engines.postgres import PostgresEngine
from fleetplane.kernel.store.engines.postgres_line import connect

DEADLINE_SECONDS = 60.0
GROUPS, BODY = 60, b"x" * 500_000
"""More than sockets hold that nobody reads from."""
HELD = (
    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


@pytest.mark.timeout(300)
async def test_a_server_that_stops_while_it_reads_under_the_lock_is_cut_off(postgres: PostgresServer) -> None:
    url, direct = postgres.database(), f"127.0.0.1:{postgres.port}"
    async with asyncio.timeout(4 * DEADLINE_SECONDS), rough_network(direct) as network:
        writer = await PostgresEngine.open(url)
        stopped = await PostgresEngine.open(url.replace(direct, network.address))
        looking = await connect(url, {})
        try:
            mark = await writer.mark()
            for number in range(GROUPS):
                written = group(mark, f"a{number}", body=BODY)
                assert (await writer.commit(written)).written
                mark = written.after
            network.hold_after_bytes = 1_000_000

            async def draft(_: GroupPage) -> WriteGroup | None:
                raise AssertionError("it has read everything")

            reading = asyncio.ensure_future(stopped.commit_alone(after=0, limit=500, draft=draft))
            while not await looking.fetchval(HELD) and not reading.done():  # cut off before anybody looked
                await asyncio.sleep(0.01)
            # By now it reads, or is about to, and holds the lock; it does not read to the end.
            outcome = None
            while outcome is None:
                with suppress(Unavailable):  # who waits for the lock may give up, on a busy machine
                    outcome = await writer.commit(group(mark, "b"))
            assert outcome.written
            network.cut()
            with pytest.raises(Unavailable):
                await reading
        finally:
            network.cut()
            await looking.close()
            await stopped.close()
            await writer.close()
