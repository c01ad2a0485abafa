"""A connection to PostgreSQL of telemetry's own, and what its errors mean here.

A server has two: one writes and sweeps, one answers questions. Neither knows the store's lock, and whatever
is not answered in time is given up by closing the socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import asyncpg

from fleetplane.kernel.errors import FleetplaneError, IntegrityError, StorageFull, Unavailable
from fleetplane.kernel.store.engines.postgres_line import CLOSE_SECONDS, connect
from fleetplane.kernel.telemetry.engine import Away

PATIENCE: Final = {"write": 30.0, "question": 20.0}
"""Seconds for a batch, a slice of a sweep, or a question, with all its statements."""
WRITER: Final = {
    "lock_timeout": "2000",
    "tcp_user_timeout": "3000",
    "idle_in_transaction_session_timeout": "5000",
}
"""In milliseconds. A table that is not free soon is dropped at the next sweep: others wait behind us."""
READER: Final = {
    "statement_timeout": "10000",
    "tcp_user_timeout": "3000",
    "idle_in_transaction_session_timeout": "5000",
    "default_transaction_read_only": "on",
}
ANSWERS: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError)
SNAPSHOT: Final = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


class PostgresLink:
    """One connection, one user at a time; made anew when it broke."""

    def __init__(self, url: str, settings: Mapping[str, str], purpose: str) -> None:
        self._url = url
        self._settings = settings
        self._purpose = purpose
        self._connection: Any = None
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Link {self._purpose} {'open' if self._connection is not None else 'closed'}>"

    @asynccontextmanager
    async def held(self) -> AsyncIterator[Any]:
        """The connection, for as long as a user's patience lasts."""
        async with self._turn:
            try:
                async with asyncio.timeout(PATIENCE[self._purpose]):
                    if self._connection is None or self._connection.is_closed():
                        self._connection = await connect(self._url, self._settings)
                    yield self._connection
            except asyncpg.PostgresError as error:  # the database has answered
                if self._connection is not None and self._connection.is_in_transaction():
                    self._terminate()
                raise meaning(error) from error
            except ANSWERS as error:
                self._terminate()
                raise meaning(error) from error
            except BaseException:
                self._terminate()
                raise

    def _terminate(self) -> None:
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*ANSWERS):
                await connection.close(timeout=CLOSE_SECONDS)


@asynccontextmanager
async def transaction(connection: Any, begin: str = "BEGIN") -> AsyncIterator[None]:
    """Rolled back where the database refused something; whatever else goes wrong costs the connection."""
    await connection.execute(begin)
    try:
        yield
        await connection.execute("COMMIT")
    except asyncpg.PostgresError:
        if not connection.is_closed():
            await connection.execute("ROLLBACK")
        raise


def meaning(error: Exception) -> FleetplaneError:
    """A database error as one of the error tree; `Away` if the same may work later."""
    if isinstance(error, asyncpg.DiskFullError):
        return StorageFull("no space left for telemetry in the database")
    if isinstance(error, asyncpg.QueryCanceledError):
        return Away("the telemetry query took too long", hint="query a shorter range of time")
    if isinstance(error, asyncpg.UndefinedTableError):
        return Unavailable("the database holds no telemetry yet")
    if isinstance(
        error,
        asyncpg.IntegrityConstraintViolationError | asyncpg.DataError | asyncpg.SyntaxOrAccessError,
    ):
        return IntegrityError(f"the database refused telemetry: {error}")
    return Away(f"the database cannot be used for telemetry: {str(error) or type(error).__name__}")
