"""REST: how boards are, now and over time, and what they log."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from fleetplane.domains.boards.access import READ
from fleetplane.domains.boards.calls.channels import CallOrigin, asked_by
from fleetplane.domains.boards.inventory.boards import Boards, status_of
from fleetplane.domains.boards.kinds import number_of
from fleetplane.domains.boards.logs.relay import TAIL_LIMIT, LogsRelay
from fleetplane.domains.boards.metrics import history as samples
from fleetplane.domains.boards.metrics.history import MetricsHistory
from fleetplane.domains.boards.rest.common import PAGE_LIMIT, BoardCall, flag, number_in, page_in, spelled_as
from fleetplane.domains.boards.rest.shapes.telemetry import (
    AgentHealth,
    AgentHealthData,
    FleetMetrics,
    LatestValue,
    LatestValues,
    NodeLatest,
    NodeMetrics,
    OriginalData,
    OriginalReading,
    SeriesPoint,
    SystemData,
    SystemReading,
)
from fleetplane.domains.boards.wire import message_json as wire_json
from fleetplane.fleet.figures import Stretch
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument
from fleetplane.kernel.telemetry import Sample
from fleetplane.kernel.values.times import NS, spelled
from fleetplane.kernel.values.timestamps import timestamp
from fleetplane.web.rest.bodies import parsed
from fleetplane.web.rest.pages import whole_number
from fleetplane.web.rest.routes import Answer, Query, Route, RouteGroup, Stream
from fleetplane.web.streaming import EVENT_STREAM, event

HOUR_NS = 3600 * NS
TAIL = 100
STEP_LIMIT_SECONDS = 86_400
_ONE = "/nodes/{id}"
_ROUTES = RouteGroup("Telemetry")
_LEVELS = {name.lower(): name for name in pb.LogEntry.LogLevel.keys() if name != "UNSPECIFIED"}  # noqa: SIM118
_LOG_QUERY: Sequence[Query] = (
    Query(name="follow", summary="Keep the stream open for new entries", kind="boolean"),
    Query(
        name="tail",
        summary="Number of earlier entries to begin with",
        kind="integer",
        default=TAIL,
        low=0,
        high=TAIL_LIMIT,
    ),
    Query(name="level", summary="Minimum severity", choices=tuple(_LEVELS)),
    Query(name="unit", summary="Only of this systemd unit", many=True),
    Query(name="source", summary="journal, kernel, agent or file:NAME", many=True),
    Query(name="contains", summary="Only with this text, ignoring case"),
    Query(name="regex", summary="Only matching this regular expression"),
    Query(name="since", summary="Start of the range, inclusive", kind="date-time"),
    Query(name="until", summary="End of the range, exclusive", kind="date-time"),
    Query(name="cursor", summary="Resume after this entry; same as Last-Event-ID"),
    Query(name="boot", summary="Only of this boot", kind="boolean"),
)


class TelemetryRoutes:
    def __init__(self, *, boards: Boards, history: MetricsHistory, logs: LogsRelay, clock: Clock) -> None:
        self._boards = boards
        self._history = history
        self._logs = logs
        self._clock = clock

    def routes(self) -> Sequence[Route]:
        return (
            _ROUTES.get(f"{_ONE}/system", self.system, READ, answer=SystemData),
            _ROUTES.get(f"{_ONE}/health", self.health, READ),
            _ROUTES.get(
                f"{_ONE}/metrics",
                self.metrics,
                READ,
                query=(
                    Query(
                        name="series",
                        summary="Name of the series, such as cpu_usage, temperature or disk_usage",
                    ),
                    Query(
                        name="from",
                        summary="Start of the range, inclusive; one hour ago when absent",
                        kind="date-time",
                    ),
                    Query(
                        name="to", summary="End of the range, exclusive; now when absent", kind="date-time"
                    ),
                    Query(
                        name="step",
                        summary="Seconds per point",
                        kind="integer",
                        low=1,
                        high=STEP_LIMIT_SECONDS,
                    ),
                ),
            ),
            _ROUTES.get(
                "/metrics",
                self.fleet,
                READ,
                query=(
                    Query(name="limit", summary="Maximum number of boards", kind="integer", high=PAGE_LIMIT),
                    Query(name="offset", summary="Number of boards to skip", kind="integer"),
                ),
            ),
            _ROUTES.get(f"{_ONE}/logs", self.logs, READ, streams=True, query=_LOG_QUERY),
        )

    # Now.

    async def system(self, call: BoardCall) -> Answer[SystemData | OriginalData]:
        """Get a board's metrics now."""
        number, asked = number_in(call), asked_by(call.caller.principal)
        board = self._boards.require(number)
        about: dict[str, object] = {"node_id": number, "hostname": board.spec.node_name or board.spec.name}
        if status_of(board).speaks_original:
            nested = await self._history.nested(number, asked=asked)
            now_ns = self._clock.now_ns()
            gauges = samples.of_nested(nested, at_ns=now_ns).gauges
            about |= {name: wire_json.json_number(gauges[name]) for name in samples.FLAT if name in gauges}
            told = spelled_as(nested, OriginalReading, **about, timestamp=spelled(now_ns))
            return Answer(content=OriginalData(data=told))
        flat = await self._history.flat(number, asked=asked)
        about = {**wire_json.plain(flat), **about, "timestamp": spelled(self._clock.now_ns())}
        return Answer(content=SystemData(data=spelled_as(flat.detail, SystemReading, **about)))

    async def health(self, call: BoardCall) -> Answer[AgentHealthData]:
        """Get the health that a board's agent reports."""
        number = number_in(call)
        told = await self._history.health(number, asked=asked_by(call.caller.principal))
        return Answer(content=AgentHealthData(data=spelled_as(told, AgentHealth, node_id=number)))

    # Over time.

    async def metrics(self, call: BoardCall) -> Answer[NodeMetrics]:
        """Get a board's latest metrics, or one series over time."""
        number = number_in(call)
        self._boards.require(number)
        series = call.query.get("series")
        if series is None:
            latest = (await self._history.latest([number])).get(number, {})
            return Answer(content=NodeMetrics(node_id=number, data=LatestValues(**_latest(latest))))
        stretch = self._stretch(call)
        points = [
            SeriesPoint(
                timestamp=spelled(one.at_ns),
                average=one.average,
                min=one.lowest,
                max=one.highest,
                count=one.count,
            )
            for one in await self._history.over([number], series, stretch)
        ]
        return Answer(
            content=NodeMetrics(
                node_id=number,
                series=series,
                step_seconds=stretch.width_ns() / NS,
                points=points,
                count=len(points),
            )
        )

    def _stretch(self, call: BoardCall) -> Stretch:
        to_ns = _moment(call, "to", self._clock.now_ns())
        step = whole_number(call, "step", default=0, low=1, high=STEP_LIMIT_SECONDS)
        return Stretch(from_ns=_moment(call, "from", to_ns - HOUR_NS), to_ns=to_ns, step_seconds=step)

    async def fleet(self, call: BoardCall) -> Answer[FleetMetrics]:
        """List the latest metrics of all boards."""
        found = self._boards.all()
        page = page_in(call)
        numbers = [number_of(board) for board in page.of(found)]
        latest = await self._history.latest(numbers) if numbers else {}
        data = [NodeLatest(node_id=number, **_latest(latest.get(number, {}))) for number in numbers]
        return Answer(
            content=FleetMetrics(
                data=data,
                series=list(samples.FLAT),
                total=len(found),
                limit=page.limit,
                offset=page.offset,
            )
        )

    # Logs.

    async def logs(self, call: BoardCall) -> Stream:
        """Read or follow a board's logs as server-sent events."""
        number = number_in(call)
        self._boards.require(number)
        asked = asked_by(call.caller.principal)
        wanted = _filter(call, now_ns=self._clock.now_ns())
        return Stream(chunks=self._entries(number, wanted, asked), content_type=EVENT_STREAM)

    async def _entries(self, number: int, wanted: pb.LogFilter, asked: CallOrigin) -> AsyncGenerator[bytes]:
        """Log entries as server-sent events. An error becomes an event: the response has begun already."""
        try:
            async with aclosing(self._logs.read(number, wanted, asked=asked)) as entries:
                async for entry in entries:
                    if entry.message or entry.dropped:  # the rest are signs of life
                        yield event("entry", wire_json.plain(entry), mark=_mark(entry.cursor))
        except FleetplaneError as error:
            told = {"message": error.message, "reason": error.reason, "status": error.http_status}
            yield event("error", told)
            return
        yield event("end", {})


def _latest(found: Mapping[str, Sample]) -> dict[str, LatestValue]:
    return {
        name: LatestValue(value=wire_json.json_number(one.value), timestamp=spelled(one.at_ns))
        for name, one in found.items()
    }


def _moment(call: BoardCall, name: str, default: int) -> int:
    text = call.query.get(name)
    return default if text is None else parsed(text, field=name)


def _mark(cursor: str) -> str:
    """A cursor as the id of an event, which is one line."""
    return cursor if cursor.isprintable() else ""


def _filter(call: BoardCall, *, now_ns: int) -> pb.LogFilter:
    level = call.query.get("level")
    if level is not None and level not in _LEVELS:
        raise InvalidArgument(f"is not one of {', '.join(_LEVELS)}", field="level")
    since, until = (
        parsed(call.query[name], field=name) if name in call.query else None for name in ("since", "until")
    )
    tail = whole_number(call, "tail", default=TAIL, low=0, high=TAIL_LIMIT)
    if not tail and since is None:  # to a board, 0 is nothing said: what is meant is nothing from before
        since = now_ns
    return pb.LogFilter(
        min_level=_LEVELS[level] if level is not None else None,
        units=call.many["unit"],
        sources=call.many["source"],
        contains=call.query.get("contains", ""),
        regex=call.query.get("regex", ""),
        since=timestamp(since),
        until=timestamp(until),
        tail_lines=tail,
        follow=flag(call, "follow"),
        cursor=call.query.get("cursor") or call.headers.get("last-event-id") or "",
        current_boot_only=flag(call, "boot"),
    )
