"""The schema of a PostgreSQL store: its migration, the tables of servers, and the functions that write.

A function takes a lock inside the database, reads where the log ends, and writes or does not; the lock never
waits for a client. The functions are volatile PL/pgSQL, in which each statement sees what was committed
before the statement began: lock and read in one statement would return a new head without its changes.

The migrations are those of every engine (`migrations/`), run by Alembic in one transaction under the lock
that orders all writes. After them the functions are created again. The first schema on PostgreSQL is 0006; a
new database gets the newest at once. A migration from 0012 on says which programs can use its result
(`oldest_level`). It is applied while servers run that all can, and a server starts on a schema newer than
its own if it can use it (`usable`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog
from sqlalchemy import Connection, exc
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool
from sqlalchemy.schema import CreateIndex, CreateTable

from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.errors import IntegrityError, Unavailable
from fleetplane.kernel.store import lineage, schema
from fleetplane.kernel.store.engines.postgres_line import LOADER, connect
from fleetplane.kernel.store.servers import level
from fleetplane.kernel.store.servers.leader_lease import LIFE_SECONDS
from fleetplane.kernel.store.servers.level import Levels

# ruff: noqa: S608  # every part of a statement is a constant of this module


LOCK = 0x666C6565
"""With the schema, names the lock that orders all writes."""

_HEAD = """number bigint, revision bigint, compacted bigint, audit_seq bigint, audit_hash bytea,
 term bigint, server text, boot bigint"""

_LOCK = f"PERFORM pg_advisory_xact_lock({LOCK}, hashtext(current_schema()));"
_READ = "SELECT g.* INTO STRICT head FROM groups g ORDER BY g.number DESC LIMIT 1;"
_NOW = "(extract(epoch FROM clock_timestamp()) * 1000000000)::bigint"


# Who has the seat writes under its term. Any other server writes as long as it is heard of, and no later
# process of the same name has begun.
_ALIVE = f"""
 alive := CASE WHEN n_term = 0 AND n_server <> '' THEN EXISTS (SELECT 1 FROM servers s WHERE s.id = n_server
  AND s.boot = n_boot AND s.renewed_at > clock_timestamp() - make_interval(secs => {LIFE_SECONDS}))
  ELSE n_term = (SELECT coalesce(max(s.term), 0) FROM seats s) END;
"""


def _answer(written: str) -> str:
    """The head, read anew."""
    return (
        f"RETURN QUERY SELECT {written}, alive, g.number, g.revision, g.compacted, g.audit_seq, g.audit_hash,"
        f" g.term, g.server, g.boot, {_NOW} FROM groups g ORDER BY g.number DESC LIMIT 1; RETURN;"
    )


_RETURNS = (
    f"RETURNS TABLE (written boolean, is_alive boolean, {_HEAD}, now_ns bigint) LANGUAGE plpgsql VOLATILE"
)
_DECLARE = "DECLARE head groups%ROWTYPE; alive boolean := true;"

COMMIT_GROUP = f"""
CREATE FUNCTION commit_group(
 expected bigint, n_term bigint, n_server text, n_boot bigint, n_id bytea,
 n_revision bigint, n_compacted bigint, n_seq bigint, n_hash bytea,
 put_kind text[], put_scope text[], put_name text[], put_revision bigint[], put_body bytea[],
 del_kind text[], del_scope text[], del_name text[],
 log_revision bigint[], log_ordinal integer[], log_type text[], log_kind text[], log_scope text[],
 log_body bytea[],
 kind_name text[], kind_revision bigint[],
 rel_kind text[], rel_scope text[], rel_field text[], rel_value text[],
 claim_kind text[], claim_scope text[], claim_field text[], claim_value text[], claim_owner text[],
 secret_name text[], secret_blob bytea[], secret_version bigint[], secret_gone text[],
 entry_seq bigint[], entry_hash bytea[], entry_text bytea[], cut_seq bigint, cut_checkpoint text
) {_RETURNS} AS $$
#variable_conflict use_column
{_DECLARE}
BEGIN
 {_LOCK}
 {_READ}
 {_ALIVE}
 IF head.number <> expected OR NOT alive THEN
  {_answer("false")}
 END IF;
 INSERT INTO groups VALUES (expected + 1, n_revision, n_compacted, n_seq, n_hash, n_term, n_server, n_boot,
  n_id, {_NOW});
 INSERT INTO resources SELECT * FROM unnest(put_kind, put_scope, put_name, put_revision, put_body)
  ON CONFLICT (kind, scope, name) DO UPDATE SET revision = excluded.revision, body = excluded.body;
 IF cardinality(del_kind) > 0 THEN
  DELETE FROM resources r USING unnest(del_kind, del_scope, del_name) AS d(kind, scope, name)
   WHERE r.kind = d.kind AND r.scope = d.scope AND r.name = d.name;
 END IF;
 INSERT INTO log SELECT expected + 1, l.position - 1, l.revision, l.ordinal, l.type, l.kind, l.scope, l.body
  FROM unnest(log_revision, log_ordinal, log_type, log_kind, log_scope, log_body) WITH ORDINALITY
  AS l(revision, ordinal, type, kind, scope, body, position);
 INSERT INTO kinds SELECT * FROM unnest(kind_name, kind_revision)
  ON CONFLICT (kind) DO UPDATE SET revision = excluded.revision;
 IF cardinality(rel_kind) > 0 THEN
  DELETE FROM claims c USING unnest(rel_kind, rel_scope, rel_field, rel_value) AS d(kind, scope, field, value)
   WHERE c.kind = d.kind AND c.scope = d.scope AND c.field = d.field AND c.value = d.value;
 END IF;
 INSERT INTO claims SELECT * FROM unnest(claim_kind, claim_scope, claim_field, claim_value, claim_owner);
 IF cardinality(secret_name) > 0 THEN
  INSERT INTO secrets SELECT * FROM unnest(secret_name, secret_blob, secret_version)
   ON CONFLICT (name) DO UPDATE SET blob = excluded.blob, version = excluded.version;
 END IF;
 DELETE FROM secrets s WHERE s.name = ANY(secret_gone);
 INSERT INTO audit SELECT * FROM unnest(entry_seq, entry_hash, entry_text);
 IF cut_seq IS NOT NULL THEN
  DELETE FROM audit a WHERE a.seq <= cut_seq;
  UPDATE meta SET audit_cut = cut_checkpoint;
 END IF;
 {_answer("true")}
END $$
"""

SETTLE_GROUP = f"""
CREATE FUNCTION settle_group(expected bigint, n_id bytea, n_term bigint, n_server text, n_boot bigint)
{_RETURNS} AS $$
#variable_conflict use_column
{_DECLARE}
BEGIN
 {_LOCK}
 {_READ}
 {_ALIVE}
 IF head.number = expected AND alive THEN
  INSERT INTO groups VALUES (expected + 1, head.revision, head.compacted, head.audit_seq, head.audit_hash,
   n_term, n_server, n_boot, ''::bytea, {_NOW});
 END IF;
 {_answer("EXISTS (SELECT 1 FROM groups f WHERE f.number = expected + 1 AND f.group_id = n_id)")}
END $$
"""

# A later boot of the server that has the seat replaces it at once: there is one process of each name. Others
# wait as if the earlier one were alive, which may not have heard yet that it has ended.
TAKE_OVER = f"""
CREATE FUNCTION take_over(expected bigint, n_server text, n_boot bigint, life_seconds double precision)
{_RETURNS} AS $$
#variable_conflict use_column
DECLARE head groups%ROWTYPE; alive boolean := true; seat seats%ROWTYPE;
BEGIN
 {_LOCK}
 {_READ}
 SELECT t.* INTO seat FROM seats t ORDER BY t.term DESC LIMIT 1;
 IF head.number <> expected
  OR NOT EXISTS (SELECT 1 FROM servers s WHERE s.id = n_server AND s.boot = n_boot)
  OR EXISTS (SELECT 1 FROM servers s WHERE s.id = seat.server AND (s.boot = seat.boot OR s.id <> n_server)
   AND s.renewed_at > clock_timestamp() - make_interval(secs => life_seconds)) THEN
  {_answer("false")}
 END IF;
 INSERT INTO seats VALUES (coalesce(seat.term, 0) + 1, n_server, n_boot);
 INSERT INTO groups VALUES (expected + 1, head.revision, head.compacted, head.audit_seq, head.audit_hash,
  coalesce(seat.term, 0) + 1, n_server, n_boot, ''::bytea, {_NOW});
 UPDATE servers s SET renewed_at = clock_timestamp() WHERE s.id = n_server;
 {_answer("true")}
END $$
"""

FUNCTIONS = {"commit_group": COMMIT_GROUP, "settle_group": SETTLE_GROUP, "take_over": TAKE_OVER}
"""Made anew with every change of the schema: they are of the newest version, and no data."""

SERVERS = """
CREATE TABLE servers (
 id text PRIMARY KEY, boot bigint NOT NULL, renewed_at timestamptz NOT NULL,
 version text NOT NULL DEFAULT '', number bigint NOT NULL DEFAULT 0,
 agents bigint NOT NULL DEFAULT 0, controllers bigint NOT NULL DEFAULT 0,
 bus text NOT NULL DEFAULT 'none', bus_connected boolean NOT NULL DEFAULT false,
 lowest_level integer NOT NULL DEFAULT 1, highest_level integer NOT NULL DEFAULT 1
) WITH (fillfactor = 50)
"""

SEATS = "CREATE TABLE seats (term bigint PRIMARY KEY, server text NOT NULL, boot bigint NOT NULL)"
"""One row for each taking over: who has the highest term has the seat."""

USABLE = ("CREATE TABLE usable (oldest_level integer NOT NULL)", "INSERT INTO usable VALUES (1)")
"""One row: programs whose highest level is this or above can use the tables, whichever schema they know."""

HEARD = """
CREATE TABLE heard (channel text NOT NULL, agent text NOT NULL, at timestamptz NOT NULL,
 PRIMARY KEY (channel, agent)) WITH (fillfactor = 50)
"""
"""When each agent was heard by any server; written often, beside the log and without its lock."""

TUNING = (
    "ALTER TABLE resources SET (fillfactor = 80)",
    # Appended and trimmed: by threshold, not by share of a table that is mostly the same.
    *(
        f"ALTER TABLE {table} SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000)"
        for table in ("log", "groups")
    ),
)


def statements() -> list[str]:
    """Everything that an empty schema needs, in order."""
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    made: list[str] = []
    for table in schema.METADATA.sorted_tables:
        made.append(str(CreateTable(table).compile(dialect=dialect)))
        made += [str(CreateIndex(index).compile(dialect=dialect)) for index in table.indexes]
    made.append("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
    return [*made, SERVERS, SEATS, *USABLE, HEARD, *TUNING, *FUNCTIONS.values()]


# ruff: noqa: S608  # every part of a statement is a constant of this module


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
