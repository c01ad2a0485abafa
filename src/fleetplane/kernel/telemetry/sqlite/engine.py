"""Telemetry in a file: one thread writes, others read beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Self, TypeVar

from fleetplane.kernel.telemetry.engine import Written
from fleetplane.kernel.telemetry.sqlite import database
from fleetplane.kernel.telemetry.sqlite.reading import SqliteSeriesReader
from fleetplane.kernel.telemetry.sqlite.writing import SqliteSeriesWriter
from fleetplane.kernel.telemetry.summaries import FoundSummary, Summarizer
from fleetplane.kernel.telemetry.values import (
    LinePage,
    LineQuery,
    LogRecord,
    Point,
    PointBucket,
    Sample,
    TelemetryLimits,
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
