"""Bringing a PostgreSQL database to the schema of this version: made once, or migrated.

The migrations are the ones of every engine (`migrations/`), run by Alembic in one transaction under the lock
that orders all writes. After them the functions are made anew. The first schema that PostgreSQL ever had is
0006; a new database gets the newest at once.

A migration from 0012 on says which programs can use what it leaves behind (`oldest_level`). It is applied
while servers run that all can, and a server starts on a schema that is newer than its own if it can
(`usable`).
"""

# ruff: noqa: S608  # every part of a statement is a constant of this module
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog
from sqlalchemy import Connection, exc
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.errors import IntegrityError, Unavailable
from fleetplane.kernel.store import lineage, schema
from fleetplane.kernel.store.engines.postgres_line import LOADER, connect
from fleetplane.kernel.store.engines.postgres_schema import FUNCTIONS, LOCK, statements
from fleetplane.kernel.store.servers import level
from fleetplane.kernel.store.servers.level import Levels
from fleetplane.kernel.store.servers.seat import LIFE_SECONDS

log = structlog.get_logger(__name__)

TAKE_LOCK = f"SELECT pg_advisory_xact_lock({LOCK}, hashtext(current_schema()))"
_LIVING = f"renewed_at > clock_timestamp() - make_interval(secs => {LIFE_SECONDS}) ORDER BY id"
ALIVE = f"SELECT id FROM servers WHERE {_LIVING}"
"""The servers that the database has heard of so recently that they may be running."""
_TABLE_WAIT = "SET LOCAL lock_timeout = '2s'"
"""For a table that somebody reads, such as a backup: whoever waits for it makes all others wait, too. Shorter
than a server goes on without renewing its seat."""
_OVERLOADS = (
    "SELECT oid::regprocedure::text FROM pg_proc WHERE pronamespace = current_schema()::regnamespace"
    f" AND proname IN ({', '.join(repr(name) for name in FUNCTIONS)})"
)


async def bring_up_to_date(url: str, first_revision: int, levels: Levels | None = None) -> None:
    """Create the tables or migrate them, once, however many servers begin at the same time.

    With the levels of a server's program, other servers may run on meanwhile, and a newer schema is used if
    that program can. Without, for whoever copies whole tables, the schema is this version's afterwards.
    """
    connection = await connect(url, LOADER)
    try:
        async with connection.transaction():
            await connection.execute(TAKE_LOCK)
            if await connection.fetchval("SELECT to_regclass('alembic_version')") is None:
                await _create(connection, first_revision)
                return
            found = await connection.fetchval("SELECT version_num FROM alembic_version")
            if levels is not None and await connection.fetchval("SELECT max(number) > 0 FROM groups"):
                level.check(await stored_level(connection), levels)  # before anything is changed
        if found == schema.SCHEMA_REVISION:
            return
        if levels is not None and not _is_known(found):
            await _check_usable(connection, found, levels)
            return
    finally:
        await connection.close()
    await _migrate(url, beside_others=levels is not None)


def check_alone(alive: Sequence[str], purpose: str) -> None:
    """Refuse what must not be done under a running server."""
    if alive:
        raise Unavailable(
            f"{purpose} while no server uses the database, and {', '.join(alive)} does",
            hint=f"stop all servers; one that was killed counts as running for {LIFE_SECONDS:.0f} seconds",
        )


async def stored_level(connection: Any) -> int:
    """What may be written, as the database says."""
    body = await connection.fetchval(
        "SELECT body FROM resources WHERE kind = $1 AND scope = $2 AND name = $3", *level.KEY
    )
    return level.of(None if body is None else level.LEVEL.decode(body))


def _is_known(found: str) -> bool:
    from fleetplane.kernel.store.migrations import runner

    return runner.is_known(found)


async def _check_usable(connection: Any, found: str, levels: Levels) -> None:
    oldest = await connection.fetchval("SELECT oldest_level FROM usable")
    if levels.highest < oldest:
        raise IntegrityError(
            f"the database has schema {found}, which programs of level {oldest} and above can use;"
            f" this one knows schema {schema.SCHEMA_REVISION} and supports level {levels}",
            hint="start the release that the other servers run",
        )
    log.info("store.newer_schema", schema=found, known=schema.SCHEMA_REVISION)


async def _create(connection: Any, first_revision: int) -> None:
    if await connection.fetchval("SELECT to_regclass('resources')") is not None:
        raise IntegrityError("the database has a schema of something else")
    for statement in statements():
        await connection.execute(statement)
    await connection.execute("INSERT INTO alembic_version VALUES ($1)", schema.SCHEMA_REVISION)
    await connection.execute(
        "INSERT INTO meta (id, lineage, first_revision) VALUES (1, $1, $2)", lineage.new_id(), first_revision
    )
    await connection.execute(
        "INSERT INTO groups VALUES (0, $1, $1, 0, $2, 0, '', 0, ''::bytea, 0)", first_revision, audit.GENESIS
    )


async def _migrate(url: str, *, beside_others: bool) -> None:
    """Alembic works on a connection of SQLAlchemy's, around one that is made as all others are."""
    engine = create_async_engine(
        "postgresql+asyncpg://", async_creator=lambda: connect(url, LOADER), poolclass=NullPool
    )
    try:
        async with engine.begin() as connection:
            await connection.run_sync(_upgrade, beside_others)
    except exc.DBAPIError as error:
        raise Unavailable(
            f"the database cannot be migrated: {error.orig}",
            hint="try again when nobody reads whole tables, such as a backup",
        ) from error
    finally:
        await engine.dispose()


def _upgrade(connection: Connection, beside_others: bool) -> None:
    from fleetplane.kernel.store.migrations import runner

    connection.exec_driver_sql(TAKE_LOCK)
    found = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one_or_none()
    if found == schema.SCHEMA_REVISION:  # another server was faster
        return
    runner.check_known(found)
    needs = runner.oldest_levels(found)
    oldest = None if None in needs else max(one for one in needs if one is not None)
    living = ALIVE
    if beside_others and oldest is not None:  # else the columns may not be there yet
        living = f"SELECT id FROM servers WHERE highest_level < {oldest} AND {_LIVING}"
    unable = [row.id for row in connection.exec_driver_sql(living)]
    if unable and living is not ALIVE:
        raise Unavailable(
            f"the schema can be changed from {found} to {schema.SCHEMA_REVISION} only while every server"
            f" supports level {oldest}, and {', '.join(unable)} does not",
            hint="upgrade those servers first to the release before this one",
        )
    check_alone(unable, f"the schema can be changed from {found} to {schema.SCHEMA_REVISION} only")
    connection.exec_driver_sql(_TABLE_WAIT)
    runner.steps(connection)
    if oldest is None:
        for (signature,) in connection.exec_driver_sql(_OVERLOADS).all():
            connection.exec_driver_sql(f"DROP FUNCTION {signature}")
    for definition in FUNCTIONS.values():
        # Older servers call on what has the same arguments, and what has others stays beside it.
        connection.exec_driver_sql(definition.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1))
    given = max((one for one in needs if one is not None), default=level.FIRST)
    connection.exec_driver_sql(f"UPDATE usable SET oldest_level = greatest(oldest_level, {given})")
    log.info("store.migrated", before=found, schema=schema.SCHEMA_REVISION, usable_from_level=given)
