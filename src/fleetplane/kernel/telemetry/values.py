"""What is kept over time, how it is asked for, and the bounds of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

DAY_SECONDS = 86_400.0
MOMENT_LIMIT_NS = 1 << 62
"""The year 2116: beyond it a clock is broken, and the database's integers end not far behind."""
LINE_LIMIT_BYTES = 64 * 1024
BUCKETS_LIMIT = 10_000
"""A week by the minute."""
PAGE_LIMIT = 1_000
NAMES_LIMIT = 600
"""Characters of scope, series or stream, and source together: a database's index takes some 2,700 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A number at a moment, of one series of one source."""

    scope: str
    series: str
    source: str
    at_ns: int
    value: float
    counter: bool = False
    """A value that only grows, until its source restarts from zero."""

    @property
    def is_sound(self) -> bool:
        return (
            0 <= self.at_ns < MOMENT_LIMIT_NS
            and math.isfinite(self.value)
            and len(self.scope) + len(self.series) + len(self.source) <= NAMES_LIMIT
        )


class LogRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Something that happened: a document, and the few fields by which it can be found.

    Tens of thousands are made in a second, which is why it is no dataclass.
    """

    scope: str
    stream: str
    source: str
    at_ns: int
    identity: str
    """The same whenever the same line is sent: it is kept once."""
    body: bytes
    sequence: int = 0
    """Which of several of one moment comes first; 0 where nobody knows. The same whenever it is sent."""
    code: int = 0
    """What it came to, such as a status."""
    subject: str = ""
    """What it was about, such as a host."""
    action: str = ""
    """What was done, such as a method."""
    detail: tuple[str, ...] = ()
    """For whoever sums lines up, see `summaries`; not kept."""

    @property
    def is_sound(self) -> bool:
        return (
            0 <= self.at_ns < MOMENT_LIMIT_NS
            and 0 <= self.code < MOMENT_LIMIT_NS
            and len(self.body) <= LINE_LIMIT_BYTES
            and len(self.scope) + len(self.stream) + len(self.source) <= NAMES_LIMIT
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A point, without the names of its series. Of a counter: what it would be without restarts."""

    at_ns: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PointBucket:
    """The points of a stretch of time, whatever their source; stretches without points are left out."""

    at_ns: int
    """Where it begins."""
    count: int
    total: float
    lowest: float
    highest: float

    @property
    def average(self) -> float:
        return self.total / self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class LineQuery:
    """From `from_ns` inclusive to `to_ns` exclusive, newest first; an empty text asks for any."""

    scope: str
    stream: str
    from_ns: int
    to_ns: int
    limit: int
    code_low: int = 0
    code_high: int = MOMENT_LIMIT_NS
    source: str = ""
    subject: str = ""
    action: str = ""
    cursor: str = ""
    """Of the page before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLine:
    source: str
    at_ns: int
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePage:
    lines: Sequence[FoundLine]
    total: int
    """Of all matches, whatever the limit."""
    cursor: str
    """Where to go on; empty at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryLimits:
    points_age_seconds: float = 35 * DAY_SECONDS
    """A month can be looked at on its last day."""
    lines_age_seconds: float = 8 * DAY_SECONDS
    size_bytes: int = 8 * 1024**3
    """Of what is in the file. About 20 million log lines of 400 bytes."""
    queue_rows: int = 100_000
    """Waiting to be written: two seconds of what one core can write."""
    queue_bytes: int = 64 * 1024**2
    series: int = 200_000
    """Twenty for each of 10,000 sources. Then the source with the most gives way to one with fewer."""
    tenant_series: int = 150_000
    """Of one tenant, such as one organisation, or all boards."""
    source_series: int = 1_000
    """Of one source, such as one board: about ten times what one with sixteen disks and interfaces has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryStatistics:
    queued: int
    written: int
    batches: int
    refused: int
    """Rows not taken, because the queue was full: their sender was told."""
    unsound: int
    """Rows no one could make sense of: not a number, from the far future, too long."""
    ignored: int
    """Rows that were known already, or came too late to be counted in order."""
    over_quota: int
    """Points of new series that their source, tenant or the server had no room for."""
    evicted: int
    """Series that gave way to those of somebody who had fewer."""
    retried: int
    """Attempts to write a batch that failed because the database was away; the batch waits."""
    lost: int
    """Rows taken and not written: the database failed."""
    expired: int
    """Rows deleted for their age, or to make room; or that were too old when they came."""
    series: int
    used_bytes: int
