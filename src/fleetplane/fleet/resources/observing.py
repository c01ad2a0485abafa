"""What objects write down and measure: their logs, as server-sent events, and their figures.

    GET /apis/v1/boards/NAME/logs      entry, then `end`; with `follow`, until the reader leaves; or `error`
    GET /apis/v1/figures/boards        of every object that has some, at and below a scope
    GET /apis/v1/boards/NAME/figures   of one object over time

All of it comes from the domain of the object; nothing of them is stored with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from fleetplane.fleet.figures import Figures, MeasuredSeries, Stretch
from fleetplane.fleet.resources.access import Sight
from fleetplane.fleet.resources.catalogue import FoundObject, ResourceEntry
from fleetplane.fleet.resources.declaration import LogCall, LogQuery, ResourceShape, ViewReader
from fleetplane.fleet.resources.listing import is_seen
from fleetplane.fleet.resources.selection import ObjectSelection
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, NotFound, ResourceExhausted
from fleetplane.kernel.values.times import NS, spelled
from fleetplane.web.rest import bodies
from fleetplane.web.rest.pages import flag, whole_number
from fleetplane.web.rest.routes import Call, Query
from fleetplane.web.streaming import event

TAIL = 100
TAIL_MOST = 10_000
TEXT_LIMIT = 256
"""Characters of a text to look for, and of a source."""
READERS_OF_CALLER = 16
READERS = 512
"""Of logs at once; each costs a task and one line."""
OBJECTS_MOST = 1000
"""Whose figures one answer has: about 200 bytes each."""

STEP_MOST_SECONDS = 31 * 86_400
HOUR_NS = 3600 * NS

LOG_QUERY: Sequence[Query] = (
    Query(name="follow", summary="Go on with lines as they come", kind="boolean"),
    Query(
        name="tail",
        summary="Number of earlier lines to begin with",
        kind="integer",
        default=TAIL,
        low=0,
        high=TAIL_MOST,
    ),
    Query(name="level", summary="Minimum severity, as the object's log names it"),
    Query(name="source", summary="Only of this source, such as a unit, a file, access or error"),
    Query(name="contains", summary="Only with this text, ignoring case"),
)


HISTORY_QUERY: Sequence[Query] = (
    Query(name="from", summary="From when, such as 2026-03-01T00:00:00Z; an hour before the end by default"),
    Query(name="to", summary="Until when; now if not given"),
    Query(
        name="step",
        summary="Seconds of a step; as wide as gives a usual chart if not given",
        kind="integer",
        low=1,
        high=STEP_MOST_SECONDS,
    ),
)


class ObjectFigures(ResourceShape, frozen=True):
    """The latest figures of one object."""

    name: str
    scope: str
    at: str
    values: Mapping[str, float]


class FigureList(ResourceShape, frozen=True):
    kind: str
    items: Sequence[ObjectFigures]


class FigurePoint(ResourceShape, frozen=True):
    """What was measured in one step."""

    at: str
    """Where the step begins."""
    average: float
    lowest: float
    highest: float


class FigureSeries(ResourceShape, frozen=True):
    """One measure over time; steps in which nothing was measured are left out."""

    name: str
    title: str
    unit: str
    """As it stands behind a value."""
    full: float | None
    """The end of the scale, where there is one."""
    high: float | None
    """From where a value is worth a look."""
    points: Sequence[FigurePoint]


class FigureHistory(ResourceShape, frozen=True):
    """The figures of one object over time."""

    kind: str
    name: str
    scope: str
    since: str
    until: str
    step_seconds: float
    series: Sequence[FigureSeries]


def log_query(call: Call[Any]) -> LogQuery:
    """Which lines a request asks for; raises `InvalidArgument`."""
    for name in ("level", "source", "contains"):
        if len(call.query.get(name, "")) > TEXT_LIMIT:
            raise InvalidArgument(f"has at most {TEXT_LIMIT} characters", field=name)
    return LogQuery(
        tail=whole_number(call, "tail", default=TAIL, low=0, high=TAIL_MOST),
        follow=flag(call, "follow") or False,
        level=call.query.get("level", ""),
        source=call.query.get("source", ""),
        contains=call.query.get("contains", ""),
    )


class LogStreams:
    """Logs that are read now, and how many of them one caller may read at once."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<LogStreams open={self._open.total()}>"

    def check_room(self, caller: str) -> None:
        """Refuse one more than is fair."""
        if self._open[caller] >= READERS_OF_CALLER or self._open.total() >= READERS:
            raise ResourceExhausted(
                f"{self._open[caller]} logs are read by {caller}, of {self._open.total()} in all",
                hint="stop reading one of them",
            )

    async def stream(
        self, found: FoundObject, query: LogQuery, look: Callable[[], Sight]
    ) -> AsyncGenerator[bytes]:
        """The events of one reader. `look` says what the caller may see now: no line is told without it."""
        caller, resource = look().caller_name, found.member.resource
        assert resource.logs is not None
        call = LogCall(domain=found.member.running, stored=found.stored, query=query, actor=caller)
        self._open[caller] += 1
        try:
            async with aclosing(resource.logs(call)) as lines:
                async for line in lines:
                    look().check_do(resource.permission, found.called.scope)
                    yield event("entry", msgspec.to_builtins(line))
            yield event("end", {})
        except FleetplaneError as error:  # the answer has begun already
            yield event("error", _problem(error))
        finally:
            self._open[caller] -= 1
            if not self._open[caller]:
                del self._open[caller]


def _problem(error: FleetplaneError) -> dict[str, object]:
    told = {"message": error.message, "reason": error.reason, "status": error.http_status}
    return {**told, "field": error.field} if error.field else told


def readable(found: FoundObject) -> FoundObject:
    """The object, if its domain has a log of it: of one resource, not every domain's objects have one."""
    if found.member.resource.logs is None:
        raise NotFound(f"{found.called.name} has no log")
    return found


async def figures(
    entry: ResourceEntry, reading: ViewReader, scope: str, selection: ObjectSelection, sight: Sight
) -> FigureList:
    """The latest figures of the objects that a caller may see, of those that have any."""
    sight.check_list(entry.permissions, scope)
    told: list[ObjectFigures] = []
    for member in entry.members:
        if member.resource.figures is None:
            continue
        chosen = [
            found
            for found in entry.all(reading)
            if found.member is member
            and is_seen(found, scope, sight)
            and (selection.is_everything or selection.matches(found.shown(reading)))
        ]
        if len(chosen) > OBJECTS_MOST:
            raise InvalidArgument(
                f"{len(chosen)} objects are meant; figures are given of {OBJECTS_MOST} at once",
                field="scope",
                hint="ask for a scope below, or for labels",
            )
        by_scope: dict[str, list[FoundObject]] = {}
        for found in chosen:
            by_scope.setdefault(found.stored.scope, []).append(found)
        for some in by_scope.values():  # names are unique in a scope only
            known = await member.resource.figures(member.running, [found.stored for found in some])
            told += [_shown(found, known[found.stored.name]) for found in some if found.stored.name in known]
    return FigureList(kind="figures", items=told)


def stretch(call: Call[Any], now_ns: int) -> Stretch:
    """The time that a request asks about; raises `InvalidArgument`."""
    to_ns = bodies.parsed(call.query["to"], field="to") if call.query.get("to") else now_ns
    from_ns = bodies.parsed(call.query["from"], field="from") if call.query.get("from") else to_ns - HOUR_NS
    step = whole_number(call, "step", default=0, low=1, high=STEP_MOST_SECONDS)
    asked = Stretch(from_ns=from_ns, to_ns=to_ns, step_seconds=step)
    asked.width_ns()
    return asked


async def history(found: FoundObject, asked: Stretch) -> FigureHistory:
    """What was measured of one object over time."""
    resource = found.member.resource
    if resource.history is None:
        raise NotFound(f"{found.called.name} has no figures over time")
    series = await resource.history(found.member.running, found.stored, asked)
    return FigureHistory(
        kind="figure-history",
        name=found.called.name,
        scope=found.called.scope,
        since=spelled(asked.from_ns),
        until=spelled(asked.to_ns),
        step_seconds=asked.width_ns() / NS,
        series=[_series(one) for one in series],
    )


def _series(one: MeasuredSeries) -> FigureSeries:
    return FigureSeries(
        name=one.measure.name,
        title=one.measure.title,
        unit=one.measure.unit,
        full=one.measure.full,
        high=one.measure.high,
        points=[
            FigurePoint(
                at=spelled(bucket.at_ns),
                average=bucket.average,
                lowest=bucket.lowest,
                highest=bucket.highest,
            )
            for bucket in one.buckets
        ],
    )


def _shown(found: FoundObject, measured: Figures) -> ObjectFigures:
    return ObjectFigures(
        name=found.called.name,
        scope=found.called.scope,
        at=spelled(measured.at_ns),
        values=dict(measured.values),
    )
