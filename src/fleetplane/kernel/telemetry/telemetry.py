"""Time series and log lines, stored beside the state.

Takes batches without waiting: they go into a bounded queue, shared fairly between tenants and
sources, and what does not fit is refused and counted. One thread writes; while it writes, what
arrives is gathered into its next batch. Others read beside it. What is taken is written within
moments, not at once: see `database` for what a crash may cost. Knows nothing of what the series and
lines are about.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Self, TypeVar

import structlog

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, Unavailable
from fleetplane.kernel.telemetry import database
from fleetplane.kernel.telemetry.fair_queue import FairQueue
from fleetplane.kernel.telemetry.reading import Reader
from fleetplane.kernel.telemetry.summaries import FoundSummary, Summarizer
from fleetplane.kernel.telemetry.values import (
    Bucket,
    Line,
    LinePage,
    LineQuery,
    Point,
    Sample,
    TelemetryLimits,
    TelemetryStatistics,
)
from fleetplane.kernel.telemetry.writing import Notice, Writer
from fleetplane.kernel.values.times import NS

log = structlog.get_logger(__name__)

READERS = 2
QUESTIONS_LIMIT = 64
"""Waiting for a reader; with a reader's patience, more would wait in vain."""
BATCH_ROWS = 8_000
"""Written at once: some 80 ms, of which the event loop is held up for 3 with their making. Twice as many are
no faster; a quarter costs half as much again, where lines of one moment touch the index everywhere."""
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

    def __init__(self, path: Path, clock: Clock, limits: TelemetryLimits) -> None:
        self._path = path
        self._clock = clock
        self._limits = limits
        self._writer = Writer(path, limits)
        self._readers: SimpleQueue[Reader] = SimpleQueue()
        for _ in range(READERS):
            self._readers.put(Reader(path))
        self._pen = ThreadPoolExecutor(1, "telemetry-write")
        self._eyes = ThreadPoolExecutor(READERS, "telemetry-read")
        self._queue = FairQueue(rows_limit=limits.queue_rows, bytes_limit=limits.queue_bytes)
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._asking = 0
        self._closed = False
        self._written = self._batches = self._refused = self._unsound = 0
        self._ignored = self._lost = self._expired = self._over_quota = self._evicted = 0
        self._told: dict[tuple[str, str, str, bool], float] = {}
        self._used_bytes = self._writer.used_bytes

    def __repr__(self) -> str:
        return f"<Telemetry {self._path} queued={len(self._queue)} written={self._written}>"

    @classmethod
    @asynccontextmanager
    async def open(
        cls, path: Path, clock: Clock, *, limits: TelemetryLimits | None = None
    ) -> AsyncIterator[Self]:
        """What was taken is written before this ends."""
        await asyncio.to_thread(database.prepare, path)
        telemetry = cls(path, clock, limits or TelemetryLimits())
        tasks = [
            asyncio.create_task(telemetry._writing(), name="telemetry/writing"),
            asyncio.create_task(telemetry._sweeping(), name="telemetry/sweeping"),
        ]
        try:
            yield telemetry
        finally:
            telemetry._closed = True
            try:
                await telemetry.flush()
            finally:  # also if whoever opened it was told not to wait
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                await asyncio.to_thread(telemetry._close)

    def _close(self) -> None:
        self._pen.shutdown()
        self._eyes.shutdown()
        self._writer.close()
        while not self._readers.empty():
            self._readers.get().close()

    # Taking.

    def offer(self, *, points: Sequence[Point] = (), lines: Sequence[Line] = ()) -> bool:
        """Take all of these, or none and say so. Never waits, never raises.

        Rows that make no sense are left out: they would make none the next time either.
        """
        count = len(points) + len(lines)
        sound: list[Point | Line] = [point for point in points if point.is_sound]
        sound.extend(line for line in lines if line.is_sound)
        if self._closed or not self._queue.put(sound):
            self._refused += count
            return False
        self._unsound += count - len(sound)
        if sound:
            self._idle.clear()
            self._arrived.set()
        return True

    def has_room(self, scope: str, source: str, *, rows: int, size: int) -> bool:
        """Whether lines of a source would be taken now: to be asked before they are made out of a message."""
        if not self._closed and self._queue.has_room(scope, source, count=rows, size=size):
            return True
        self._refused += rows
        return False

    def summarize(self, summarizer: Summarizer) -> None:
        """Sum up the lines of a stream from now on, however long they themselves are kept."""
        self._writer.summarizers[summarizer.stream] = summarizer

    async def flush(self) -> None:
        """Return when nothing is waiting to be written."""
        await self._idle.wait()

    async def _writing(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._queue:
                await self._write(self._queue.take(BATCH_ROWS))
            self._idle.set()

    async def _write(self, rows: Sequence[Point | Line]) -> None:
        points = [row for row in rows if isinstance(row, Point)]
        lines = [row for row in rows if isinstance(row, Line)]
        try:
            written = await self._in_pen(lambda: self._writer.write(points, lines))
        except Exception as error:
            # Nobody waits for this batch, and the next must not wait for it: it is gone.
            self._lost += len(rows)
            log.error("telemetry.rows_lost", rows=len(rows), error=str(error))
        else:
            self._written += written.rows
            self._ignored += written.ignored
            self._over_quota += written.over_quota
            self._evicted += written.evicted
            self._batches += 1
            for notice in written.notices:
                self._tell(notice)

    def _tell(self, notice: Notice) -> None:
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
        slices = self._writer.sweep(now_ns=self._clock.now_ns())
        expired = 0
        while (rows := await self._in_pen(lambda: next(slices, None))) is not None:
            expired += rows
            self._expired += rows
        self._used_bytes = await self._in_pen(lambda: self._writer.used_bytes)
        return expired

    async def _sweeping(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            try:
                await self.sweep()
            except FleetplaneError as error:  # tried again at the next turn
                log.error("telemetry.sweep_failed", error=error.message)

    async def _in_pen(self, work: Callable[[], T]) -> T:
        def translated() -> T:
            with database.translated(self._path):
                return work()

        return await asyncio.get_running_loop().run_in_executor(self._pen, translated)

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
            lambda reader: reader.latest(scope, series, sources, from_ns=from_ns, to_ns=to_ns, count=count)
        )

    async def growth(
        self, scope: str, series: str, *, from_ns: int, to_ns: int, sources: Collection[str] | None = None
    ) -> Mapping[str, float]:
        """By source, how much its counter grew in a stretch, over all restarts.

        What it stood at when it was first seen is not growth: nobody knows since when.
        """
        return await self._ask(
            lambda reader: reader.growth(
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
    ) -> Sequence[Bucket]:
        """The points of all these sources, in stretches of equal length from `from_ns` on."""
        return await self._ask(
            lambda reader: reader.buckets(
                scope, series, sources, from_ns=from_ns, to_ns=to_ns, width_ns=width_ns
            )
        )

    async def summaries(
        self, scope: str, stream: str, *, from_ns: int, to_ns: int, step_seconds: int = 0
    ) -> Sequence[FoundSummary]:
        """What lines came to, in stretches of up to `step_seconds`, wider where they are old."""
        return await self._ask(
            lambda reader: reader.summaries(
                scope, stream, from_ns=from_ns, to_ns=to_ns, step_seconds=step_seconds
            )
        )

    async def lines(self, query: LineQuery) -> LinePage:
        return await self._ask(lambda reader: reader.lines(query))

    async def _ask(self, question: Callable[[Reader], T]) -> T:
        if self._closed or self._asking >= QUESTIONS_LIMIT:
            raise Unavailable("too many telemetry queries are waiting", retry_after_seconds=1.0)

        def work() -> T:
            reader = self._readers.get()
            try:
                return question(reader)
            finally:
                self._readers.put(reader)

        self._asking += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._eyes, work)
        finally:
            self._asking -= 1

    @property
    def written(self) -> int:
        """How many points and lines were written since we opened."""
        return self._written

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
            lost=self._lost,
            expired=self._expired,
            series=self._writer.series,
            used_bytes=self._used_bytes,
        )
