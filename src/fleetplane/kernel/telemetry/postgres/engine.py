"""Telemetry in PostgreSQL, which several servers write and read at the same time.

Two connections of its own, one that writes and sweeps and one that answers; nothing here knows the store's
lock. A crash of a server costs what was still queued; what was committed is as safe as everything else there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final, Self

from fleetplane.kernel import boundary
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.telemetry.engine import Written
from fleetplane.kernel.telemetry.postgres import schema
from fleetplane.kernel.telemetry.postgres.link import READER, WRITER, PostgresLink
from fleetplane.kernel.telemetry.postgres.reading import Questions
from fleetplane.kernel.telemetry.postgres.sweeping import Sweeper
from fleetplane.kernel.telemetry.postgres.writing import BatchWriter
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
