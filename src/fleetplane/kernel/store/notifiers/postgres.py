"""The bell over PostgreSQL: LISTEN and NOTIFY, on a connection of its own.

A NOTIFY inside of a commit made it eight times as slow, as all of them wait for one lock. It is sent after
the commit, in a transaction of its own. Does not work through PgBouncer in transaction mode.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg

from fleetplane.kernel.store.engines.postgres_line import LOADER, connect, translated
from fleetplane.kernel.store.notifiers.notifier import BusKind, Heard

CHANNEL = "fleetplane_"
"""And the lineage: several installations may share a database, in schemas of their own."""


class NotifyLine:
    def __init__(self, connection: Any, channel: str) -> None:
        self._connection = connection
        self._channel = channel
        self._busy = asyncio.Lock()  # guards: a connection carries out one statement at a time
        self._lost = asyncio.Event()
        connection.add_termination_listener(lambda _: self._lost.set())

    def __repr__(self) -> str:
        return f"<NotifyLine {self._channel}>"

    async def ring(self, message: bytes) -> None:
        await self._execute("SELECT pg_notify($1, $2)", self._channel, message.decode())

    async def check(self) -> None:
        await self._execute("SELECT 1")

    async def _execute(self, statement: str, *values: str) -> None:
        async with self._busy:
            with translated():
                await self._connection.execute(statement, *values)

    async def lost(self) -> str:
        await self._lost.wait()
        return "the connection to the database was lost"


class NotifyBus:
    kind = BusKind.NOTIFY

    def __init__(self, url: str) -> None:
        self._url = url

    def __repr__(self) -> str:
        return "<NotifyBus>"

    @asynccontextmanager
    async def line(self, lineage: str, heard: Heard) -> AsyncIterator[NotifyLine]:
        channel = f"{CHANNEL}{lineage}"
        with translated():
            connection = await connect(self._url, LOADER)
        try:
            line = NotifyLine(connection, channel)
            with translated():
                await connection.add_listener(channel, lambda *found: heard(found[-1].encode()))
            yield line
        finally:
            with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                connection.terminate()
