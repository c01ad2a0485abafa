"""Telemetry's connection to PostgreSQL: its settings, its errors, and the encoding of COPY rows.

A server has two: one writes and sweeps, one answers queries. Neither takes the store's lock, and a
statement that is not answered in time is given up by closing the socket. The encoding is pure and
runs on a thread of its own.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NamedTuple

import asyncpg

from fleetplane.kernel.errors import FleetplaneError, IntegrityError, StorageFull, Unavailable
from fleetplane.kernel.store.engines.postgres_line import CLOSE_SECONDS, connect
from fleetplane.kernel.telemetry.engine import Away

_HEADER: Final = b"PGCOPY\n\xff\r\n\0" + struct.pack(">ii", 0, 0)
_END: Final = struct.pack(">h", -1)
_POINT: Final = struct.Struct(">hiqiqidid").pack
_LINE: Final = struct.Struct(">hiqiqiqiqi").pack
_LENGTH: Final = struct.Struct(">i").pack
CHUNK_BYTES: Final = 256 * 1024
"""Handed to the connection at once, between which others run."""

PointRow = tuple[int, int, float, float]


class LineRow(NamedTuple):
    channel: int
    at_ns: int
    mark: int
    code: int
    source: str
    subject: str
    action: str
    body: bytes


def text(given: str) -> str:
    """As PostgreSQL can hold it: it knows no character zero."""
    return given.replace("\0", "\ufffd") if "\0" in given else given


def points(rows: Iterable[PointRow]) -> list[bytes]:
    pack = _POINT
    return _chunks([pack(4, 8, row[0], 8, row[1], 8, row[2], 8, row[3]) for row in rows])


def lines(rows: Iterable[LineRow]) -> list[bytes]:
    made: list[bytes] = []
    pack, length = _LINE, _LENGTH
    sources: dict[str, bytes] = {}
    for channel, at_ns, mark, code, source, subject, action, body in rows:
        if (sender := sources.get(source)) is None:
            sender = sources[source] = source.encode()
        about, done = subject.encode(), action.encode()
        made.append(pack(8, 8, channel, 8, at_ns, 8, mark, 8, code, len(sender)))
        made += (sender, length(len(about)), about, length(len(done)), done, length(len(body)), body)
    return _chunks(made)


def _chunks(parts: Sequence[bytes]) -> list[bytes]:
    whole = b"".join((_HEADER, *parts, _END))
    return [whole[start : start + CHUNK_BYTES] for start in range(0, len(whole), CHUNK_BYTES)]


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
