"""Connections to PostgreSQL, and what its errors mean."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import asyncpg

from fleetplane.kernel.errors import FleetplaneError, IntegrityError, StorageFull, Unavailable

CONNECT_SECONDS = 5.0
CLOSE_SECONDS = 2.0
LOADER = {"tcp_user_timeout": "3000", "idle_in_transaction_session_timeout": "60000"}
"""In milliseconds; of a connection that reads or writes everything."""


async def connect(url: str, settings: Mapping[str, str]) -> Any:
    return await asyncpg.connect(url, timeout=CONNECT_SECONDS, server_settings=dict(settings))


class PostgresCallLink:
    """One connection for one kind of call, made anew when it broke; one call at a time."""

    def __init__(self, url: str, settings: Mapping[str, str]) -> None:
        self._url = url
        self._settings = settings
        self._connection: Any = None
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Line {'open' if self._connection is not None else 'closed'}>"

    async def row(self, query: str, *arguments: object) -> Any:
        """Make a call that has one row for an answer."""
        return await self.call(lambda connection: connection.fetchrow(query, *arguments))

    async def call(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        """Use the connection. Whoever is cancelled meanwhile closes the socket, and sends no cancellation."""
        async with self._turn:
            with translated():
                if self._connection is None or self._connection.is_closed():
                    self._connection = await connect(self._url, self._settings)
                call = asyncio.ensure_future(work(self._connection))
                try:
                    return await asyncio.shield(call)
                except asyncio.CancelledError:
                    self._connection.terminate()
                    self._connection = None
                    await asyncio.gather(call, return_exceptions=True)
                    raise
                except (OSError, *BROKEN, asyncpg.PostgresConnectionError):
                    self._connection.terminate()
                    self._connection = None
                    raise

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await connection.close(timeout=CLOSE_SECONDS)


BROKEN = (asyncpg.InterfaceError, asyncpg.InternalClientError)
"""What the driver raises of a connection that cannot be used any more. The second is what it makes of an end
that the database announces between two calls, as it does to who was idle in a transaction for too long."""


@asynccontextmanager
async def given_up(connection: Any) -> AsyncIterator[None]:
    """Close the socket if whoever uses the connection is cancelled.

    The driver would ask the database to cancel, and wait for that: for a minute where the network is silent,
    and all that time whoever cancelled would wait, too.
    """
    try:
        yield
    except asyncio.CancelledError:
        connection.terminate()
        raise


@asynccontextmanager
async def one_moment(connection: Any) -> AsyncIterator[None]:
    """A transaction that reads all of one moment; whoever is cancelled in it rolls nothing back."""
    transaction = connection.transaction(isolation="repeatable_read", readonly=True)
    await transaction.start()
    try:
        yield
    except Exception:
        await transaction.rollback()
        raise
    await transaction.commit()


@contextmanager
def translated() -> Iterator[None]:
    """Translate a database error into one of the error tree."""
    try:
        yield
    except (asyncpg.PostgresError, *BROKEN, OSError, TimeoutError) as error:
        raise _meaning(error) from error


def _meaning(error: Exception) -> FleetplaneError:
    if isinstance(error, asyncpg.DiskFullError):
        return StorageFull("no space left for the database")
    if isinstance(error, asyncpg.IntegrityConstraintViolationError):
        return IntegrityError(f"the database refused what contradicts it: {error}")
    if isinstance(error, asyncpg.DataError | asyncpg.SyntaxOrAccessError):
        return IntegrityError(f"the database is not as it should be: {error}")
    return Unavailable(f"the database cannot be used: {str(error) or type(error).__name__}")
