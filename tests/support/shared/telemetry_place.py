"""Where telemetry of a test lies: a file, or a database of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetplane.kernel.clock import Clock, SystemClock
from fleetplane.kernel.telemetry import LineQuery, LogRecord, Point, Telemetry, TelemetryLimits
from fleetplane.sim.clock import VirtualClock

SECOND = 1_000_000_000
DAY = 86_400 * SECOND
NOW = VirtualClock().now_ns()


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryPlace:
    path: Path
    url: str = ""

    @asynccontextmanager
    async def opened(
        self, clock: Clock | None = None, *, only_reads: bool = False, **limits: Any
    ) -> AsyncIterator[Telemetry]:
        async with Telemetry.open(
            self.path,
            clock or VirtualClock(),
            limits=TelemetryLimits(**limits),
            url=self.url,
            only_reads=only_reads,
        ) as telemetry:
            yield telemetry


def point(value: float, *, at: float = 0, **about: Any) -> Point:
    given = {"scope": "org/a", "series": "load", "source": "one", **about}
    return Point(at_ns=NOW + round(at * SECOND), value=value, **given)


def line(number: int, *, at: float = 0, **about: Any) -> LogRecord:
    given = {"scope": "org/a", "stream": "access", "source": "one", "body": b"%d" % number, **about}
    return LogRecord(
        at_ns=NOW + round(at * SECOND), identity=given.pop("identity", f"line-{number}"), **given
    )


def asked(**about: Any) -> LineQuery:
    given = {"scope": "org/a", "stream": "access", "limit": 100, "from_ns": 0, "to_ns": NOW + DAY, **about}
    return LineQuery(**given)


async def bodies(telemetry: Telemetry, **about: Any) -> list[int]:
    await telemetry.flush()
    return [int(found.body) for found in (await telemetry.lines(asked(**about))).lines]


async def measure(path: Path, url: str = "") -> None:
    """What a server leaves that has measured something twice, now."""
    now_ns = SystemClock().now_ns()
    async with Telemetry.open(path, SystemClock(), url=url) as telemetry:
        later = (now_ns - NOW) / SECOND
        telemetry.offer(points=[point(1, at=later - 2), point(2, at=later - 1)])


async def measured(path: Path, url: str = "") -> dict[str, float]:
    async with Telemetry.open(path, SystemClock(), url=url, only_reads=bool(url)) as telemetry:
        found = await telemetry.latest("org/a", "load", from_ns=0, to_ns=SystemClock().now_ns())
        return {source: samples[0].value for source, samples in found.items()}
