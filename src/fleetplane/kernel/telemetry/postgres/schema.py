"""The tables of telemetry, and those of single days.

Points and lines lie in a table for each day (UTC), so that what is too old goes at once and leaves nothing to
clean up. A table is made apart and then attached, which stops nobody; several servers may do so at the same
time. Which day a row belongs to follows from its moment alone.
"""

# ruff: noqa: S608  # names of tables are constants of this module, and numbers
from __future__ import annotations

import datetime as dt
import re
from collections.abc import Collection
from typing import Any, Final

from fleetplane.kernel.errors import IntegrityError
from fleetplane.kernel.telemetry.postgres.link import transaction
from fleetplane.kernel.values.times import NS

VERSION: Final = 1
DAY_NS: Final = 86_400 * NS
POINTS: Final = "telemetry_points"
LINES: Final = "telemetry_lines"
DAYS_AHEAD: Final = 2
"""Made before they are needed: today's, and as many more."""
MAKE_LOCK: Final = "SELECT pg_advisory_xact_lock(1952803941, hashtext(current_schema()))"

_TABLES: Final = f"""
CREATE TABLE telemetry_meta (
 id integer PRIMARY KEY CHECK (id = 1), version integer NOT NULL, generation bigint NOT NULL
);
INSERT INTO telemetry_meta VALUES (1, {VERSION}, 0);
CREATE SEQUENCE telemetry_batches;
CREATE TABLE telemetry_series (
 id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, scope text COLLATE "C" NOT NULL,
 name text COLLATE "C" NOT NULL, source text COLLATE "C" NOT NULL, day integer NOT NULL,
 UNIQUE (scope, name, source)
) WITH (fillfactor = 80);
CREATE INDEX telemetry_series_by_source ON telemetry_series (scope, source);
CREATE TABLE {POINTS} (
 series bigint NOT NULL, at_ns bigint NOT NULL, value double precision NOT NULL,
 base double precision NOT NULL, PRIMARY KEY (series, at_ns)
) PARTITION BY RANGE (at_ns);
CREATE TABLE telemetry_channels (
 id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, scope text COLLATE "C" NOT NULL,
 stream text COLLATE "C" NOT NULL, UNIQUE (scope, stream)
);
CREATE TABLE {LINES} (
 channel bigint NOT NULL, at_ns bigint NOT NULL, mark bigint NOT NULL, code bigint NOT NULL,
 source text COLLATE "C" NOT NULL, subject text COLLATE "C" NOT NULL, action text COLLATE "C" NOT NULL,
 body bytea NOT NULL, PRIMARY KEY (channel, at_ns, mark)
) PARTITION BY RANGE (at_ns);
CREATE TABLE telemetry_shares (
 day integer NOT NULL, channel bigint NOT NULL, scope text COLLATE "C" NOT NULL,
 source text COLLATE "C" NOT NULL, rows bigint NOT NULL, bytes bigint NOT NULL,
 PRIMARY KEY (day, channel, scope, source)
) WITH (fillfactor = 60);
CREATE TABLE telemetry_summaries (
 channel bigint NOT NULL, width integer NOT NULL, at bigint NOT NULL, source text COLLATE "C" NOT NULL,
 subject text COLLATE "C" NOT NULL, body bytea NOT NULL, PRIMARY KEY (channel, width, at, source, subject)
) WITH (fillfactor = 70);
CREATE TABLE telemetry_folded (
 channel bigint NOT NULL, width integer NOT NULL, until bigint NOT NULL, oldest bigint NOT NULL,
 PRIMARY KEY (channel, width)
) WITH (fillfactor = 60);
"""
"""Shares are how much each source has of each day, so that room is made where most was taken; those of
channel 0 are of points."""
_NAMED: Final = re.compile(r"_([0-9]{8})$")


async def prepare(connection: Any) -> None:
    """Make the tables, once, however many servers begin at the same time."""
    async with transaction(connection):
        await connection.execute("SET LOCAL lock_timeout = '20s'")
        await connection.execute(MAKE_LOCK)
        if await connection.fetchval("SELECT to_regclass('telemetry_meta')") is None:
            await connection.execute(_TABLES)
            return
        found = await connection.fetchval("SELECT version FROM telemetry_meta")
    if found != VERSION:
        raise IntegrityError(f"the database has telemetry of version {found}; this server knows {VERSION}")


def day_of(at_ns: int) -> int:
    return at_ns // DAY_NS


def table_of(table: str, day: int) -> str:
    return f"{table}_{dt.date(1970, 1, 1) + dt.timedelta(days=day):%Y%m%d}"


async def days(connection: Any, table: str) -> set[int]:
    """Those that have a table."""
    rows = await connection.fetch(
        "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
        " WHERE i.inhparent = to_regclass($1)",
        table,
    )
    named = (_NAMED.search(row["relname"]) for row in rows)
    return {
        (dt.datetime.strptime(found[1], "%Y%m%d").date() - dt.date(1970, 1, 1)).days  # noqa: DTZ007
        for found in named
        if found is not None
    }


async def make_days(connection: Any, table: str, wanted: Collection[int]) -> set[int]:
    """Make tables of days that have none; those there are then."""
    async with transaction(connection):
        await connection.execute(MAKE_LOCK)
        there = await days(connection, table)
        for day in sorted(set(wanted) - there):
            name = table_of(table, day)
            await connection.execute(f"CREATE TABLE {name} (LIKE {table} INCLUDING ALL)")
            await connection.execute(
                f"ALTER TABLE {table} ATTACH PARTITION {name}"
                f" FOR VALUES FROM ({day * DAY_NS}) TO ({(day + 1) * DAY_NS})"
            )
            there.add(day)
    return there


async def drop_day(connection: Any, table: str, day: int) -> None:
    """Delete all rows of a day: the same moment for a million as for one."""
    async with transaction(connection):
        await connection.execute(MAKE_LOCK)
        await connection.execute(f"DROP TABLE IF EXISTS {table_of(table, day)}")
