"""Telemetry of a file into PostgreSQL, and back: for moving in, for backups.

Rows go in batches, each a transaction or a statement of its own: nothing holds a snapshot for as long as all
of it takes. What is there already stays, so that a copy that was interrupted is simply made again. Summaries
go in one transaction with how far they are folded: apart, some would be folded twice.
"""

# ruff: noqa: S608  # names of tables and columns are constants
from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, Final

import asyncpg

from fleetplane.kernel.store.engines.postgres_line import LOADER, connect
from fleetplane.kernel.telemetry.postgres import link, schema
from fleetplane.kernel.telemetry.postgres.link import (
    ANSWERS,
    SNAPSHOT,
    LineRow,
    PointRow,
    meaning,
    text,
    transaction,
)
from fleetplane.kernel.telemetry.postgres.schema import LINES, POINTS, day_of
from fleetplane.kernel.telemetry.postgres.writing import (
    MAKE_CHANNELS,
    POINT_COLUMNS,
    copy,
    insert_lines,
    insert_points,
)
from fleetplane.kernel.telemetry.sqlite import database
from fleetplane.kernel.telemetry.summaries import WIDTHS
from fleetplane.kernel.telemetry.values import NAMES_LIMIT

BATCH_ROWS: Final = 10_000
PAGE_ROWS: Final = 1_000
"""Of what has long bodies."""

_SERIES: Final = (
    "SELECT id, scope, name, source, (SELECT max(at_ns) FROM points WHERE series = series.id) AS last"
    " FROM series WHERE last >= ? AND length(scope) + length(name) + length(source) <= ? ORDER BY id"
)
_PUT_SERIES: Final = (
    "INSERT INTO telemetry_series (scope, name, source, day) VALUES ($1, $2, $3, $4)"
    " ON CONFLICT (scope, name, source) DO UPDATE SET day = greatest(telemetry_series.day, excluded.day)"
    " RETURNING id"
)
_FIND_CHANNEL: Final = "SELECT id FROM telemetry_channels WHERE scope = $1 AND stream = $2"
_PUT_SUMMARY: Final = "INSERT INTO telemetry_summaries VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT DO NOTHING"
_PUT_FOLDED: Final = (
    "UPDATE telemetry_folded SET until = greatest(until, $3), oldest = greatest(oldest, $4)"
    " WHERE channel = $1 AND width = $2"
)
_EMPTY: Final = (
    f"TRUNCATE {POINTS}, {LINES}, telemetry_series, telemetry_channels, telemetry_shares,"
    " telemetry_summaries, telemetry_folded; UPDATE telemetry_meta SET generation = generation + 1"
)
_COUNT_SHARES: Final = f"""
DELETE FROM telemetry_shares;
INSERT INTO telemetry_shares SELECT at_ns / {schema.DAY_NS}, 0, s.scope, s.source, count(*), 0
 FROM {POINTS} p JOIN telemetry_series s ON s.id = p.series GROUP BY 1, s.scope, s.source;
INSERT INTO telemetry_shares SELECT at_ns / {schema.DAY_NS}, channel, c.scope, l.source, count(*),
 sum(length(body) + length(subject) + length(action) + length(l.source))
 FROM {LINES} l JOIN telemetry_channels c ON c.id = l.channel GROUP BY 1, channel, c.scope, l.source;
"""


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Any]:
    try:
        connection = await connect(url, LOADER)
        try:
            yield connection
        finally:
            await connection.close()
    except ANSWERS as error:
        raise meaning(error) from error


async def move_in(path: Path, url: str, *, oldest_ns: int, replace: bool = False) -> int:
    """Copy what a file holds and is not older; how many points and lines.

    With `replace`, in the place of what is there.
    """
    await asyncio.to_thread(database.prepare, path)
    async with _connected(url) as target:
        await schema.prepare(target)
        if replace:
            async with transaction(target):
                await target.execute(_EMPTY)
        with closing(database.connect(path)) as source:
            channels = await _put_channels(source, target)
            rows = await _put_points(source, target, await _put_series(source, target, oldest_ns), oldest_ns)
            rows += await _put_lines(source, target, channels, oldest_ns)
            await _put_summaries(source, target, channels)
        async with transaction(target):
            await target.execute(_COUNT_SHARES)
        await target.execute("SELECT nextval('telemetry_batches')")
    return rows


async def _put_channels(source: sqlite3.Connection, target: Any) -> dict[int, int]:
    """The number of each channel there, by the one here."""
    found = {}
    for number, scope, stream in source.execute("SELECT id, scope, stream FROM channels").fetchall():
        if len(scope) + len(stream) <= NAMES_LIMIT:
            key = text(scope), text(stream)
            await target.execute(MAKE_CHANNELS, [key[0]], [key[1]], list(WIDTHS[:-1]))
            found[number] = await target.fetchval(_FIND_CHANNEL, *key)
    return found


async def _put_series(source: sqlite3.Connection, target: Any, oldest_ns: int) -> dict[int, int]:
    rows = source.execute(_SERIES, (oldest_ns, NAMES_LIMIT)).fetchall()
    found = {}
    async with transaction(target):
        for number, scope, name, sender, last in rows:
            found[number] = await target.fetchval(
                _PUT_SERIES, text(scope), text(name), text(sender), day_of(last)
            )
    return found


async def _put_points(source: sqlite3.Connection, target: Any, series: dict[int, int], oldest_ns: int) -> int:
    total, there = 0, set[int]()
    query = "SELECT series, at_ns, value, base FROM points WHERE at_ns >= ?"
    for page in _pages(source, query, (oldest_ns,), BATCH_ROWS):
        rows: list[PointRow] = sorted((series[row[0]], *row[1:]) for row in page if row[0] in series)
        if not rows:
            continue
        if not (days := {day_of(row[1]) for row in rows}) <= there:
            there = await schema.make_days(target, POINTS, days)
        try:
            async with transaction(target):
                await copy(target, POINTS, POINT_COLUMNS, link.points(rows))
        except asyncpg.UniqueViolationError:
            await insert_points(target, rows)
        total += len(rows)
    return total


async def _put_lines(
    source: sqlite3.Connection, target: Any, channels: dict[int, int], oldest_ns: int
) -> int:
    total, there = 0, set[int]()
    query = "SELECT channel, at_ns, mark, code, source, subject, action, body FROM lines WHERE at_ns >= ?"
    for page in _pages(source, query, (oldest_ns,), PAGE_ROWS):
        rows = sorted(
            LineRow(channels[channel], at_ns, mark, code, text(sender), text(subject), text(action), body)
            for channel, at_ns, mark, code, sender, subject, action, body in page
            if channel in channels
        )
        if not rows:
            continue
        if not (days := {day_of(row.at_ns) for row in rows}) <= there:
            there = await schema.make_days(target, LINES, days)
        try:
            async with transaction(target):
                await copy(target, LINES, LineRow._fields, link.lines(rows))
        except asyncpg.UniqueViolationError:
            await insert_lines(target, rows)
        total += len(rows)
    return total


async def _put_summaries(source: sqlite3.Connection, target: Any, channels: dict[int, int]) -> None:
    async with transaction(target):
        query = "SELECT channel, width, at, source, subject, body FROM summaries"
        for page in _pages(source, query, (), PAGE_ROWS):
            await target.executemany(
                _PUT_SUMMARY,
                [
                    (channels[row[0]], *row[1:3], text(row[3]), text(row[4]), row[5])
                    for row in page
                    if row[0] in channels
                ],
            )
        for channel, width, until, oldest in source.execute("SELECT * FROM folded").fetchall():
            if channel in channels:
                await target.execute(_PUT_FOLDED, channels[channel], width, until, oldest)


def _pages(
    source: sqlite3.Connection, query: str, given: tuple[int, ...], size: int
) -> Iterator[Sequence[Any]]:
    cursor = source.execute(query, given)
    while page := cursor.fetchmany(size):
        yield page


async def export(url: str, path: Path) -> bool:
    """Write everything to a new file; False if there is nothing to write."""
    async with _connected(url) as source:
        if await source.fetchval("SELECT to_regclass('telemetry_meta')") is None:
            return False
        await asyncio.to_thread(database.prepare, path)
        with closing(database.connect(path, for_writing=True)) as target, database.transaction(target):
            await _take_summaries(source, target)
            rows = await source.fetch("SELECT id, scope, name, source FROM telemetry_series")
            target.executemany("INSERT INTO series VALUES (?, ?, ?, ?)", [tuple(row) for row in rows])
            await _take_rows(
                source, target, POINTS, ("series", "at_ns"), ("value", "base"), "INSERT OR IGNORE INTO points"
            )
            await _take_rows(
                source,
                target,
                LINES,
                ("channel", "at_ns", "mark"),
                ("code", "source", "subject", "action", "body"),
                "INSERT OR IGNORE INTO lines (channel, at_ns, mark, code, source, subject, action, body)",
            )
            for statement in filter(str.strip, database.COUNT_SHARES.split(";")):
                target.execute(statement)
    return True


async def _take_summaries(source: Any, target: sqlite3.Connection) -> None:
    async with transaction(source, SNAPSHOT):
        for table, columns in (("channels", 3), ("folded", 4), ("summaries", 6)):
            insert = f"INSERT INTO {table} VALUES ({', '.join('?' * columns)})"
            cursor = await source.cursor(f"SELECT * FROM telemetry_{table}")
            while page := await cursor.fetch(PAGE_ROWS):
                target.executemany(insert, [tuple(row) for row in page])


async def _take_rows(
    source: Any,
    target: sqlite3.Connection,
    table: str,
    key: tuple[str, ...],
    beside: tuple[str, ...],
    insert: str,
) -> None:
    """Page by page, in the order of their key, day by day."""
    columns = (*key, *beside)
    order, given = ", ".join(key), ", ".join(f"${place}" for place in range(1, len(key) + 1))
    marks = ", ".join("?" * len(columns))
    for day in sorted(await schema.days(source, table)):
        name, last = schema.table_of(table, day), (-1,) * len(key)
        while True:
            page = await source.fetch(
                f"SELECT {', '.join(columns)} FROM {name} WHERE ({order}) > ({given})"
                f" ORDER BY {order} LIMIT {PAGE_ROWS}",
                *last,
            )
            if not page:
                break
            rows = [tuple(row) for row in page]
            target.executemany(f"{insert} VALUES ({marks})", rows)
            last = rows[-1][: len(key)]
