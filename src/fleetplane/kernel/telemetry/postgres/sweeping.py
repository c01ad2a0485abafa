"""What is too old or too much goes, by whichever server comes first; the others find it done.

Days go whole, at once. Room is made as in a file: the oldest of whoever takes most, by what was counted when
it was written. Space that deleted rows took in a day's table is given back when the day goes; so that the
disk stays within bounds, the oldest days of all go whole once tables take half as much again as they may.
"""

# ruff: noqa: S608  # names of tables are constants and numbers
from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any, Final

import asyncpg
import structlog

from fleetplane.kernel.telemetry.postgres import schema, summing
from fleetplane.kernel.telemetry.postgres.link import PostgresLink, transaction
from fleetplane.kernel.telemetry.postgres.schema import DAYS_AHEAD, LINES, POINTS, day_of, table_of
from fleetplane.kernel.telemetry.postgres.writing import BatchWriter, Share
from fleetplane.kernel.telemetry.summaries import Summarizer
from fleetplane.kernel.telemetry.values import TelemetryLimits
from fleetplane.kernel.values.times import NS

log = structlog.get_logger(__name__)

SLICE_ROWS: Final = 10_000
ROOM: Final = 0.95
"""Of the size to get down to when it was exceeded, so as not to delete at every turn."""
SUMMARIES_SHARE: Final = 0.25
"""Of the size, that summaries of one tenant may take while there is not enough."""
POINT_BYTES: Final = 100
"""About what a point takes, with its part of the index."""
LINE_BYTES: Final = 120
"""About what a line takes besides its texts."""
DISK_SHARE: Final = 1.5
"""Of the size that tables may take on the disk, with what deleted rows left."""

REWRITE_BYTES: Final = 256 * 1024**2
"""Of a day that is written anew where most of its rows were deleted: seconds, in which nobody reads it."""
TABLES: Final = (LINES, POINTS)

_NOW: Final = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000000)::int8"
_ADD_SHARES: Final = (
    "INSERT INTO telemetry_shares SELECT * FROM unnest($1::int4[], $2::int8[], $3::text[], $4::text[],"
    " $5::int8[], $6::int8[]) ON CONFLICT (day, channel, scope, source) DO UPDATE"
    " SET rows = greatest(0, telemetry_shares.rows + excluded.rows),"
    " bytes = greatest(0, telemetry_shares.bytes + excluded.bytes)"
)
_DROP_SHARES: Final = (
    "WITH gone AS (DELETE FROM telemetry_shares WHERE day = $1 AND (channel = 0) = $2 RETURNING rows)"
    " SELECT coalesce(sum(rows), 0)::int8 FROM gone"
)
_SIZE: Final = f"bytes + rows * CASE WHEN channel = 0 THEN {POINT_BYTES} ELSE {LINE_BYTES} END"
_VICTIM: Final = (
    "WITH sources AS (SELECT split_part(scope, '/', 1) || '/' || split_part(scope, '/', 2) AS tenant,"
    f" channel, scope, source, min(day) AS day, sum({_SIZE}) AS size FROM telemetry_shares"
    " WHERE rows > 0 AND (channel <> 0) = $1 GROUP BY channel, scope, source),"
    " largest AS (SELECT tenant FROM sources GROUP BY tenant ORDER BY sum(size) DESC LIMIT 1)"
    f" SELECT t.day, t.channel, t.scope, t.source, t.rows, ({_SIZE})::int8 AS size FROM telemetry_shares t"
    " JOIN (SELECT * FROM sources NATURAL JOIN largest ORDER BY size DESC LIMIT 1) s"
    " USING (day, channel, scope, source)"
)
"""The oldest day of the source that takes most, of the tenant that takes most: see `tenant_of`."""
_USED: Final = f"SELECT coalesce(sum({_SIZE}), 0)::int8 FROM telemetry_shares"
_SUMMARIES_BYTES: Final = (
    f"SELECT coalesce(sum(pg_column_size(body) + {summing.ROW_BYTES}), 0)::int8 FROM telemetry_summaries"
)
_ON_DISK: Final = (
    "SELECT coalesce(sum(pg_total_relation_size(inhrelid)), 0)::int8 FROM pg_inherits"
    " WHERE inhparent IN (to_regclass($1), to_regclass($2))"
)
_OLDEST: Final = (
    "WITH gone AS (DELETE FROM {table} WHERE ctid = ANY(ARRAY(SELECT ctid FROM {table} WHERE {which}"
    " ORDER BY at_ns LIMIT $3)) RETURNING {size} AS size)"
    " SELECT count(*), coalesce(sum(size), 0)::int8 FROM gone"
)
_OF_LINES: Final = "channel = $1 AND source = $2"
_LINE_SIZE: Final = "length(body) + length(subject) + length(action) + length(source)"
_OF_POINTS: Final = "series = ANY(ARRAY(SELECT id FROM telemetry_series WHERE scope = $1 AND source = $2))"


class Sweeper:
    def __init__(self, link: PostgresLink, writer: BatchWriter, limits: TelemetryLimits) -> None:
        self._link = link
        self._writer = writer
        self._limits = limits

    def __repr__(self) -> str:
        return f"<Sweeper {self._link!r}>"

    async def sweep(self, *, now_ns: int) -> AsyncGenerator[int, None]:
        """Between two slices others may write."""
        limits = self._limits
        async with self._link.held() as connection:
            # By the slower of two clocks: a server's that runs ahead deletes nothing that is still kept.
            now_ns = min(now_ns, await connection.fetchval(_NOW))
            await self.make_ahead(connection, now_ns)
            await self.note_shares(connection)
        lines_ns = now_ns - round(limits.lines_age_seconds * NS)
        points_ns = now_ns - round(limits.points_age_seconds * NS)
        for table, oldest_ns in ((LINES, lines_ns), (POINTS, points_ns)):
            async with self._link.held() as connection:
                there = await schema.days(connection, table)
            for day in sorted(there):
                if day < day_of(oldest_ns):
                    yield await self._drop_day(table, day)
        async with self._link.held() as connection:
            gone = await connection.execute(
                "DELETE FROM telemetry_series WHERE day < $1::int4", day_of(points_ns)
            )
            if gone != "DELETE 0":
                self._writer.series.forget()
            await self._writer.series.count(connection)
        async for rows in self._age(now_ns, points_ns):
            yield rows
        async for rows in self._make_room(day_of(now_ns)):
            yield rows

    async def make_ahead(self, connection: Any, now_ns: int) -> None:
        """Tables of today and the days to come."""
        today = day_of(now_ns)
        for table in TABLES:
            wanted = set(range(today, today + DAYS_AHEAD + 1))
            if not wanted <= (there := await schema.days(connection, table)):
                there = await schema.make_days(connection, table, wanted)
            self._writer.days[table] = there

    async def _drop_day(self, table: str, day: int) -> int:
        """How many rows that were, as they were counted."""
        async with self._link.held() as connection:
            try:
                await schema.drop_day(connection, table, day)
            except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
                # Somebody reads it: everybody would wait behind us. Tried again at the next turn.
                log.info("telemetry.day_in_use", table=table_of(table, day))
                return 0
            self._writer.days[table].discard(day)
            return int(await connection.fetchval(_DROP_SHARES, day, table == POINTS))

    # Shares.

    async def note_shares(self, connection: Any) -> None:
        """Write down what came since: sizes matter only here."""
        writer = self._writer
        rows, sizes = writer.rows, writer.bytes
        writer.rows, writer.bytes = Counter(), Counter()
        try:
            await _add_shares(connection, rows, sizes)
        except BaseException:
            writer.rows.update(rows)
            writer.bytes.update(sizes)
            raise

    # Summaries.

    async def _age(self, now_ns: int, oldest_ns: int) -> AsyncGenerator[int, None]:
        summarizers = await self._channels()
        channels = sorted(summarizers)
        for widths in summing.steps():
            for start in range(0, len(channels), summing.CHANNELS_AT_ONCE):
                some = {one: summarizers[one] for one in channels[start : start + summing.CHANNELS_AT_ONCE]}
                more = True
                while more:
                    async with self._link.held() as connection:
                        more = await summing.fold(
                            connection, some, widths, now_ns // NS, self._writer.in_thread
                        )
                    yield 0
            more = bool(channels)
            while more:
                async with self._link.held() as connection:
                    more = await summing.drop_folded(connection, channels, widths, now_ns)
                yield 0
        rows = 1 if channels else 0
        while rows:
            async with self._link.held() as connection:
                rows = await summing.expire(connection, channels, oldest_ns // NS)
            yield rows

    async def _channels(self) -> Mapping[int, Summarizer]:
        by_kind = {kind: one for one in self._writer.summarizers.values() for kind in one.kinds}
        async with self._link.held() as connection:
            found = await connection.fetch(
                "SELECT id, stream FROM telemetry_channels WHERE stream = ANY($1::text[])", list(by_kind)
            )
        return {number: by_kind[stream] for number, stream in found}

    # Room.

    async def used_bytes(self) -> int:
        """As counted when it was written, not as the disk has it."""
        async with self._link.held() as connection:
            counted = await connection.fetchval(_USED)
            return int(counted + await connection.fetchval(_SUMMARIES_BYTES))

    async def _make_room(self, today: int) -> AsyncGenerator[int, None]:
        limit = self._limits.size_bytes
        used = await self.used_bytes()
        if used > limit:
            target = round(limit * ROOM)
            async for rows in self._shorten_summaries(round(limit * SUMMARIES_SHARE)):
                yield rows
            for lines in (True, False):
                while (used := await self.used_bytes()) > target:
                    gone = await self._shorten(used - target, lines=lines)
                    if gone is None:
                        break
                    yield gone
        async for rows in self._free_disk(round(limit * DISK_SHARE), today):
            yield rows

    async def _shorten_summaries(self, tenant_bytes: int) -> AsyncGenerator[int, None]:
        async with self._link.held() as connection:
            tenants = await summing.sizes(connection)
        for theirs in tenants.values():
            while theirs and sum(theirs.values()) > tenant_bytes:
                async with self._link.held() as connection:
                    rows = await summing.shorten(connection, theirs)
                yield rows

    async def _shorten(self, excess_bytes: int, *, lines: bool) -> int | None:
        """Delete some of the oldest day of the source that takes most, of the tenant that takes most."""
        async with self._link.held() as connection:
            found = await connection.fetchrow(_VICTIM, lines)
            if found is None:
                return None
            day, channel, scope, source, rows, size = found
            victim = (day, channel, scope, source)
            count = min(rows, SLICE_ROWS, max(1, excess_bytes * rows // size + 1))
            table = table_of(LINES if lines else POINTS, day)
            statement = _OLDEST.format(
                table=table,
                which=_OF_LINES if lines else _OF_POINTS,
                size=_LINE_SIZE if lines else "0",
            )
            async with transaction(connection):
                there = await connection.fetchval("SELECT to_regclass($1)", table) is not None
                owner = channel if lines else scope
                gone, freed = await connection.fetchrow(statement, owner, source, count) if there else (0, 0)
                if gone < count:  # what was counted is not all there
                    gone_rows, freed = rows, size
                else:
                    gone_rows = gone
                await _add_shares(connection, Counter({victim: -gone_rows}), Counter({victim: -freed}))
            return int(gone)

    async def _free_disk(self, limit: int, today: int) -> AsyncGenerator[int, None]:
        """While tables take too much, write the oldest days anew or drop them; never today's."""
        async with self._link.held() as connection:
            there = [(table, day) for table in TABLES for day in sorted(await schema.days(connection, table))]
        for table, day in there:
            async with self._link.held() as connection:
                on_disk = await connection.fetchval(_ON_DISK, LINES, POINTS)
                if on_disk <= limit:
                    return
                name = table_of(table, day)
                of_day = await connection.fetchval("SELECT pg_total_relation_size(to_regclass($1))", name)
                kept = await connection.fetchval(
                    f"{_USED} WHERE day = $1 AND (channel = 0) = $2", day, table == POINTS
                )
                if day >= today or of_day is None:
                    continue
                if kept <= min(of_day / 2, REWRITE_BYTES):
                    with suppress(asyncpg.LockNotAvailableError):  # else at the next turn
                        await connection.execute(f"VACUUM FULL {name}")
                    continue
            log.warning("telemetry.day_dropped", table=name, bytes=on_disk, limit=limit)
            yield await self._drop_day(table, day)


async def _add_shares(connection: Any, rows: Counter[Share], sizes: Counter[Share]) -> None:
    keys = sorted(key for key in rows.keys() | sizes.keys() if rows[key] or sizes[key])
    if keys:
        columns = [[key[place] for key in keys] for place in range(4)]
        await connection.execute(
            _ADD_SHARES, *columns, [rows[key] for key in keys], [sizes[key] for key in keys]
        )
