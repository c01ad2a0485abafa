"""A PostgreSQL database as a database file, and back: for backups, for moving in, for a new lineage.

Both have the same tables (`schema.py`), so a copy of either can be checked, kept and put in place by the
same code. What is read is of one moment; what is written is one transaction, under the lock that orders all
writes.
"""

# ruff: noqa: S608  # names of tables and columns are those of the schema
from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetplane.kernel.errors import AlreadyExists, IntegrityError, NotFound, Unavailable
from fleetplane.kernel.store import schema
from fleetplane.kernel.store.engines.postgres_line import LOADER, connect, translated
from fleetplane.kernel.store.engines.postgres_schema import ALIVE, TAKE_LOCK, bring_up_to_date, check_alone
from fleetplane.kernel.store.engines.sqlite import SqliteEngine
from fleetplane.kernel.store.lineage import StoreStanding
from fleetplane.kernel.store.settings import StoreSettings, place

PAGE_ROWS = 1000
_HEAD = "SELECT * FROM groups ORDER BY number DESC LIMIT 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseContents:
    """What a database holds before something is put into it."""

    stand: StoreStanding
    used_table: str
    """One that shows that the database was used; empty if it was not."""
    servers: Sequence[str]
    """Those that may be running."""


async def look(url: str) -> DatabaseContents:
    """Make the tables if there are none, and see what is there."""
    with translated():
        await bring_up_to_date(url, 0)
        connection = await connect(url, LOADER)
        try:
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                return await _look(connection)
        finally:
            await connection.close()


async def export(url: str, target: Path) -> None:
    """Write everything, as of one moment, to a new database file.

    Without history: whoever goes on from a copy begins a new lineage, which has none.
    """
    with translated():
        connection = await connect(url, LOADER)
        try:
            await _check_schema(connection, url)
            engine = await SqliteEngine.open(StoreSettings(path=target))  # which makes the tables
            await engine.close()
            with closing(sqlite3.connect(target, isolation_level=None)) as copy:
                copy.execute("BEGIN")
                async with connection.transaction(isolation="repeatable_read", readonly=True):
                    for table in schema.METADATA.sorted_tables:
                        copy.execute(f"DELETE FROM {table.name}")
                        if table is not schema.LOG:
                            columns = list(table.columns.keys())
                            query = _HEAD if table is schema.GROUPS else f"SELECT * FROM {table.name}"
                            await _take(connection, query, copy, table.name, columns)
                copy.execute("UPDATE groups SET compacted = revision")
                copy.execute("COMMIT")
        finally:
            await connection.close()


async def _check_schema(connection: Any, url: str) -> None:
    if await connection.fetchval("SELECT to_regclass('alembic_version')") is None:
        raise NotFound(
            f"there is no store in {place(url)}", hint="start a server with it, or restore a backup"
        )
    found = await connection.fetchval("SELECT version_num FROM alembic_version")
    if found != schema.SCHEMA_REVISION:
        raise IntegrityError(
            f"{place(url)} has schema {found}, and this version reads {schema.SCHEMA_REVISION}",
            hint="use the version that its servers have, or start a server of this one, which migrates it",
        )


async def _take(
    connection: Any, query: str, copy: sqlite3.Connection, table: str, columns: list[str]
) -> None:
    insert = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
    cursor = await connection.cursor(query)
    while page := await cursor.fetch(PAGE_ROWS):
        copy.executemany(insert, [tuple(row[name] for name in columns) for row in page])


async def put(
    source: sqlite3.Connection,
    url: str,
    *,
    replace: bool = False,
    expected: StoreStanding | None = None,
    then: Callable[[], None] = lambda: None,
) -> int:
    """Put what a file holds in the place of what is there; returns how many rows.

    Without `replace` the database must be empty, or hold the same lineage already. What is replaced must
    stand where it was `expected`. `then` runs before the commit; if anything raises, the database stays as
    it was.
    """
    (lineage,) = source.execute("SELECT lineage FROM meta").fetchone()
    with translated():
        await bring_up_to_date(url, 0)
        target = await connect(url, LOADER)
        try:
            async with target.transaction():
                await target.execute(TAKE_LOCK)
                await target.execute("LOCK TABLE servers IN EXCLUSIVE MODE")  # nobody begins meanwhile
                found = await _look(target)
                check_alone(found.servers, "a database can be put in place only")
                if expected is not None and found.stand != expected:
                    raise Unavailable(f"{place(url)} was written to meanwhile", hint="try again")
                if found.stand.lineage != lineage:
                    if not replace:
                        check_empty(found, url)
                    await _replace(source, target)
                # Otherwise an earlier attempt got as far as this; compared all the same.
                rows = await _compare(source, target)
                then()
                return rows
        finally:
            await target.close()


def check_empty(found: DatabaseContents, url: str, otherwise: str = "") -> None:
    """Refuse a database that was used."""
    if found.used_table:
        raise AlreadyExists(
            f"{place(url)} is in use: its table {found.used_table} is not empty",
            hint=f"give an empty database, which no server has used{otherwise}",
        )


async def _look(connection: Any) -> DatabaseContents:
    used = ""
    for table in ("resources", "claims", "secrets", "audit", "servers"):
        if await connection.fetchval(f"SELECT EXISTS (SELECT 1 FROM {table})"):
            used = table
            break
    row = await connection.fetchrow(
        f"SELECT lineage, revision, audit_seq, audit_hash, audit_cut FROM meta, ({_HEAD}) AS head"
    )
    if row is None:
        raise IntegrityError("the database has no revision")
    alive = [server["id"] for server in await connection.fetch(ALIVE)]
    return DatabaseContents(stand=StoreStanding(*row), used_table=used, servers=alive)


async def _replace(source: sqlite3.Connection, target: Any) -> None:
    """The rows of the file instead of those that are there; whoever still runs on those is refused.

    Numbers of groups, terms and boots go on above the ones that were given out.
    """
    before = await target.fetchrow(
        "SELECT max(number) AS number, (SELECT coalesce(max(term), 0) FROM seats) AS term FROM groups"
    )
    for table in reversed(schema.METADATA.sorted_tables):
        await target.execute(f"DELETE FROM {table.name}")
    for table in schema.METADATA.sorted_tables:
        columns = table.columns.keys()
        cursor = source.execute(f"SELECT {', '.join(columns)} FROM {table.name}")
        while rows := cursor.fetchmany(PAGE_ROWS):
            await target.copy_records_to_table(table.name, records=rows, columns=columns)
    await target.execute("UPDATE servers SET boot = boot + 1, renewed_at = 'epoch'")
    if before["term"]:  # what was there was used: the file holds the beginning of a lineage, one group
        await target.execute(
            "UPDATE groups SET number = greatest(number, $1::bigint + 1), term = $2::bigint + 1",
            before["number"],
            before["term"],
        )
        await target.execute("INSERT INTO seats VALUES ($1::bigint + 1, '', 0)", before["term"])


async def _compare(source: sqlite3.Connection, target: Any) -> int:
    """Every table has as many rows as in the file, and the log ends at the same place; returns how many."""
    total = 0
    for table in schema.METADATA.sorted_tables:
        (expected,) = source.execute(f"SELECT count(*) FROM {table.name}").fetchone()
        found = await target.fetchval(f"SELECT count(*) FROM {table.name}")
        if found != expected:
            raise IntegrityError(f"{found} of {expected} rows of the table {table.name} arrived")
        total += found
    last = "SELECT revision, audit_seq, audit_hash FROM groups ORDER BY number DESC LIMIT 1"
    if tuple(await target.fetchrow(last)) != source.execute(last).fetchone():
        raise IntegrityError("the log does not end with the same group in both databases")
    return total
