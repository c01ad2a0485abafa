"""The SQLite engine: one file, write-ahead log, every commit synced.

One connection writes, in a thread of its own (`sqlite_writer.py`); a few others read the log and the audit
chain beside it, through SQLAlchemy.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import aiosqlite
from sqlalchemy import URL, Executable, Select, event, exc, func, select
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.errors import FleetplaneError, IntegrityError, StorageFull, Unavailable
from fleetplane.kernel.store import lineage, schema
from fleetplane.kernel.store.disk import is_full
from fleetplane.kernel.store.engine import (
    ClaimRow,
    DatabaseMark,
    GroupAuthor,
    GroupOutcome,
    GroupPage,
    HistoryPage,
    LoggedGroup,
    LogRow,
    ResourceRow,
    StoreContents,
    WriteGroup,
)
from fleetplane.kernel.store.engines.sqlite_writer import SqliteWriter, configure
from fleetplane.kernel.store.settings import StoreSettings
from fleetplane.kernel.unbroken import run_to_completion

READERS = 3
"""Connections beside the writer's; history is read in short pages, so they are shared by many."""
READER_WAIT_SECONDS = 30.0
LOAD_PAGE_ROWS = 1000

SCRUBBED = 1
"""The `user_version` of a file that has never had, or no longer has, unsealed bodies in free pages."""
_CHANGE = [schema.LOG.c[name] for name in LogRow._fields]


class SqliteEngine:
    def __init__(self, path: Path, engine: AsyncEngine, writer: SqliteWriter) -> None:
        self._path = path
        self._engine = engine
        self._writer = writer

    def __repr__(self) -> str:
        return f"<SqliteEngine {self._path}>"

    @classmethod
    async def open(cls, settings: StoreSettings) -> Self:
        path = settings.path
        with _translated(path):  # SQLite gives its log the mode of the database
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        engine = create_async_engine(
            URL.create("sqlite+aiosqlite", database=str(path)),
            async_creator=partial(_connected, path),
            isolation_level="AUTOCOMMIT",  # transactions are begun and ended in so many words
            pool_size=READERS,
            max_overflow=0,
            pool_timeout=READER_WAIT_SECONDS,
        )
        event.listen(engine.sync_engine, "connect", _preparing(settings.busy_timeout_seconds))
        try:
            with _translated(path):
                async with engine.connect() as connection:
                    await _bring_up_to_date(connection, path, settings.first_revision)
                writer = await SqliteWriter.open(path, settings.busy_timeout_seconds)
        except BaseException:
            await engine.dispose()
            raise
        return cls(path, engine, writer)

    async def close(self) -> None:
        with _translated(self._path):
            try:
                await self._writer.close()
            finally:
                await self._engine.dispose()

    # Writing.

    async def commit(self, group: WriteGroup) -> GroupOutcome:
        with _translated(self._path):
            return await self._writer.commit(group)

    async def settle(self, before: DatabaseMark, group_id: bytes, author: GroupAuthor) -> GroupOutcome:
        """The writer's thread has ended what it began, one way or the other, before this is asked."""
        groups = schema.GROUPS.c
        query = select(groups.group_id).where(groups.number == before.number + 1)
        async with self._reading(snapshot=True) as reader:
            found: bytes | None = (await reader.execute(query)).scalar_one_or_none()
            mark = await _mark(reader)
        return GroupOutcome(written=found == group_id, mark=mark, author=author, now_ns=time.time_ns())

    async def trim(self, limit: int) -> int:
        with _translated(self._path):
            return await self._writer.trim(limit)

    async def is_scrubbed(self) -> bool:
        """Whether nothing that was deleted before bodies were sealed is left in free pages."""
        async with self._reading() as reader:
            found: int = (await reader.exec_driver_sql("PRAGMA user_version")).scalar_one()
        return found >= SCRUBBED

    async def scrub(self) -> None:
        """Make the file anew, without free pages and what is left in them; nothing else uses it meanwhile."""
        with _translated(self._path):
            await self._writer.run(_scrub)

    # Reading.

    @asynccontextmanager
    async def _reading(self, *, snapshot: bool = False) -> AsyncIterator[AsyncConnection]:
        """A connection; with a snapshot, all that is read through it is of one moment."""
        with _translated(self._path):
            async with self._engine.connect() as reader:
                if not snapshot:
                    yield reader
                    return
                await reader.exec_driver_sql("BEGIN")
                try:
                    yield reader
                finally:
                    with suppress(exc.SQLAlchemyError):  # nothing was written
                        await reader.exec_driver_sql("ROLLBACK")

    async def mark(self) -> DatabaseMark:
        async with self._reading() as reader:
            return await _mark(reader)

    async def groups(self, *, after: int, limit: int) -> GroupPage:
        numbers, log = schema.GROUPS.c.number, schema.LOG.c
        rows: dict[int, list[LogRow]] = {}
        async with self._reading(snapshot=True) as reader:
            head = await _mark(reader)
            query = select(log.number, *_CHANGE).where(log.number > after).order_by(log.number, log.position)
            found = (await reader.execute(query.limit(limit))).all()
            last = head.number
            if len(found) == limit:  # of the last there may be more
                last = max(found[0].number, found[-1].number - 1)
                found = (await reader.execute(query.where(log.number <= last))).all()
            for number, *row in found:
                rows.setdefault(number, []).append(LogRow(*row))
            listed = select(schema.GROUPS).where(numbers >= after, numbers <= last).order_by(numbers)
            groups = [
                _logged(row, rows.get(row.number, ()))
                for row in await reader.execute(listed.limit(limit + 1))
            ]
        before = groups.pop(0).mark if groups and groups[0].mark.number == after else None
        return GroupPage(head=head, before=before, groups=groups)

    async def lineage(self) -> str:
        async with self._reading() as reader:
            found: str = (await reader.execute(select(schema.META.c.lineage))).scalar_one()
            return found

    @asynccontextmanager
    async def load(self, kinds: Sequence[str]) -> AsyncIterator[StoreContents]:
        query = select(schema.RESOURCES).where(schema.RESOURCES.c.kind.in_(kinds))
        async with self._reading(snapshot=True) as reader:
            revisions = (await reader.execute(select(schema.KINDS))).all()
            claims = (await reader.execute(select(schema.CLAIMS))).all()
            mark = await _mark(reader)
            columns = select(schema.META.c.lineage, schema.META.c.first_revision)
            found = (await reader.execute(columns)).one()

            async def resources() -> AsyncGenerator[Sequence[ResourceRow], None]:
                async with reader.stream(query) as result:
                    async for page in result.partitions(LOAD_PAGE_ROWS):
                        yield [ResourceRow(*row) for row in page]

            async with aclosing(resources()) as pages:
                yield StoreContents(
                    mark=mark,
                    lineage=found.lineage,
                    first_revision=found.first_revision,
                    kinds={row.kind: row.revision for row in revisions},
                    claims=[ClaimRow(*row) for row in claims],
                    resources=pages,
                )

    async def history(self, kind: str, *, after: int, until: int, limit: int) -> HistoryPage:
        log = schema.LOG.c
        async with self._reading(snapshot=True) as reader:  # one for the horizon and the events
            compacted = (await _mark(reader)).compacted
            query = (
                select(*_CHANGE)
                .where(log.kind == kind, log.revision > max(after, compacted), log.revision <= until)
                .order_by(log.revision)
            )
            found = [LogRow(*row) for row in await reader.execute(query.limit(limit + 1))]
            if (complete := len(found) <= limit) is False:
                found = _whole_transactions(found) or await _first_transaction(reader, query, limit)
        return HistoryPage(compacted=compacted, events=found, complete=complete)

    async def history_bytes(self) -> int:
        log = schema.LOG.c
        async with self._reading(snapshot=True) as reader:
            kept = log.revision > (await _mark(reader)).compacted
            query = select(func.coalesce(func.sum(func.length(log.body)), 0)).where(kept)
            found: int = (await reader.execute(query)).scalar_one()
        return found

    async def history_horizon(self, size_bytes: int) -> int:
        log = schema.LOG.c
        async with self._reading(snapshot=True) as reader:
            kept = log.revision > (await _mark(reader)).compacted
            weight = func.sum(func.length(log.body)).over(order_by=log.revision).label("size")
            running = select(log.revision, weight).where(kept).subquery()
            query = select(func.min(running.c.revision)).where(running.c.size >= size_bytes)
            found: int | None = (await reader.execute(query)).scalar_one_or_none()
        return found or 0

    async def secret(self, name: str) -> bytes | None:
        query = select(schema.SECRETS.c.blob).where(schema.SECRETS.c.name == name)
        async with self._reading() as reader:
            found: bytes | None = (await reader.execute(query)).scalar_one_or_none()
            return found

    async def secret_names(self, prefix: str) -> Sequence[str]:
        names = schema.SECRETS.c.name
        query = select(names).where(names.startswith(prefix, autoescape=True)).order_by(names)
        async with self._reading() as reader:
            return (await reader.execute(query)).scalars().all()

    async def audit_row(self, seq: int) -> audit.Row | None:
        query = select(schema.AUDIT).where(schema.AUDIT.c.seq == seq)
        async with self._reading() as reader:
            row = (await reader.execute(query)).one_or_none()
        return None if row is None else audit.Row(seq=row.seq, hash=row.hash, entry=row.entry)

    async def audit(self, *, after: int = 0) -> AsyncGenerator[Sequence[audit.Row], None]:
        query = select(schema.AUDIT).where(schema.AUDIT.c.seq > after).order_by(schema.AUDIT.c.seq)
        async with aclosing(self._pages(query, LOAD_PAGE_ROWS)) as pages:
            async for page in pages:
                yield [audit.Row(seq=row.seq, hash=row.hash, entry=row.entry) for row in page]

    async def _pages(self, query: Executable, size: int) -> AsyncGenerator[Sequence[Any], None]:
        with _translated(self._path):
            async with self._engine.connect() as reader, reader.stream(query) as result:
                async for page in result.partitions(size):
                    yield page


def _whole_transactions(rows: Sequence[LogRow]) -> list[LogRow]:
    """All but the last transaction, of which more may follow."""
    last = rows[-1].transaction
    return [row for row in rows if row.transaction != last]


async def _first_transaction(
    reader: AsyncConnection, query: Select[tuple[Any, ...]], limit: int
) -> list[LogRow]:
    """All of one that is larger than a page."""
    while True:
        limit *= 4
        found = [LogRow(*row) for row in await reader.execute(query.limit(limit))]
        if len(found) < limit or found[-1].transaction != found[0].transaction:
            return [row for row in found if row.transaction == found[0].transaction]


def _scrub(connection: sqlite3.Connection) -> None:
    connection.execute("VACUUM")
    connection.execute(f"PRAGMA user_version = {SCRUBBED}")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


async def _mark(connection: AsyncConnection) -> DatabaseMark:
    query = select(schema.GROUPS).order_by(schema.GROUPS.c.number.desc()).limit(1)
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise IntegrityError("the database has no revision")
    return _after(row)


def _after(row: Any) -> DatabaseMark:
    return DatabaseMark(
        number=row.number,
        revision=row.revision,
        compacted=row.compacted,
        audit_seq=row.audit_seq,
        audit_hash=row.audit_hash,
    )


def _logged(row: Any, changes: Sequence[LogRow]) -> LoggedGroup:
    return LoggedGroup(
        id=row.group_id,
        author=GroupAuthor(row.server, row.boot, row.term),
        mark=_after(row),
        log=changes,
        at_ns=row.at_ns,
    )


async def _connected(path: Path) -> aiosqlite.Connection:
    """A connection, made to its end: one that is left half-way answers a loop that may be closed by then."""
    made = aiosqlite.connect(path, check_same_thread=False)
    made._thread.daemon = True  # as SQLAlchemy does

    async def connect() -> None:
        await made

    try:
        await run_to_completion(connect())
    except asyncio.CancelledError:
        await run_to_completion(made.close())
        raise
    return made


def _preparing(busy_timeout_seconds: float) -> Any:
    def prepare(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
        try:
            configure(connection, busy_timeout_seconds)
        except BaseException:
            connection.close()  # which nobody else does for one that was never in the pool
            raise

    return prepare


async def _bring_up_to_date(connection: AsyncConnection, path: Path, first_revision: int) -> None:
    """Create the tables, or migrate them; Alembic is only loaded if there is something to migrate."""
    tables = (await connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'")).all()
    if not tables:
        await _create(connection, first_revision)
        return
    names = {row.name for row in tables}
    if "alembic_version" not in names:
        raise IntegrityError(f"{path} is a database of something else")
    found = (await connection.exec_driver_sql("SELECT version_num FROM alembic_version")).scalar_one_or_none()
    if found != schema.SCHEMA_REVISION:
        from fleetplane.kernel.store.migrations.runner import upgrade

        await connection.run_sync(upgrade, found)


async def _create(connection: AsyncConnection, first_revision: int) -> None:
    await connection.exec_driver_sql("BEGIN IMMEDIATE")
    await connection.run_sync(schema.METADATA.create_all, checkfirst=False)
    await connection.exec_driver_sql(f"PRAGMA user_version = {SCRUBBED}")
    await connection.exec_driver_sql(
        "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"
    )
    await connection.exec_driver_sql("INSERT INTO alembic_version VALUES (?)", (schema.SCHEMA_REVISION,))
    await connection.exec_driver_sql(
        "INSERT INTO meta (id, lineage, first_revision) VALUES (1, ?, ?)", (lineage.new_id(), first_revision)
    )
    await connection.exec_driver_sql(
        "INSERT INTO groups VALUES (0, ?, ?, 0, ?, 0, '', 0, ?, ?)",
        (first_revision, first_revision, audit.GENESIS, b"", time.time_ns()),
    )
    await connection.exec_driver_sql("COMMIT")


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Translate a database error into one of the error tree."""
    try:
        yield
    except (exc.DBAPIError, exc.TimeoutError, sqlite3.Error, OSError) as error:
        raise _meaning(error, path) from error
    except (exc.SQLAlchemyError, UnicodeError, ValueError, TypeError) as error:
        # No such table, row or type of value, or no text, where there always is one.
        raise IntegrityError(f"{path} is damaged: {error}", hint=lineage.DAMAGED) from error


def _meaning(error: Exception, path: Path) -> FleetplaneError:
    original = error.orig if isinstance(error, exc.DBAPIError) else error
    name = getattr(original, "sqlite_errorname", "")
    if name == "SQLITE_FULL" or (name.startswith("SQLITE_IOERR") and is_full(path)):
        return StorageFull(f"no space left for {path}")
    if name in {"SQLITE_CORRUPT", "SQLITE_NOTADB"}:
        return IntegrityError(f"{path} is damaged: {original}", hint=lineage.DAMAGED)
    if name.startswith("SQLITE_CONSTRAINT"):  # the same number, claim or audit entry twice
        return IntegrityError(f"{path} refused what contradicts it: {original}")
    return Unavailable(f"{path} cannot be used: {original}")
