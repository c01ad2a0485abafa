"""Figures of objects: what may be measured of a kind, how it is taken, and how it is read again over time.

A kind lists its measures; nothing else is taken, and no value that cannot be. The moment of a figure is when
it came: clocks of agents may be anything. The latest are in memory; those of before are in telemetry, bounded
by its retention, under the scope and the name of the stored object, so that nobody's are mixed up.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.telemetry import Point, PointBucket, Telemetry
from fleetplane.kernel.telemetry.values import BUCKETS_LIMIT
from fleetplane.kernel.values.times import NS

FRESH_NS: Final = 300 * NS
"""How old a last figure may be to stand for now: five reports of a minute."""
EVERY_NS: Final = 4 * NS
"""Between two figures of one object that are kept: of one that reports more often, the others are left out.
In a month of 4 s one measure of one object takes some 30 MB; agents of ours report every 30 s."""
BUCKETS_USUAL: Final = 300
OBJECTS_LIMIT: Final = 50_000
"""Whose latest figures are in memory, about 1 KB each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One thing that is measured of the objects of a kind."""

    name: str
    """With the unit last: `cpuPercent`."""
    title: str
    """Of its chart."""
    unit: str
    """As it stands behind a value: `%`, `°C`."""
    most: float
    """A larger value is no measurement."""
    least: float = 0.0
    high: float | None = None
    """From where a value is worth a look."""

    def takes(self, value: float) -> bool:
        """Whether a value can be: a number, and within what is possible."""
        return math.isfinite(value) and self.least <= value <= self.most

    @property
    def full(self) -> float | None:
        """The end of a chart's scale, where that is known: of shares."""
        return self.most if self.unit == "%" else None


CPU: Final = Measure(name="cpuPercent", title="Processor", unit="%", most=100.0, high=90.0)
MEMORY: Final = Measure(name="memoryPercent", title="Memory", unit="%", most=100.0, high=90.0)
DISK: Final = Measure(name="diskPercent", title="Disk", unit="%", most=100.0, high=90.0)
LOAD: Final = Measure(name="loadAverage", title="Load of a minute", unit="", most=1_000_000.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured of one object lately."""

    at_ns: int
    """Of the latest."""
    values: Mapping[str, float]
    """By name, with the unit last: `cpuPercent`, `requestsPerSecond`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """From `from_ns` inclusive to `to_ns` exclusive, in steps; 0 for as wide as gives a usual chart."""

    from_ns: int
    to_ns: int
    step_seconds: float = 0.0

    def width_ns(self) -> int:
        """Of a step; raises `InvalidArgument`."""
        if not 0 <= self.from_ns < self.to_ns:
            raise InvalidArgument("from must be before to", field="from")
        if self.step_seconds < 0:
            raise InvalidArgument("step must not be negative", field="step")
        span = self.to_ns - self.from_ns
        width = round(self.step_seconds * NS) or max(span // BUCKETS_USUAL, NS)
        if span / width > BUCKETS_LIMIT:
            raise InvalidArgument(f"more than {BUCKETS_LIMIT} steps: take wider ones", field="step")
        return width


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSeries:
    """One measure of one object over time; steps without points are left out."""

    measure: Measure
    buckets: Sequence[PointBucket]


class FigureKeeper:
    """The figures of the objects of one kind."""

    def __init__(
        self, telemetry: Telemetry | None, clock: Clock, *, prefix: str, measures: Sequence[Measure]
    ) -> None:
        """`prefix` is what its series begin with: objects of two kinds may have the same scope and name."""
        self._telemetry = telemetry
        self._clock = clock
        self._prefix = prefix
        self._measures = {one.name: one for one in measures}
        self._latest: OrderedDict[tuple[str, str], Figures] = OrderedDict()
        self.refused = 0
        """Values that nobody asked for, or that cannot be."""

    def __repr__(self) -> str:
        return f"<FigureKeeper {self._prefix} objects={len(self._latest)} refused={self.refused}>"

    def take(self, scope: str, name: str, values: Mapping[str, float | None]) -> None:
        """What was measured of one object now; what is None was not. Never raises, never waits."""
        sound: dict[str, float] = {}
        for key, value in values.items():
            measure = self._measures.get(key)
            if value is None:
                continue
            if measure is None or not measure.takes(value):
                self.refused += 1
                continue
            sound[key] = float(value)
        now_ns = self._clock.now_ns()
        before = self._latest.get((scope, name))
        if not sound or (before is not None and 0 <= now_ns - before.at_ns < EVERY_NS):
            return
        self._latest[scope, name] = Figures(at_ns=now_ns, values=sound)
        self._latest.move_to_end((scope, name))
        self._forget(now_ns)
        if self._telemetry is not None:
            self._telemetry.offer(
                points=[
                    Point(scope=scope, series=self._series(key), source=name, at_ns=now_ns, value=value)
                    for key, value in sound.items()
                ]
            )

    def latest(self, objects: Sequence[AnyResource]) -> Mapping[str, Figures]:
        """By stored name, of objects of one scope that were heard of lately."""
        oldest_ns = self._clock.now_ns() - FRESH_NS
        found = {one.name: self._latest.get((one.scope, one.name)) for one in objects}
        return {name: one for name, one in found.items() if one is not None and one.at_ns >= oldest_ns}

    async def history(self, stored: AnyResource, stretch: Stretch) -> Sequence[MeasuredSeries]:
        """Every measure of one object that has points in a stretch."""
        width_ns = stretch.width_ns()
        if self._telemetry is None:
            return ()
        found = []
        for measure in self._measures.values():
            buckets = await self._telemetry.buckets(
                stored.scope,
                self._series(measure.name),
                from_ns=stretch.from_ns,
                to_ns=stretch.to_ns,
                width_ns=width_ns,
                sources=[stored.name],
            )
            if buckets:
                found.append(MeasuredSeries(measure=measure, buckets=buckets))
        return found

    def _series(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _forget(self, now_ns: int) -> None:
        """Those that fell silent, which stand first."""
        while self._latest:
            first = next(iter(self._latest))
            if len(self._latest) <= OBJECTS_LIMIT and self._latest[first].at_ns >= now_ns - FRESH_NS:
                return
            del self._latest[first]


class KeepsFigures(Protocol):
    """A running domain with figures of one kind."""

    @property
    def figures(self) -> FigureKeeper: ...


async def kept_figures(domain: KeepsFigures, objects: Sequence[AnyResource]) -> Mapping[str, Figures]:
    """`figures` of a declaration, for such a domain."""
    return domain.figures.latest(objects)


async def kept_history(
    domain: KeepsFigures, stored: AnyResource, stretch: Stretch
) -> Sequence[MeasuredSeries]:
    """`history` of a declaration, for such a domain."""
    return await domain.figures.history(stored, stretch)
