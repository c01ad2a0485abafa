"""Time series and log lines, stored beside the state.

Batches are accepted without waiting: they go into a bounded queue that is shared fairly between tenants and
sources; what does not fit is refused and counted. One task writes; what arrives meanwhile becomes its
next batch. Accepted data is written within moments, not at once: see the engines for what a crash
may cost. While a database is away the queue fills and nobody waits. Subscribers learn which scopes and
sources were written lately. Knows nothing of what the series and lines are about.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Self, TypeVar

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.kernel import boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, Unavailable
from fleetplane.kernel.telemetry.engine import Away, TelemetryEngine, Written
from fleetplane.kernel.telemetry.fair_queue import FairLineQueue
from fleetplane.kernel.telemetry.series_quota import QuotaNotice
from fleetplane.kernel.telemetry.sqlite.engine import SqliteTelemetry
from fleetplane.kernel.telemetry.summaries import FoundSummary, Summarizer
from fleetplane.kernel.telemetry.values import (
    LinePage,
    LineQuery,
    LogRecord,
    Point,
    PointBucket,
    Sample,
    TelemetryLimits,
    TelemetryStatistics,
)
from fleetplane.kernel.values.times import NS

SENDERS_LIMIT = 50_000
"""Sources that are remembered, some 200 bytes each: five times as many as one server is made for."""

Sender = tuple[str, str]
"""Scope and source."""


class News:
    """Numbers what was written, and remembers of every source the last number."""

    def __init__(self) -> None:
        self._last: OrderedDict[Sender, int] = OrderedDict()
        self.number = 0

    def __repr__(self) -> str:
        return f"<News number={self.number} senders={len(self._last)}>"

    def note(self, rows: Iterable[Point | LogRecord]) -> None:
        """Rows that were written together."""
        self.number += 1
        for sender in {(row.scope, row.source) for row in rows}:
            self._last[sender] = self.number
            self._last.move_to_end(sender)
        while len(self._last) > SENDERS_LIMIT:
            self._last.popitem(last=False)

    def since(self, number: int) -> Iterator[Sender]:
        """Of whom something was written after a number."""
        for sender in reversed(self._last):
            if self._last[sender] <= number:
                return
            yield sender


log = structlog.get_logger(__name__)

QUESTIONS_LIMIT = 64
"""Waiting for a reader; with a reader's patience, more would wait in vain."""
BATCH_ROWS = 8_000
"""Written at once: some 80 ms, of which the event loop is held up for 3 with their making. Twice as many are
no faster; a quarter costs half as much again, where lines of one moment touch the index everywhere."""
AGAIN_SECONDS = 1.0
"""Between attempts to write a batch while the database is away."""
AHEAD_NS = 86_400 * NS
"""How far in the future a row may lie, for sources whose clocks are wrong: what is later would not become old
in any useful time, and is not taken."""
SWEEP_SECONDS = 60.0
"""Between looks for what is too old or too much; the file may outgrow its bound by as much as comes in."""
TELL_AGAIN_SECONDS = 3600.0
"""Between two warnings of one quota."""
TOLD_LIMIT = 10_000
LOOKBACK_NS = 600 * NS
"""How long before a stretch a counter's last point may lie for its growth to count from there."""

T = TypeVar("T")


class Telemetry:
    """See `open`."""

    def __init__(self, engine: TelemetryEngine, clock: Clock, limits: TelemetryLimits) -> None:
        self._engine = engine
        self._clock = clock
        self._limits = limits
        self._queue = FairLineQueue(rows_limit=limits.queue_rows, bytes_limit=limits.queue_bytes)
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = asyncio.Event()
        self._asking = 0
        self._takes = True
        self._written = self._batches = self._refused = self._unsound = self._retried = 0
        self._ignored = self._lost = self._expired = self._over_quota = self._evicted = 0
        self._told: dict[tuple[str, str, str, bool], float] = {}
        self._used_bytes = 0
        self.news = News()

    def __repr__(self) -> str:
        return f"<Telemetry {self._engine!r} queued={len(self._queue)} written={self._written}>"

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        path: Path,
        clock: Clock,
        *,
        limits: TelemetryLimits | None = None,
        url: str = "",
        only_reads: bool = False,
        sweeps: bool = True,
    ) -> AsyncIterator[Self]:
        """Telemetry in a file, or in the PostgreSQL of an address, which other servers write to as well.

        What was taken is written before this ends, unless the database is away. With `only_reads` nothing
        is taken, and nothing deleted; without `sweeps`, nothing is deleted but by `sweeping`.
        """
        limits = limits or TelemetryLimits()
        engine = await _engine(path, url, limits, only_reads=only_reads)
        try:
            telemetry = cls(engine, clock, limits)
            telemetry._takes = not only_reads
            telemetry._used_bytes = await engine.used_bytes()
            tasks = []
            if not only_reads:
                tasks.append(asyncio.create_task(boundary.kept("telemetry/writing", telemetry._writing)))
            if sweeps and not only_reads:
                tasks.append(asyncio.create_task(boundary.kept("telemetry/sweeping", telemetry.sweeping)))
            try:
                yield telemetry
            finally:
                telemetry._closing.set()
                try:
                    await telemetry.flush()
                finally:  # also if whoever opened it was told not to wait
                    for task in tasks:
                        task.cancel()
                    if tasks:
                        await asyncio.wait(tasks)
        finally:
            await engine.close()

    # Taking.

    def offer(self, *, points: Sequence[Point] = (), lines: Sequence[LogRecord] = ()) -> bool:
        """Take all of these, or none and say so. Never waits, never raises.

        Rows that make no sense are left out: they would make none the next time either.
        """
        count = len(points) + len(lines)
        now_ns = self._clock.now_ns()
        latest = now_ns + AHEAD_NS
        # Lines are summed up for as long as points are kept, also those that come late.
        age_seconds = max(self._limits.points_age_seconds, self._limits.lines_age_seconds)
        oldest = now_ns - round(age_seconds * NS)
        sound: list[Point | LogRecord] = [one for one in points if one.is_sound and one.at_ns <= latest]
        sound += [one for one in lines if one.is_sound and one.at_ns <= latest]
        kept = [one for one in sound if one.at_ns >= oldest]
        if self._closed or not self._queue.put(kept):
            self._refused += count
            return False
        self._unsound += count - len(sound)
        self._expired += len(sound) - len(kept)
        if kept:
            self._idle.clear()
            self._arrived.set()
        return True

    @property
    def _closed(self) -> bool:
        return self._closing.is_set() or not self._takes

    def has_room(self, scope: str, source: str, *, rows: int, size: int) -> bool:
        """Whether lines of a source would be taken now: to be asked before they are made out of a message."""
        if not self._closed and self._queue.has_room(scope, source, count=rows, size=size):
            return True
        self._refused += rows
        return False

    def summarize(self, summarizer: Summarizer) -> None:
        """Sum up the lines of a stream from now on, however long they themselves are kept."""
        self._engine.summarizers[summarizer.stream] = summarizer

    async def flush(self) -> None:
        """Return when nothing is waiting to be written."""
        await self._idle.wait()

    async def _writing(self) -> None:
        while True:
            await self._arrived.wait()
            while self._queue:
                await self._write(self._queue.take(BATCH_ROWS))
            self._arrived.clear()  # only now: after a failure it goes on with what is left
            self._idle.set()

    async def _write(self, rows: Sequence[Point | LogRecord]) -> None:
        points = [row for row in rows if isinstance(row, Point)]
        lines = [row for row in rows if isinstance(row, LogRecord)]
        try:
            written = await self._insisting(points, lines)
        except Exception as error:
            # Nobody waits for this batch, and the next must not wait for it: it is gone.
            self._lost += len(rows)
            log.error("telemetry.rows_lost", rows=len(rows), error=str(error))
            if isinstance(error, Away):  # at the end: what is left would fare no better
                self._lost += len(self._queue.take(len(self._queue)))
        else:
            self._written += written.rows
            self.news.note(rows)
            self._ignored += written.ignored
            self._over_quota += written.over_quota
            self._evicted += written.evicted
            self._batches += 1
            for notice in written.notices:
                self._tell(notice)

    async def _insisting(self, points: Sequence[Point], lines: Sequence[LogRecord]) -> Written:
        """Write a batch; as long as the database is away, try again. Meanwhile the queue fills up."""
        while True:
            try:
                return await self._engine.write(points, lines)
            except Away as error:
                if self._closing.is_set():
                    raise
                self._retried += 1
                log.warning("telemetry.away", queued=len(self._queue), error=error.message)
            closing = asyncio.ensure_future(self._closing.wait())
            pause = asyncio.ensure_future(self._clock.sleep(AGAIN_SECONDS))
            try:
                await asyncio.wait([closing, pause], return_when=asyncio.FIRST_COMPLETED)
            finally:
                closing.cancel()
                pause.cancel()

    def _tell(self, notice: QuotaNotice) -> None:
        """Warn of a quota that is near or hit, each once an hour."""
        now = self._clock.monotonic()
        key = (notice.quota, notice.scope, notice.source if notice.quota == "source" else "", notice.hit)
        if now < self._told.get(key, 0.0):
            return
        if len(self._told) >= TOLD_LIMIT:
            self._told.clear()
        self._told[key] = now + TELL_AGAIN_SECONDS
        log.warning(
            "telemetry.quota_hit" if notice.hit else "telemetry.quota_near",
            quota=notice.quota,
            scope=notice.scope,
            source=notice.source,
            used=notice.used,
            limit=notice.limit,
        )

    # Retention.

    async def sweep(self) -> int:
        """Delete what is too old or too much; how many rows that was."""
        expired = 0
        async with aclosing(self._engine.sweep(now_ns=self._clock.now_ns())) as slices:
            async for rows in slices:
                expired += rows
                self._expired += rows
        self._used_bytes = await self._engine.used_bytes()
        return expired

    async def sweeping(self) -> None:
        """Sweep now and then, until cancelled; for whoever opened it without `sweeps`."""
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            try:
                await self.sweep()
            except FleetplaneError as error:  # tried again at the next turn
                log.error("telemetry.sweep_failed", error=error.message)

    # Asking.

    async def latest(
        self,
        scope: str,
        series: str,
        *,
        from_ns: int,
        to_ns: int,
        sources: Collection[str] | None = None,
        count: int = 1,
    ) -> Mapping[str, Sequence[Sample]]:
        """By source, its last points in a stretch, newest first; without sources that have none."""
        return await self._ask(
            lambda engine: engine.latest(scope, series, sources, from_ns=from_ns, to_ns=to_ns, count=count)
        )

    async def growth(
        self, scope: str, series: str, *, from_ns: int, to_ns: int, sources: Collection[str] | None = None
    ) -> Mapping[str, float]:
        """By source, how much its counter grew in a stretch, over all restarts.

        What it stood at when it was first seen is not growth: nobody knows since when.
        """
        return await self._ask(
            lambda engine: engine.growth(
                scope, series, sources, from_ns=from_ns, to_ns=to_ns, lookback_ns=LOOKBACK_NS
            )
        )

    async def buckets(
        self,
        scope: str,
        series: str,
        *,
        from_ns: int,
        to_ns: int,
        width_ns: int,
        sources: Collection[str] | None = None,
    ) -> Sequence[PointBucket]:
        """The points of all these sources, in stretches of equal length from `from_ns` on."""
        return await self._ask(
            lambda engine: engine.buckets(
                scope, series, sources, from_ns=from_ns, to_ns=to_ns, width_ns=width_ns
            )
        )

    async def summaries(
        self, scope: str, stream: str, *, from_ns: int, to_ns: int, step_seconds: int = 0
    ) -> Sequence[FoundSummary]:
        """What lines came to, in stretches of up to `step_seconds`, wider where they are old."""
        return await self._ask(
            lambda engine: engine.summaries(
                scope, stream, from_ns=from_ns, to_ns=to_ns, step_seconds=step_seconds
            )
        )

    async def lines(self, query: LineQuery) -> LinePage:
        return await self._ask(lambda engine: engine.lines(query))

    async def _ask(self, question: Callable[[TelemetryEngine], Awaitable[T]]) -> T:
        if self._closing.is_set() or self._asking >= QUESTIONS_LIMIT:
            raise Unavailable("too many telemetry queries are waiting", retry_after_seconds=1.0)
        self._asking += 1
        try:
            return await question(self._engine)
        finally:
            self._asking -= 1

    @property
    def elsewhere(self) -> int:
        """Another whenever points or lines were written by whichever server shares the database."""
        return self._engine.stamp

    def statistics(self) -> TelemetryStatistics:
        return TelemetryStatistics(
            queued=len(self._queue),
            written=self._written,
            batches=self._batches,
            refused=self._refused,
            unsound=self._unsound,
            ignored=self._ignored,
            over_quota=self._over_quota,
            evicted=self._evicted,
            retried=self._retried,
            lost=self._lost,
            expired=self._expired,
            series=self._engine.series,
            used_bytes=self._used_bytes,
        )


async def _engine(path: Path, url: str, limits: TelemetryLimits, *, only_reads: bool) -> TelemetryEngine:
    if not url:
        return await SqliteTelemetry.open(path, limits)
    from fleetplane.kernel.telemetry.postgres.engine import PostgresTelemetry

    return await PostgresTelemetry.open(url, limits, only_reads=only_reads)


GAUGES = frozenset({"queued", "series", "used_bytes"})
"""All other numbers only grow."""


class TelemetryCollector(Collector):
    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterator[Metric]:
        numbers = self._telemetry.statistics()
        for field in fields(TelemetryStatistics):
            name, value = f"fleetplane_telemetry_{field.name}", float(getattr(numbers, field.name))
            text = field.name.replace("_", " ").capitalize()
            family = GaugeMetricFamily if field.name in GAUGES else CounterMetricFamily
            yield family(name, text, value)
