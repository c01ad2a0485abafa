"""The contract of a telemetry engine: write batches, delete old rows, answer queries.

`Telemetry` holds the queue, the counters and the tasks; an engine holds the rows. Both engines (`sqlite/`,
`postgres/`) pass one contract test and share the checks of queries and the form of rows defined here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fleetplane.kernel.errors import InvalidArgument, Unavailable
from fleetplane.kernel.telemetry.series_quota import QuotaNotice
from fleetplane.kernel.telemetry.summaries import FoundSummary, Summarizer
from fleetplane.kernel.telemetry.values import (
    BUCKETS_LIMIT,
    MOMENT_LIMIT_NS,
    PAGE_LIMIT,
    LinePage,
    LineQuery,
    LogRecord,
    Point,
    PointBucket,
    Sample,
)

_CURSOR = re.compile(r"([0-9]{1,19})\.([0-9]{1,19})")
NEWEST_MARK = (1 << 63) - 1


def moment(at_ns: int) -> int:
    """Within what the database can count; nothing lies outside."""
    return min(max(at_ns, 0), MOMENT_LIMIT_NS)


def check_buckets(from_ns: int, to_ns: int, width_ns: int) -> None:
    if width_ns < 1 or (to_ns - from_ns) / width_ns > BUCKETS_LIMIT:
        raise InvalidArgument(f"not between 1 and {BUCKETS_LIMIT} buckets")


def page_start(query: LineQuery) -> tuple[int, int]:
    """Moment and mark of the line before which the page begins."""
    if not 1 <= query.limit <= PAGE_LIMIT:
        raise InvalidArgument(f"must be between 1 and {PAGE_LIMIT}", field="limit")
    if not query.cursor:
        return moment(query.to_ns), NEWEST_MARK
    found = _CURSOR.fullmatch(query.cursor)
    if found is None or int(found[1]) > MOMENT_LIMIT_NS or int(found[2]) > NEWEST_MARK:
        raise InvalidArgument("is not a cursor of this list", field="cursor")
    return int(found[1]), int(found[2])


@dataclass(slots=True)
class SeriesState:
    """Where a series stands: the last point written, and what its counter had lost to restarts."""

    id: int
    at_ns: int = -1
    value: float = 0.0
    base: float = 0.0

    def take(self, point: Point) -> tuple[int, int, float, float] | None:
        """The row of the next point; None if between which restarts it belongs can no longer be told."""
        if point.counter:
            if point.at_ns <= self.at_ns:
                return None
            if point.value < self.value:
                self.base += self.value
        self.at_ns, self.value = max(point.at_ns, self.at_ns), point.value
        return (self.id, point.at_ns, point.value, self.base)


def marks(source: str, lines: Sequence[LogRecord]) -> Iterator[int]:
    """A number for each line, made of who sent it and of its identity; its sequence, if any, comes first."""
    begun = hashlib.blake2b(f"{source}\0".encode(), digest_size=8)
    for line in lines:
        mark = begun.copy()
        mark.update(line.identity.encode())
        hashed = int.from_bytes(mark.digest(), "big") >> 1  # what is left fits a database's integers
        # 40 bits of the sequence, and as many of the hash as there is room for.
        yield line.sequence % (1 << 40) << 23 | hashed >> 40 if line.sequence else hashed


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
