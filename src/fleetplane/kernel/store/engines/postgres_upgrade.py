"""Bringing a PostgreSQL database to the schema of this version: made once, or migrated.

The migrations are the ones of every engine (`migrations/`), run by Alembic in one transaction under the lock
that orders all writes. After them the functions are made anew. The first schema that PostgreSQL ever had is
0006; a new database gets the newest at once.
"""

# ruff: noqa: S608  # every part of a statement is a constant of this module
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, exc
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.errors import IntegrityError, Unavailable
from fleetplane.kernel.store import lineage, schema
from fleetplane.kernel.store.engines.postgres_line import LOADER, connect
from fleetplane.kernel.store.engines.postgres_schema import FUNCTIONS, LOCK, statements
from fleetplane.kernel.store.servers.seat import LIFE_SECONDS

TAKE_LOCK = f"SELECT pg_advisory_xact_lock({LOCK}, hashtext(current_schema()))"
ALIVE = (
    "SELECT id FROM servers WHERE renewed_at >"
    f" clock_timestamp() - make_interval(secs => {LIFE_SECONDS}) ORDER BY id"
)
"""The servers that the database has heard of so recently that they may be running."""


async def bring_up_to_date(url: str, first_revision: int) -> None:
    """Create the tables or migrate them, once, however many servers begin at the same time."""
    connection = await connect(url, LOADER)
    try:
        async with connection.transaction():
            await connection.execute(TAKE_LOCK)
            if await connection.fetchval("SELECT to_regclass('alembic_version')") is None:
                await _create(connection, first_revision)
                return
            found = await connection.fetchval("SELECT version_num FROM alembic_version")
    finally:
        await connection.close()
    if found != schema.SCHEMA_REVISION:
        await _migrate(url)


def check_alone(alive: Sequence[str], purpose: str) -> None:
    """Refuse what must not be done under a running server."""
    if alive:
        raise Unavailable(
            f"{purpose} while no server uses the database, and {', '.join(alive)} does",
            hint=f"stop all servers; one that was killed counts as running for {LIFE_SECONDS:.0f} seconds",
        )


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


async def _migrate(url: str) -> None:
    """Alembic works on a connection of SQLAlchemy's, around one that is made as all others are."""
    engine = create_async_engine(
        "postgresql+asyncpg://", async_creator=lambda: connect(url, LOADER), poolclass=NullPool
    )
    try:
        async with engine.begin() as connection:
            await connection.run_sync(_upgrade)
    except exc.DBAPIError as error:
        raise Unavailable(f"the database cannot be migrated: {error.orig}") from error
    finally:
        await engine.dispose()


def _upgrade(connection: Connection) -> None:
    from fleetplane.kernel.store.migrations.runner import check_known, steps

    connection.exec_driver_sql(TAKE_LOCK)
    found = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one_or_none()
    if found == schema.SCHEMA_REVISION:  # another server was faster
        return
    check_known(found)
    check_alone(
        [row.id for row in connection.exec_driver_sql(ALIVE)],
        f"the schema can be changed from {found} to {schema.SCHEMA_REVISION} only",
    )
    steps(connection)
    for name, definition in FUNCTIONS.items():
        connection.exec_driver_sql(f"DROP FUNCTION IF EXISTS {name}")
        connection.exec_driver_sql(definition)
