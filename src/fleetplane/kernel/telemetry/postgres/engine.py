"""Telemetry in PostgreSQL, which several servers write and read at the same time.

It has two connections of its own, one that writes and sweeps and one that answers queries, each bounded in
time and in the size of its result; nothing here takes the store's lock. A crash of a server loses what was
still queued; committed rows are as safe as the rest of the database.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Self

from fleetplane.kernel import boundary
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.telemetry.engine import Written, check_buckets, moment, page_start
from fleetplane.kernel.telemetry.postgres import schema, summing
from fleetplane.kernel.telemetry.postgres.link import (
    READER,
    SNAPSHOT,
    WRITER,
    PostgresLink,
    text,
    transaction,
)
from fleetplane.kernel.telemetry.postgres.schema import LINES, POINTS
from fleetplane.kernel.telemetry.postgres.sweeping import Sweeper
from fleetplane.kernel.telemetry.postgres.writing import BatchWriter
from fleetplane.kernel.telemetry.summaries import FoundSummary, Summarizer, cover
from fleetplane.kernel.telemetry.values import (
    MOMENT_LIMIT_NS,
    FoundLine,
    LinePage,
    LineQuery,
    LogRecord,
    Point,
    PointBucket,
    Sample,
    TelemetryLimits,
)
from fleetplane.kernel.values.times import NS

# ruff: noqa: S608  # names of tables are constants, values are parameters


_SERIES: Final = (
    "telemetry_series s WHERE s.scope = $1 AND s.name = $2 AND ($3::text[] IS NULL OR s.source = ANY($3))"
)
_LAST: Final = (
    f"SELECT p.at_ns, p.value + p.base AS value FROM {POINTS} p WHERE p.series = s.id"
    " AND p.at_ns >= %s AND p.at_ns < %s ORDER BY p.at_ns %s LIMIT %s"
)
_LATEST: Final = (
    "SELECT s.source, f.at_ns, f.value FROM telemetry_series s CROSS JOIN LATERAL"
    f" ({_LAST % ('$4', '$5', 'DESC', '$6')}) f WHERE {_SERIES.split(' WHERE ')[1]}"
    " ORDER BY s.source, f.at_ns DESC"
)
_GROWTH: Final = (
    "SELECT s.source, l.value - coalesce(b.value, f.value) FROM telemetry_series s"
    f" CROSS JOIN LATERAL ({_LAST % ('$4', '$5', 'DESC', '1')}) l"
    f" LEFT JOIN LATERAL ({_LAST % ('$6', '$4', 'DESC', '1')}) b ON true"
    f" LEFT JOIN LATERAL ({_LAST % ('$4', '$5', 'ASC', '1')}) f ON b.value IS NULL"
    f" WHERE {_SERIES.split(' WHERE ')[1]}"
)
_BUCKETS: Final = (
    f"SELECT (at_ns - $4) / $6 AS bucket, count(*), sum(value), min(value), max(value) FROM {POINTS}"
    f" WHERE series = ANY(ARRAY(SELECT s.id FROM {_SERIES})) AND at_ns >= $4 AND at_ns < $5"
    " GROUP BY bucket ORDER BY bucket"
)
_CHANNEL: Final = "SELECT id FROM telemetry_channels WHERE scope = $1 AND stream = $2"
_READ: Final = (
    "SELECT at, source, subject, body FROM telemetry_summaries"
    " WHERE channel = $1 AND width = $2 AND at >= $3 AND at < $4 ORDER BY at"
)


class Questions:
    def __init__(self, link: PostgresLink) -> None:
        self._link = link

    def __repr__(self) -> str:
        return f"<Questions {self._link!r}>"

    async def latest(
        self,
        scope: str,
        series: str,
        sources: Collection[str] | None,
        *,
        from_ns: int,
        to_ns: int,
        count: int,
    ) -> Mapping[str, Sequence[Sample]]:
        found: dict[str, list[Sample]] = {}
        named = _named(scope, series, sources)
        async with self._link.held() as ask:
            rows = await ask.fetch(_LATEST, *named, moment(from_ns), moment(to_ns), count)
        for source, at_ns, value in rows:
            found.setdefault(source, []).append(Sample(at_ns=at_ns, value=value))
        return found

    async def growth(
        self,
        scope: str,
        series: str,
        sources: Collection[str] | None,
        *,
        from_ns: int,
        to_ns: int,
        lookback_ns: int,
    ) -> Mapping[str, float]:
        from_ns, to_ns = moment(from_ns), moment(to_ns)
        named = _named(scope, series, sources)
        async with self._link.held() as ask:
            rows = await ask.fetch(_GROWTH, *named, from_ns, to_ns, from_ns - lookback_ns)
        return dict(rows)

    async def buckets(
        self,
        scope: str,
        series: str,
        sources: Collection[str] | None,
        *,
        from_ns: int,
        to_ns: int,
        width_ns: int,
    ) -> Sequence[PointBucket]:
        from_ns, to_ns = moment(from_ns), moment(to_ns)
        check_buckets(from_ns, to_ns, width_ns)
        named = _named(scope, series, sources)
        async with self._link.held() as ask:
            rows = await ask.fetch(_BUCKETS, *named, from_ns, to_ns, min(width_ns, MOMENT_LIMIT_NS))
        return [
            PointBucket(
                at_ns=from_ns + index * width_ns, count=count, total=total, lowest=lowest, highest=highest
            )
            for index, count, total, lowest, highest in rows
        ]

    async def summaries(
        self, scope: str, stream: str, *, from_ns: int, to_ns: int, step_seconds: int
    ) -> Sequence[FoundSummary]:
        from_ns, to_ns = moment(from_ns), moment(to_ns)
        found: list[FoundSummary] = []
        async with self._link.held() as ask, transaction(ask, SNAPSHOT):
            channel = await ask.fetchval(_CHANNEL, text(scope), text(stream))
            if channel is None:
                return []
            folded = (await summing.hold_folded(ask, [channel], hold=False))[channel]
            parts = cover(from_ns // NS, -(-to_ns // NS), folded, step_seconds=step_seconds)
            for width, start, stop in parts:
                found += [
                    FoundSummary(width_seconds=width, at_seconds=at, source=name, subject=subject, body=body)
                    for at, name, subject, body in await ask.fetch(_READ, channel, width, start, stop)
                ]
        return found

    async def lines(self, query: LineQuery) -> LinePage:
        last_ns, last_mark = page_start(query)
        async with self._link.held() as ask, transaction(ask, SNAPSHOT):
            channel = await ask.fetchval(_CHANNEL, text(query.scope), text(query.stream))
            if channel is None:
                return LinePage(lines=(), total=0, cursor="")
            matches, given = _matches(query, channel)
            total = await ask.fetchval(f"SELECT count(*) {matches}", *given)
            here = len(given)
            rows = await ask.fetch(
                f"SELECT at_ns, mark, source, body {matches} AND at_ns <= ${here + 1}"
                f" AND (at_ns, mark) < (${here + 1}, ${here + 2}::int8)"
                f" ORDER BY at_ns DESC, mark DESC LIMIT ${here + 3}",
                *given,
                last_ns,
                last_mark,
                query.limit + 1,
            )
        more, rows = len(rows) > query.limit, rows[: query.limit]
        cursor = f"{rows[-1]['at_ns']}.{rows[-1]['mark']}" if more else ""
        found = [FoundLine(source=row["source"], at_ns=row["at_ns"], body=row["body"]) for row in rows]
        return LinePage(lines=found, total=total, cursor=cursor)


def _named(scope: str, series: str, sources: Collection[str] | None) -> tuple[str, str, Sequence[str] | None]:
    return text(scope), text(series), None if sources is None else [text(one) for one in sources]


def _matches(query: LineQuery, channel: int) -> tuple[str, list[Any]]:
    """Only what is asked for: without further conditions the index alone answers a count."""
    given: list[Any] = [channel, moment(query.from_ns), moment(query.to_ns)]
    wanted = f"FROM {LINES} WHERE channel = $1 AND at_ns >= $2 AND at_ns < $3"
    if query.code_low > 0 or query.code_high < MOMENT_LIMIT_NS:
        given += [moment(query.code_low), moment(query.code_high)]
        wanted += f" AND code BETWEEN ${len(given) - 1} AND ${len(given)}"
    for column in ("source", "subject", "action"):
        if asked := getattr(query, column):
            given.append(text(asked))
            wanted += f" AND {column} = ${len(given)}"
    return wanted, given


_BATCHES: Final = "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM telemetry_batches"
LOOK_SECONDS: Final = 1.0
"""Between looks whether other servers have written: those who watch figures are told so."""


class PostgresTelemetry:
    """A `TelemetryEngine`."""

    def __init__(self, url: str, limits: TelemetryLimits) -> None:
        self._write = PostgresLink(url, WRITER, "write")
        self._read = PostgresLink(url, READER, "question")
        self.writer = BatchWriter(self._write, limits)
        self._sweeper = Sweeper(self._write, self.writer, limits)
        self._questions = Questions(self._read)
        self._stamp = 0
        self._looking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<PostgresTelemetry {self._write!r}>"

    @classmethod
    async def open(cls, url: str, limits: TelemetryLimits, *, only_reads: bool = False) -> Self:
        """Make the tables if they are not there."""
        engine = cls(url, limits)
        try:
            async with engine._write.held() as connection:
                await schema.prepare(connection)
                await engine.writer.series.count(connection)
            if only_reads:
                await engine._write.close()
        except BaseException:
            await engine.close()
            raise
        engine._looking = asyncio.create_task(boundary.kept("telemetry/looking", engine._look))
        return engine

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
            if self.writer.rows or self.writer.bytes:  # lost with a crash: counts, no rows
                with suppress(FleetplaneError):
                    async with self._write.held() as connection:
                        await self._sweeper.note_shares(connection)
        await self._write.close()
        await self._read.close()
        await asyncio.to_thread(self.writer.close)

    async def _look(self) -> None:
        while True:
            with suppress(FleetplaneError):
                async with self._read.held() as connection:
                    self._stamp = await connection.fetchval(_BATCHES)
            await asyncio.sleep(LOOK_SECONDS)

    @property
    def summarizers(self) -> dict[str, Summarizer]:
        return self.writer.summarizers

    @property
    def series(self) -> int:
        return self.writer.series.quota.total

    @property
    def stamp(self) -> int:
        return self._stamp

    async def write(self, points: Sequence[Point], lines: Sequence[LogRecord]) -> Written:
        return await self.writer.write(points, lines)

    def sweep(self, *, now_ns: int) -> AsyncGenerator[int, None]:
        return self._sweeper.sweep(now_ns=now_ns)

    async def used_bytes(self) -> int:
        return await self._sweeper.used_bytes()

    # Questions.

    async def latest(
        self,
        scope: str,
        series: str,
        sources: Collection[str] | None,
        *,
        from_ns: int,
        to_ns: int,
        count: int,
    ) -> Mapping[str, Sequence[Sample]]:
        return await self._questions.latest(scope, series, sources, from_ns=from_ns, to_ns=to_ns, count=count)

    async def growth(
        self,
        scope: str,
        series: str,
        sources: Collection[str] | None,
        *,
        from_ns: int,
        to_ns: int,
        lookback_ns: int,
    ) -> Mapping[str, float]:
        return await self._questions.growth(
            scope, series, sources, from_ns=from_ns, to_ns=to_ns, lookback_ns=lookback_ns
        )

    async def buckets(
        self,
        scope: str,
        series: str,
        sources: Collection[str] | None,
        *,
        from_ns: int,
        to_ns: int,
        width_ns: int,
    ) -> Sequence[PointBucket]:
        return await self._questions.buckets(
            scope, series, sources, from_ns=from_ns, to_ns=to_ns, width_ns=width_ns
        )

    async def summaries(
        self, scope: str, stream: str, *, from_ns: int, to_ns: int, step_seconds: int
    ) -> Sequence[FoundSummary]:
        return await self._questions.summaries(
            scope, stream, from_ns=from_ns, to_ns=to_ns, step_seconds=step_seconds
        )

    async def lines(self, query: LineQuery) -> LinePage:
        return await self._questions.lines(query)
