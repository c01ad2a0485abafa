"""The SQLite engine: one file, write-ahead log, every commit synced.

One connection writes; a few others read the log and the audit chain beside it. Statements are
built with SQLAlchemy Core and rendered once: a commit is a handful of `executemany` calls.
"""

from __future__ import annotations

import errno
import os
import resource
import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import aiosqlite
from sqlalchemy import URL, Executable, bindparam, delete, event, exc, select, update
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.sql import ClauseElement
from sqlalchemy.sql.schema import Table

from fleetplane.kernel import audit
from fleetplane.kernel.errors import FleetplaneError, IntegrityError, StorageFull, Unavailable
from fleetplane.kernel.store import schema
from fleetplane.kernel.store.engine import (
    ClaimRow,
    Contents,
    EventRow,
    HistoryPage,
    Mark,
    ResourceRow,
    WriteGroup,
)
from fleetplane.kernel.store.settings import StoreSettings

READERS = 3
"""Connections beside the writer's; history is read in short pages, so they are shared by many."""
READER_WAIT_SECONDS = 30.0
LOAD_PAGE_ROWS = 1000
JOURNAL_LIMIT_BYTES = 16 * 1024 * 1024
"""What a log that had to grow shrinks back to; four times the 1,000 pages after which it is folded in."""
PROBE_BYTES = 64 * 1024
"""Written and removed again to learn why a write failed: more than fits beside a full disk's last block."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def _render(statement: ClauseElement) -> str:
    return str(statement.compile(dialect=sqlite.dialect(paramstyle="qmark")))


def _upsert(table: Table) -> str:
    """Parameters in the order of the table's columns."""
    insert = sqlite.insert(table)
    others = {column.name: insert.excluded[column.name] for column in table.columns if not column.primary_key}
    return _render(insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=others))


def _delete(table: Table) -> str:
    """Parameters in the order of the table's primary key."""
    return _render(delete(table).where(*(column == bindparam(column.name) for column in table.primary_key)))


class _Statements:
    """What a commit says, rendered once."""

    def __init__(self) -> None:
        meta = schema.META.c
        self.advance = _render(
            update(schema.META)
            .values({name: bindparam(name) for name in ("revision", "compacted", "audit_seq", "audit_hash")})
            .where(meta.revision == bindparam("was"), meta.audit_seq == bindparam("was_seq"))
        )
        self.put = _upsert(schema.RESOURCES)
        self.delete = _delete(schema.RESOURCES)
        self.log = _render(sqlite.insert(schema.EVENTS))
        self.trim = _render(delete(schema.EVENTS).where(schema.EVENTS.c.revision <= bindparam("horizon")))
        self.kind = _upsert(schema.KINDS)
        self.claim = _upsert(schema.CLAIMS)
        self.release = _delete(schema.CLAIMS)
        self.put_secret = _upsert(schema.SECRETS)
        self.delete_secret = _delete(schema.SECRETS)
        self.audit = _render(sqlite.insert(schema.AUDIT))


class SqliteEngine:
    def __init__(
        self, path: Path, engine: AsyncEngine, writer: AsyncConnection, cursor: aiosqlite.Cursor
    ) -> None:
        self._path = path
        self._engine = engine
        self._writer = writer
        # Commits go straight to the driver: each call costs one hop to its thread, where
        # SQLAlchemy's cursors cost three.
        self._cursor = cursor
        self._sql = _Statements()

    def __repr__(self) -> str:
        return f"<SqliteEngine {self._path}>"

    @classmethod
    async def open(cls, settings: StoreSettings) -> Self:
        path = settings.path
        with _translated(path):  # SQLite gives its log the mode of the database
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        engine = create_async_engine(
            URL.create("sqlite+aiosqlite", database=str(path)),
            isolation_level="AUTOCOMMIT",  # transactions are begun and ended in so many words
            pool_size=1 + READERS,
            max_overflow=0,
            pool_timeout=READER_WAIT_SECONDS,
        )
        event.listen(engine.sync_engine, "connect", _preparing(settings.busy_timeout_seconds))
        try:
            with _translated(path):
                writer = await engine.connect()
                try:
                    await _bring_up_to_date(writer, path)
                    driver = (await writer.get_raw_connection()).driver_connection
                    assert isinstance(driver, aiosqlite.Connection)
                    cursor = await driver.cursor()
                except BaseException:
                    await writer.close()
                    raise
        except BaseException:
            await engine.dispose()
            raise
        return cls(path, engine, writer, cursor)

    async def close(self) -> None:
        with _translated(self._path):
            await self._cursor.close()
            await self._writer.close()
            await self._engine.dispose()

    # Writing.

    async def commit(self, group: WriteGroup) -> None:
        with _translated(self._path):
            await self._cursor.execute("BEGIN IMMEDIATE")
            try:
                await self._write(group)
                await self._cursor.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # SQLite may have rolled back by itself
                    await self._cursor.execute("ROLLBACK")
                raise

    async def _write(self, group: WriteGroup) -> None:
        sql, before, after = self._sql, group.before, group.after
        # First, because it also proves that nobody else has written since.
        moved = await self._cursor.execute(
            sql.advance,
            (
                after.revision,
                after.compacted,
                after.audit_seq,
                after.audit_hash,
                before.revision,
                before.audit_seq,
            ),
        )
        if moved.rowcount != 1:
            raise IntegrityError(f"{self._path} is no longer at revision {before.revision}")
        await self._many(sql.delete, group.deletes)
        await self._many(sql.put, group.puts)
        await self._many(sql.log, group.events)
        await self._many(sql.kind, group.kinds)
        await self._many(sql.release, group.releases)
        await self._many(sql.claim, group.claims)
        await self._many(sql.delete_secret, group.secret_deletes)
        await self._many(sql.put_secret, group.secrets)
        await self._many(sql.audit, [(row.seq, row.hash, row.entry) for row in group.audit])
        if after.compacted > before.compacted:
            await self._cursor.execute(sql.trim, (after.compacted,))

    async def _many(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        if rows:
            await self._cursor.executemany(statement, rows)

    async def mark(self) -> Mark:
        with _translated(self._path):
            async with self._engine.connect() as reader:
                return await _mark(reader)

    # Reading.

    async def contents(self) -> Contents:
        with _translated(self._path):
            async with self._engine.connect() as reader:
                kinds = (await reader.execute(select(schema.KINDS))).all()
                claims = (await reader.execute(select(schema.CLAIMS))).all()
                return Contents(
                    mark=await _mark(reader),
                    kinds={row.kind: row.revision for row in kinds},
                    claims=[ClaimRow(*row) for row in claims],
                )

    async def resources(self, kinds: Sequence[str]) -> AsyncIterator[Sequence[ResourceRow]]:
        query = select(schema.RESOURCES).where(schema.RESOURCES.c.kind.in_(kinds))
        async for page in self._pages(query, LOAD_PAGE_ROWS):
            yield [ResourceRow(*row) for row in page]

    async def history(self, kind: str, *, after: int, until: int, limit: int) -> HistoryPage:
        log = schema.EVENTS.c
        query = (
            select(schema.EVENTS)
            .where(log.kind == kind, log.revision > after, log.revision <= until)
            .order_by(log.revision, log.ordinal)
        )
        with _translated(self._path):
            async with self._engine.connect() as reader:
                await reader.exec_driver_sql("BEGIN")  # one snapshot for the horizon and the events
                compacted = (await _mark(reader)).compacted
                found = [EventRow(*row) for row in await reader.execute(query.limit(limit + 1))]
                if (complete := len(found) <= limit) is False:
                    found = _whole_transactions(found)
                    if not found:  # one transaction larger than a page
                        first = (await reader.execute(query.limit(1))).one()
                        rows = await reader.execute(query.where(log.revision == first.revision))
                        found = [EventRow(*row) for row in rows]
                await reader.exec_driver_sql("COMMIT")
        return HistoryPage(compacted=compacted, events=found, complete=complete)

    async def secret(self, name: str) -> bytes | None:
        with _translated(self._path):
            async with self._engine.connect() as reader:
                query = select(schema.SECRETS.c.blob).where(schema.SECRETS.c.name == name)
                found: bytes | None = (await reader.execute(query)).scalar_one_or_none()
                return found

    async def secret_names(self, prefix: str) -> Sequence[str]:
        with _translated(self._path):
            async with self._engine.connect() as reader:
                names = schema.SECRETS.c.name
                query = select(names).where(names.startswith(prefix, autoescape=True)).order_by(names)
                return (await reader.execute(query)).scalars().all()

    async def audit(self, *, after: int = 0) -> AsyncIterator[Sequence[audit.Row]]:
        query = select(schema.AUDIT).where(schema.AUDIT.c.seq > after).order_by(schema.AUDIT.c.seq)
        async for page in self._pages(query, LOAD_PAGE_ROWS):
            yield [audit.Row(seq=row.seq, hash=row.hash, entry=row.entry) for row in page]

    async def _pages(self, query: Executable, size: int) -> AsyncIterator[Sequence[Any]]:
        with _translated(self._path):
            async with self._engine.connect() as reader, reader.stream(query) as result:
                async for page in result.partitions(size):
                    yield page


def _whole_transactions(rows: Sequence[EventRow]) -> list[EventRow]:
    """All but the last transaction, of which more may follow."""
    last = rows[-1].revision
    return [row for row in rows if row.revision != last]


async def _mark(connection: AsyncConnection) -> Mark:
    row = (await connection.execute(select(schema.META))).one_or_none()
    if row is None:
        raise IntegrityError("the database does not say which revision it is at")
    return Mark(
        revision=row.revision, compacted=row.compacted, audit_seq=row.audit_seq, audit_hash=row.audit_hash
    )


def _preparing(busy_timeout_seconds: float) -> Any:
    def prepare(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {round(busy_timeout_seconds * 1000)}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")  # in WAL mode: the log is synced at every commit
        cursor.execute(f"PRAGMA journal_size_limit = {JOURNAL_LIMIT_BYTES}")
        cursor.execute("PRAGMA trusted_schema = OFF")
        cursor.close()

    return prepare


async def _bring_up_to_date(connection: AsyncConnection, path: Path) -> None:
    """Create the tables, or migrate them; Alembic is only loaded if there is something to migrate."""
    tables = (await connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'")).all()
    if not tables:
        await _create(connection)
        return
    names = {row.name for row in tables}
    if "alembic_version" not in names:
        raise IntegrityError(f"{path} is a database of something else")
    found = (await connection.exec_driver_sql("SELECT version_num FROM alembic_version")).scalar_one_or_none()
    if found != schema.SCHEMA_REVISION:
        from fleetplane.kernel.store.migrations.runner import upgrade

        await connection.run_sync(upgrade, found)


async def _create(connection: AsyncConnection) -> None:
    await connection.exec_driver_sql("BEGIN IMMEDIATE")
    await connection.run_sync(schema.METADATA.create_all, checkfirst=False)
    await connection.exec_driver_sql(
        "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"
    )
    await connection.exec_driver_sql("INSERT INTO alembic_version VALUES (?)", (schema.SCHEMA_REVISION,))
    await connection.exec_driver_sql("INSERT INTO meta VALUES (1, 0, 0, 0, ?)", (audit.GENESIS,))
    await connection.exec_driver_sql("COMMIT")


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Say what a database error means to those who do not know the database."""
    try:
        yield
    except (exc.DBAPIError, exc.TimeoutError, sqlite3.Error, OSError) as error:
        raise _meaning(error, path) from error


def _meaning(error: Exception, path: Path) -> FleetplaneError:
    original = error.orig if isinstance(error, exc.DBAPIError) else error
    name = getattr(original, "sqlite_errorname", "")
    if name == "SQLITE_FULL" or (name.startswith("SQLITE_IOERR") and _is_full(path)):
        return StorageFull(f"no space left for {path}")
    if name in {"SQLITE_CORRUPT", "SQLITE_NOTADB"}:
        return IntegrityError(f"{path} is damaged: {original}")
    return Unavailable(f"{path} cannot be used: {original}")


def _is_full(path: Path) -> bool:
    """Whether an I/O error was for want of space, which SQLite only says of a plain full disk."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY:
        log = path.with_name(path.name + "-wal")
        sizes = [file.stat().st_size for file in (path, log) if file.exists()]
        if any(size + PROBE_BYTES > limit for size in sizes):
            return True
    probe = path.with_name(path.name + ".probe")
    try:
        probe.write_bytes(bytes(PROBE_BYTES))
    except OSError as error:
        return error.errno in FULL
    finally:
        probe.unlink(missing_ok=True)
    return False
