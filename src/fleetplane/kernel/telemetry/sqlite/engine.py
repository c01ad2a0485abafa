"""Telemetry in a file: one thread writes, and readers answer queries over stretches of time beside it."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Self, TypeVar

from fleetplane.kernel.telemetry.engine import Written, check_buckets, moment, page_start
from fleetplane.kernel.telemetry.sqlite import database, summing
from fleetplane.kernel.telemetry.sqlite.writing import SqliteSeriesWriter
from fleetplane.kernel.telemetry.summaries import FoundSummary, Summarizer
from fleetplane.kernel.telemetry.values import (
    FoundLine,
    LinePage,
    LineQuery,
    LogRecord,
    Point,
    PointBucket,
    Sample,
    TelemetryLimits,
)

PATIENCE_SECONDS = 20.0
"""After which a question is given up: it keeps others waiting."""
STEPS_BETWEEN_LOOKS = 10_000
"""Of the database's machine: about a millisecond."""

_SERIES = "SELECT id, source FROM series WHERE scope = ? AND name = ?"
_LATEST = (
    "SELECT at_ns, value + base FROM points WHERE series = ? AND at_ns >= ? AND at_ns < ?"
    " ORDER BY at_ns DESC LIMIT ?"
)
_FIRST = (
    "SELECT at_ns, value + base FROM points WHERE series = ? AND at_ns >= ? AND at_ns < ?"
    " ORDER BY at_ns LIMIT 1"
)
_BUCKETS = (
    "SELECT (at_ns - :start) / :width AS bucket, count(*), sum(value), min(value), max(value)"
    " FROM points WHERE series = :series AND at_ns >= :start AND at_ns < :stop GROUP BY bucket"
)
_MATCHES = (
    " FROM lines INDEXED BY lines_by_time WHERE channel = :channel AND at_ns >= :start AND at_ns < :stop"
    " AND code BETWEEN :low AND :high AND (:source = '' OR source = :source)"
    " AND (:subject = '' OR subject = :subject) AND (:action = '' OR action = :action)"
)
_COUNT = "SELECT count(*)" + _MATCHES
_PAGE = (
    "SELECT id, at_ns, mark, source"
    + _MATCHES
    + " AND (at_ns, mark) < (:last_ns, :last_mark) ORDER BY at_ns DESC, mark DESC LIMIT :limit"
)


class SqliteSeriesReader:
    """Used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = database.connect(path)

    def close(self) -> None:
        self._connection.close()

    def summaries(
        self, scope: str, stream: str, *, from_ns: int, to_ns: int, step_seconds: int = 0
    ) -> Sequence[FoundSummary]:
        from_ns, to_ns = moment(from_ns), moment(to_ns)
        with self._asking() as ask:
            return summing.found(ask, scope, stream, from_ns=from_ns, to_ns=to_ns, step_seconds=step_seconds)

    def latest(
        self,
        scope: str,
        series: str,
        sources: Collection[str] | None,
        *,
        from_ns: int,
        to_ns: int,
        count: int,
    ) -> Mapping[str, Sequence[Sample]]:
        from_ns, to_ns = moment(from_ns), moment(to_ns)
        with self._asking() as ask:
            return {
                source: [Sample(at_ns=at_ns, value=value) for at_ns, value in rows]
                for number, source in self._series(scope, series, sources)
                if (rows := ask.execute(_LATEST, (number, from_ns, to_ns, count)).fetchall())
            }

    def growth(
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
        grown = {}
        with self._asking() as ask:
            for number, source in self._series(scope, series, sources):
                last = ask.execute(_LATEST, (number, from_ns, to_ns, 1)).fetchone()
                if last is None:
                    continue
                before = ask.execute(_LATEST, (number, from_ns - lookback_ns, from_ns, 1)).fetchone()
                first = before or ask.execute(_FIRST, (number, from_ns, to_ns)).fetchone()
                grown[source] = last[1] - first[1]
        return grown

    def buckets(
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
        made: dict[int, PointBucket] = {}
        with self._asking() as ask:
            for number, _ in self._series(scope, series, sources):
                window = {"series": number, "start": from_ns, "stop": to_ns, "width": width_ns}
                for index, count, total, lowest, highest in ask.execute(_BUCKETS, window):
                    bucket = PointBucket(
                        at_ns=from_ns + index * width_ns,
                        count=count,
                        total=total,
                        lowest=lowest,
                        highest=highest,
                    )
                    made[index] = _together(made[index], bucket) if index in made else bucket
        return [made[index] for index in sorted(made)]

    def lines(self, query: LineQuery) -> LinePage:
        last_ns, last_mark = page_start(query)
        with self._asking() as ask:
            channel = ask.execute(
                "SELECT id FROM channels WHERE scope = ? AND stream = ?", (query.scope, query.stream)
            ).fetchone()
            if channel is None:
                return LinePage(lines=(), total=0, cursor="")
            asked = {
                "channel": channel[0],
                "start": moment(query.from_ns),
                "stop": moment(query.to_ns),
                "low": query.code_low,
                "high": query.code_high,
                "source": query.source,
                "subject": query.subject,
                "action": query.action,
                "last_ns": last_ns,
                "last_mark": last_mark,
                "limit": query.limit + 1,
            }
            (total,) = ask.execute(_COUNT, asked).fetchone()
            rows = ask.execute(_PAGE, asked).fetchall()
            more, rows = len(rows) > query.limit, rows[: query.limit]
            found = [
                FoundLine(source=source, at_ns=at_ns, body=self._body(number))
                for number, at_ns, _, source in rows
            ]
        cursor = f"{rows[-1][1]}.{rows[-1][2]}" if more else ""
        return LinePage(lines=found, total=total, cursor=cursor)

    def _body(self, number: int) -> bytes:
        (body,) = self._connection.execute("SELECT body FROM lines WHERE id = ?", (number,)).fetchone()
        return bytes(body)

    def _series(self, scope: str, series: str, sources: Collection[str] | None) -> Sequence[tuple[int, str]]:
        found = self._connection.execute(_SERIES, (scope, series)).fetchall()
        return [(number, source) for number, source in found if sources is None or source in sources]

    @contextmanager
    def _asking(self) -> Iterator[sqlite3.Connection]:
        """One view of the file for the whole question, and no more time than is fair."""
        until = time.monotonic() + PATIENCE_SECONDS
        connection = self._connection
        with database.translated(self._path):
            connection.set_progress_handler(lambda: time.monotonic() > until, STEPS_BETWEEN_LOOKS)
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                connection.set_progress_handler(None, 0)
                connection.execute("COMMIT")


def _together(one: PointBucket, other: PointBucket) -> PointBucket:
    return PointBucket(
        at_ns=one.at_ns,
        count=one.count + other.count,
        total=one.total + other.total,
        lowest=min(one.lowest, other.lowest),
        highest=max(one.highest, other.highest),
    )


READERS = 2

T = TypeVar("T")


class SqliteTelemetry:
    """A `TelemetryEngine`."""

    def __init__(self, path: Path, limits: TelemetryLimits) -> None:
        self._path = path
        self.writer = SqliteSeriesWriter(path, limits)
        self._readers: SimpleQueue[SqliteSeriesReader] = SimpleQueue()
        for _ in range(READERS):
            self._readers.put(SqliteSeriesReader(path))
        self._pen = ThreadPoolExecutor(1, "telemetry-write")
        self._eyes = ThreadPoolExecutor(READERS, "telemetry-read")

    def __repr__(self) -> str:
        return f"<SqliteTelemetry {self._path}>"

    @classmethod
    async def open(cls, path: Path, limits: TelemetryLimits) -> Self:
        """Make the file if it is not there."""
        await asyncio.to_thread(database.prepare, path)
        return cls(path, limits)

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._pen.shutdown()
        self._eyes.shutdown()
        self.writer.close()
        while not self._readers.empty():
            self._readers.get().close()

    @property
    def summarizers(self) -> dict[str, Summarizer]:
        return self.writer.summarizers

    @property
    def series(self) -> int:
        return self.writer.series

    @property
    def stamp(self) -> int:
        return 0

    async def write(self, points: Sequence[Point], lines: Sequence[LogRecord]) -> Written:
        return await self._in_pen(lambda: self.writer.write(points, lines))

    async def sweep(self, *, now_ns: int) -> AsyncGenerator[int, None]:
        slices = self.writer.sweep(now_ns=now_ns)
        while (rows := await self._in_pen(lambda: next(slices, None))) is not None:
            yield rows

    async def used_bytes(self) -> int:
        return await self._in_pen(lambda: self.writer.used_bytes)

    async def _in_pen(self, work: Callable[[], T]) -> T:
        def translated() -> T:
            with database.translated(self._path):
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._pen, translated)

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
        return await self._ask(
            lambda reader: reader.latest(scope, series, sources, from_ns=from_ns, to_ns=to_ns, count=count)
        )

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
        return await self._ask(
            lambda reader: reader.growth(
                scope, series, sources, from_ns=from_ns, to_ns=to_ns, lookback_ns=lookback_ns
            )
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
        return await self._ask(
            lambda reader: reader.buckets(
                scope, series, sources, from_ns=from_ns, to_ns=to_ns, width_ns=width_ns
            )
        )

    async def summaries(
        self, scope: str, stream: str, *, from_ns: int, to_ns: int, step_seconds: int
    ) -> Sequence[FoundSummary]:
        return await self._ask(
            lambda reader: reader.summaries(
                scope, stream, from_ns=from_ns, to_ns=to_ns, step_seconds=step_seconds
            )
        )

    async def lines(self, query: LineQuery) -> LinePage:
        return await self._ask(lambda reader: reader.lines(query))

    async def _ask(self, question: Callable[[SqliteSeriesReader], T]) -> T:
        def work() -> T:
            reader = self._readers.get()
            try:
                return question(reader)
            finally:
                self._readers.put(reader)

        return await asyncio.get_running_loop().run_in_executor(self._eyes, work)
