"""Batches into PostgreSQL: one transaction each, its rows by COPY.

What costs time is done in a thread (marks, order, encoding, sums); what waits, in the event loop. A batch
that meets rows that are there already is written once more, without those. What was learnt on the way to a
failed batch is forgotten, so a batch may be tried as often as one likes.
"""

# ruff: noqa: S608  # names of tables are constants of the schema
from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, TypeVar

import asyncpg

from fleetplane.kernel.telemetry.engine import SeriesState, Written, marks
from fleetplane.kernel.telemetry.postgres import link as encoding
from fleetplane.kernel.telemetry.postgres import schema, summing
from fleetplane.kernel.telemetry.postgres.link import LineRow, PointRow, PostgresLink, text, transaction
from fleetplane.kernel.telemetry.postgres.schema import LINES, POINTS, day_of
from fleetplane.kernel.telemetry.postgres.series import Key, KnownSeries
from fleetplane.kernel.telemetry.series_quota import Admissions
from fleetplane.kernel.telemetry.summaries import WIDTHS, Summarizer, digested
from fleetplane.kernel.telemetry.summaries import Key as SummaryKey
from fleetplane.kernel.telemetry.values import LogRecord, Point, TelemetryLimits

ATTEMPTS: Final = 3
"""Of one batch: as it is, with rows that are there already, with days that another server just dropped."""

_SENDER: Final = attrgetter("scope", "stream", "source")
POINT_COLUMNS: Final = ("series", "at_ns", "value", "base")
_INSERT_POINTS: Final = (
    f"INSERT INTO {POINTS} SELECT * FROM unnest($1::int8[], $2::int8[], $3::float8[], $4::float8[])"
    " ON CONFLICT DO NOTHING"
)
_INSERT_LINES: Final = (
    f"INSERT INTO {LINES} SELECT * FROM unnest($1::int8[], $2::int8[], $3::int8[], $4::int8[], $5::text[],"
    " $6::text[], $7::text[], $8::bytea[]) ON CONFLICT DO NOTHING RETURNING channel, at_ns, mark"
)
_FIND_CHANNELS: Final = (
    "SELECT c.id, c.scope, c.stream FROM telemetry_channels c"
    " JOIN unnest($1::text[], $2::text[]) AS w(scope, stream) ON c.scope = w.scope AND c.stream = w.stream"
)
MAKE_CHANNELS: Final = (
    "WITH made AS (INSERT INTO telemetry_channels (scope, stream)"
    " SELECT * FROM unnest($1::text[], $2::text[]) ON CONFLICT DO NOTHING RETURNING id)"
    " INSERT INTO telemetry_folded SELECT made.id, w.width, 0, 0 FROM made, unnest($3::int4[]) AS w(width)"
)

T = TypeVar("T")
Sender = tuple[str, str, str]
"""Scope, stream and source."""
Share = tuple[int, int, str, str]
"""Day, channel (0 for points), scope and source."""


@dataclass(slots=True)
class _Batch:
    """Rows on their way, in the order of the index."""

    senders: dict[Sender, list[LogRecord]] = field(default_factory=dict)
    wanted: dict[Key, int] = field(default_factory=dict)
    """Series, and the newest day of each."""
    keys: list[Key] = field(default_factory=list)
    """Of each point."""
    counters: set[Key] = field(default_factory=set)
    points: list[PointRow] = field(default_factory=list)
    lines: list[tuple[LineRow, LogRecord]] = field(default_factory=list)
    over_quota: int = 0
    packed_points: list[bytes] = field(default_factory=list)
    packed_lines: list[bytes] = field(default_factory=list)
    days: dict[str, set[int]] = field(default_factory=dict)
    rows: Counter[Share] = field(default_factory=Counter)
    bytes: Counter[Share] = field(default_factory=Counter)


class BatchWriter:
    def __init__(self, link: PostgresLink, limits: TelemetryLimits) -> None:
        self._link = link
        self.series = KnownSeries(limits)
        self.summarizers: dict[str, Summarizer] = {}
        """By stream."""
        self.days: dict[str, set[int]] = {POINTS: set(), LINES: set()}
        """That have a table, by what lies in it."""
        self._channels: dict[tuple[str, str], int] = {}
        self.rows: Counter[Share] = Counter()
        """Written, and not in the table of shares yet; so are their bytes."""
        self.bytes: Counter[Share] = Counter()
        self._pen = ThreadPoolExecutor(1, "telemetry-write")

    def __repr__(self) -> str:
        return f"<BatchWriter {self.series!r}>"

    def close(self) -> None:
        self._pen.shutdown()

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pen, work)

    async def write(self, points: Sequence[Point], lines: Sequence[LogRecord]) -> Written:
        try:
            async with self._link.held() as connection:
                return await self._write(connection, points, lines)
        except BaseException:
            self.series.forget()
            self._channels.clear()
            for known in self.days.values():
                known.clear()
            raise

    async def _write(self, connection: Any, points: Sequence[Point], lines: Sequence[LogRecord]) -> Written:
        batch = await self.in_thread(lambda: _gathered(points, lines))
        admissions = Admissions(self.series.quota)
        states = await self.series.resolve(connection, batch.wanted, batch.counters, admissions)
        wanted = [sender[:2] for sender in batch.senders]
        for scope, stream in tuple(wanted):
            if (summarizer := self.summarizers.get(stream)) is not None:
                wanted += [(scope, kind) for kind in summarizer.kinds]
        channels = await self._resolve(connection, wanted)
        await self.in_thread(lambda: _made_ready(batch, points, states, channels))
        rows = await self._insisting(connection, batch)
        await connection.execute("SELECT nextval('telemetry_batches')")  # for readers on other servers
        self.rows.update(batch.rows)
        self.bytes.update(batch.bytes)
        self.rows.subtract(self.series.unshared)
        self.series.unshared.clear()
        return Written(
            rows=rows,
            ignored=len(points) + len(lines) - rows - batch.over_quota,
            over_quota=batch.over_quota,
            evicted=self.series.evicted,
            notices=admissions.notices,
        )

    async def _insisting(self, connection: Any, batch: _Batch) -> int:
        careful = False
        for attempt in range(1, ATTEMPTS + 1):
            try:
                for table, days in batch.days.items():
                    if not days <= self.days[table]:
                        self.days[table] = await schema.make_days(connection, table, days)
                return await self._transact(connection, batch, careful=careful)
            except asyncpg.UniqueViolationError:  # also where another server made the same day
                careful = True
                if attempt == ATTEMPTS:
                    raise
            except asyncpg.CheckViolationError:  # no such day any more
                for known in self.days.values():
                    known.clear()
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    async def _transact(self, connection: Any, batch: _Batch, *, careful: bool) -> int:
        async with transaction(connection):
            if careful:
                rows = await insert_points(connection, batch.points)
                again = await insert_lines(connection, [row for row, _ in batch.lines])
            else:
                await copy(connection, POINTS, POINT_COLUMNS, batch.packed_points)
                await copy(connection, LINES, LineRow._fields, batch.packed_lines)
                rows, again = len(batch.points), set()
            await self._sum_up(connection, batch, again)
        return rows + len(batch.lines) - len(again)

    async def _sum_up(self, connection: Any, batch: _Batch, again: set[tuple[int, int, int]]) -> None:
        fresh: dict[Sender, list[LogRecord]] = {}
        for row, line in batch.lines:
            if line.stream in self.summarizers and row[:3] not in again:
                fresh.setdefault((text(line.scope), text(line.stream), row.source), []).append(line)
        if not fresh:
            return
        channels = self._channels
        by_channel = {
            channels[scope, kind]: self.summarizers[stream]
            for scope, stream, _ in fresh
            for kind in self.summarizers[stream].kinds
        }
        folded = await summing.hold_folded(connection, sorted(by_channel))

        def digest() -> dict[SummaryKey, list[bytes]]:
            groups: dict[SummaryKey, list[bytes]] = {}
            for (scope, stream, source), theirs in fresh.items():
                summarizer = self.summarizers[stream]
                homes = {kind: channels[scope, kind] for kind in summarizer.kinds}
                for key, bodies in digested(summarizer, homes, folded, source, theirs).items():
                    groups.setdefault((*key[:4], text(key[4])), []).extend(bodies)
            return groups

        await summing.put(connection, await self.in_thread(digest), by_channel, self.in_thread)

    async def _resolve(
        self, connection: Any, wanted: Sequence[tuple[str, str]]
    ) -> Mapping[tuple[str, str], int]:
        """The numbers of channels, which are made if they are new."""
        missing = sorted({one for one in wanted if one not in self._channels})
        if missing:
            columns = [one[0] for one in missing], [one[1] for one in missing]
            await connection.execute(MAKE_CHANNELS, *columns, list(WIDTHS[:-1]))
            for number, scope, stream in await connection.fetch(_FIND_CHANNELS, *columns):
                self._channels[scope, stream] = number
        return self._channels


def _gathered(points: Sequence[Point], lines: Sequence[LogRecord]) -> _Batch:
    """Who sent what."""
    batch = _Batch()
    for sender, some in groupby(lines, _SENDER):  # they lie together already, a few of each
        scope, stream, source = sender
        batch.senders.setdefault((text(scope), text(stream), text(source)), []).extend(some)
    for point in points:
        key = (text(point.scope), text(point.series), text(point.source))
        batch.keys.append(key)
        day = day_of(point.at_ns)
        if batch.wanted.get(key, -1) < day:
            batch.wanted[key] = day
        if point.counter:
            batch.counters.add(key)
    return batch


def _made_ready(
    batch: _Batch,
    points: Sequence[Point],
    states: Mapping[Key, SeriesState],
    channels: Mapping[tuple[str, str], int],
) -> None:
    """Rows, each once, sorted, and packed; and how much each source has of each day."""
    by_moment: dict[tuple[int, int], PointRow] = {}
    for key, point in zip(batch.keys, points, strict=True):
        if (state := states.get(key)) is None:
            batch.over_quota += 1
        elif (row := state.take(point)) is not None and row[:2] not in by_moment:
            by_moment[row[:2]] = row
            batch.rows[day_of(point.at_ns), 0, key[0], key[2]] += 1
    batch.points = [by_moment[place] for place in sorted(by_moment)]
    found: dict[tuple[int, int, int], tuple[LineRow, LogRecord]] = {}
    for (scope, stream, source), theirs in batch.senders.items():
        channel = channels[scope, stream]
        for line, mark in zip(theirs, marks(source, theirs), strict=True):
            place = (channel, line.at_ns, mark)
            if place in found:
                continue
            subject, action = text(line.subject), text(line.action)
            found[place] = LineRow(*place, line.code, source, subject, action, line.body), line
            share = (day_of(line.at_ns), channel, scope, source)
            batch.rows[share] += 1
            batch.bytes[share] += len(line.body) + len(subject) + len(action) + len(source)
    batch.lines = [found[place] for place in sorted(found)]
    batch.packed_points = encoding.points(batch.points) if batch.points else []
    batch.packed_lines = encoding.lines(row for row, _ in batch.lines) if batch.lines else []
    batch.days = {
        POINTS: {day_of(row[1]) for row in batch.points},
        LINES: {day_of(row.at_ns) for row, _ in batch.lines},
    }


async def copy(connection: Any, table: str, columns: Sequence[str], packed: Sequence[bytes]) -> None:
    """Write what `encoding` packed; none of it if a row is there already."""
    if not packed:
        return

    async def chunks() -> AsyncIterator[bytes]:
        for chunk in packed:
            yield chunk

    await connection.copy_to_table(table, source=chunks(), columns=columns, format="binary")


async def insert_points(connection: Any, rows: Sequence[PointRow]) -> int:
    """Write those that are not there; how many that were."""
    if not rows:
        return 0
    status = await connection.execute(_INSERT_POINTS, *[list(column) for column in zip(*rows, strict=True)])
    return int(status.rsplit(" ", 1)[-1])


async def insert_lines(connection: Any, rows: Sequence[LineRow]) -> set[tuple[int, int, int]]:
    """The places of those that were there before."""
    if not rows:
        return set()
    made = await connection.fetch(_INSERT_LINES, *[list(column) for column in zip(*rows, strict=True)])
    return {row[:3] for row in rows} - {tuple(row) for row in made}
