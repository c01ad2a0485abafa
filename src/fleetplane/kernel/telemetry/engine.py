"""What a place for telemetry must do: write batches, delete what is old, answer questions.

`Telemetry` holds the queue, the numbers and the tasks; an engine holds the rows. One contract
test is for both engines (`sqlite/`, `postgres/`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fleetplane.kernel.errors import Unavailable
from fleetplane.kernel.telemetry.series_quota import QuotaNotice
from fleetplane.kernel.telemetry.summaries import FoundSummary, Summarizer
from fleetplane.kernel.telemetry.values import LinePage, LineQuery, LogRecord, Point, PointBucket, Sample


class Away(Unavailable):
    """The database cannot be reached or is too slow: the same batch may be written later.

    Whether it was written already does not matter: a row that is written twice is kept once.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    rows: int
    ignored: int
    over_quota: int = 0
    evicted: int = 0
    notices: Sequence[QuotaNotice] = ()


class TelemetryEngine(Protocol):
    """Called by one event loop. `write` and `sweep` are not called at the same time by two tasks each."""

    @property
    def summarizers(self) -> dict[str, Summarizer]:
        """By stream."""

    @property
    def series(self) -> int: ...

    @property
    def stamp(self) -> int:
        """Another whenever some server has written; always 0 where nobody else can."""

    async def write(self, points: Sequence[Point], lines: Sequence[LogRecord]) -> Written:
        """All of it, or nothing and an error; `Away` if it is worth another try."""

    def sweep(self, *, now_ns: int) -> AsyncGenerator[int, None]:
        """Delete what is too old, then what is too much; yields the rows of each slice."""

    async def used_bytes(self) -> int: ...

    async def latest(
        self,
        scope: str,
        series: str,
        sources: Collection[str] | None,
        *,
        from_ns: int,
        to_ns: int,
        count: int,
    ) -> Mapping[str, Sequence[Sample]]: ...

    async def growth(
        self,
        scope: str,
        series: str,
        sources: Collection[str] | None,
        *,
        from_ns: int,
        to_ns: int,
        lookback_ns: int,
    ) -> Mapping[str, float]: ...

    async def buckets(
        self,
        scope: str,
        series: str,
        sources: Collection[str] | None,
        *,
        from_ns: int,
        to_ns: int,
        width_ns: int,
    ) -> Sequence[PointBucket]: ...

    async def summaries(
        self, scope: str, stream: str, *, from_ns: int, to_ns: int, step_seconds: int
    ) -> Sequence[FoundSummary]: ...

    async def lines(self, query: LineQuery) -> LinePage: ...

    async def close(self) -> None: ...
