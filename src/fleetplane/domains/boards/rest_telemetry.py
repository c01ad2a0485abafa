"""REST: how boards are, now and over time, and what they log."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fleetplane.domains.boards import samples, wire_json
from fleetplane.domains.boards.access import READ
from fleetplane.domains.boards.asking import asked_by
from fleetplane.domains.boards.history import MetricsHistory, Stretch
from fleetplane.domains.boards.kinds import number_of
from fleetplane.domains.boards.logs_relay import TAIL_LIMIT, LogsRelay
from fleetplane.domains.boards.node_link import Asked
from fleetplane.domains.boards.registry import Boards, status_of
from fleetplane.domains.boards.rest import PAGE_LIMIT, BoardCall, Json, flag, number_in, page_in, whole
from fleetplane.domains.boards.wire import moment
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument
from fleetplane.web.routes import Answer, Query, Route, Stream
from fleetplane.web.streaming import EVENT_STREAM, event
from fleetplane.web.times import NS_PER_SECOND, parsed, spelled

HOUR_NS = 3600 * NS_PER_SECOND
TAIL = 100
STEP_LIMIT_SECONDS = 86_400
_ONE = "/nodes/{id}"
_TAG = "Telemetry"
_LEVELS = {name.lower(): name for name in pb.LogEntry.LogLevel.keys() if name != "UNSPECIFIED"}  # noqa: SIM118
_LOG_QUERY: Sequence[Query] = (
    Query(name="follow", summary="Go on with what comes", kind="boolean"),
    Query(name="tail", summary="Lines from before", kind="integer", default=TAIL, low=0, high=TAIL_LIMIT),
    Query(name="level", summary="This level and worse", choices=tuple(_LEVELS)),
    Query(name="unit", summary="Of this unit", many=True),
    Query(name="source", summary="journal, kernel, agent or file:NAME", many=True),
    Query(name="contains", summary="With this text, in any case"),
    Query(name="regex", summary="That this pattern fits"),
    Query(name="since", summary="From then on", kind="date-time"),
    Query(name="until", summary="Before then", kind="date-time"),
    Query(name="cursor", summary="After this entry; Last-Event-ID means the same"),
    Query(name="boot", summary="Of this boot only", kind="boolean"),
)


class TelemetryRoutes:
    def __init__(self, *, boards: Boards, history: MetricsHistory, logs: LogsRelay, clock: Clock) -> None:
        self._boards = boards
        self._history = history
        self._logs = logs
        self._clock = clock

    def routes(self) -> Sequence[Route]:
        return (
            Route(
                method="GET", path=f"{_ONE}/system", handler=self.system, tag=_TAG, permission=READ,
                summary="What a board measures this moment", answer=dict[str, Any],
            ),
            Route(
                method="GET", path=f"{_ONE}/health", handler=self.health, tag=_TAG, permission=READ,
                summary="How a board's agent says that it is", answer=dict[str, Any],
            ),
            Route(
                method="GET", path=f"{_ONE}/metrics", handler=self.metrics, tag=_TAG, permission=READ,
                summary="What a board measured: lately, or one series over time", answer=dict[str, Any],
                query=(
                    Query(name="series", summary="Such as cpu_usage, temperature or disk_usage"),
                    Query(name="from", summary="From then on; an hour ago", kind="date-time"),
                    Query(name="to", summary="Before then; now", kind="date-time"),
                    Query(name="step", summary="Seconds of one point", kind="integer", low=1,
                          high=STEP_LIMIT_SECONDS),
                ),
            ),
            Route(
                method="GET", path="/metrics", handler=self.fleet, tag=_TAG, permission=READ,
                summary="What boards measured lately", answer=dict[str, Any],
                query=(
                    Query(name="limit", summary="Boards at most", kind="integer", high=PAGE_LIMIT),
                    Query(name="offset", summary="Boards to leave out first", kind="integer"),
                ),
            ),
            Route(
                method="GET", path=f"{_ONE}/logs", handler=self.logs, tag=_TAG, permission=READ,
                summary="A board's logs, as server-sent events", streams=True, query=_LOG_QUERY,
            ),
        )  # fmt: skip

    # Now.

    async def system(self, call: BoardCall) -> Answer[Json]:
        number, asked = number_in(call), asked_by(call.caller.principal)
        board = self._boards.require(number)
        more: Json = {}
        if status_of(board).plaintext:
            nested = await self._history.nested(number, asked=asked)
        else:
            flat = await self._history.flat(number, asked=asked)
            nested = flat.detail
            more = {
                name: value
                for name, value in wire_json.plain(flat).items()
                if name not in ("detail", "interfaces")
            }
        about = {"node_id": number, "hostname": board.spec.node_name or board.spec.name}
        told = {**wire_json.plain(nested), **more, **about, "timestamp": spelled(self._clock.now_ns())}
        return Answer(content={"data": told})

    async def health(self, call: BoardCall) -> Answer[Json]:
        number = number_in(call)
        told = await self._history.health(number, asked=asked_by(call.caller.principal))
        return Answer(content={"data": {**wire_json.plain(told), "node_id": number}})

    # Over time.

    async def metrics(self, call: BoardCall) -> Answer[Json]:
        number = number_in(call)
        self._boards.require(number)
        series = call.query.get("series")
        if series is None:
            latest = (await self._history.latest([number])).get(number, {})
            return Answer(content={"node_id": number, "data": _latest(latest)})
        stretch = self._stretch(call)
        points = [
            {
                "timestamp": spelled(one.at_ns),
                "average": one.average,
                "min": one.lowest,
                "max": one.highest,
                "count": one.count,
            }
            for one in await self._history.over([number], series, stretch)
        ]
        told = {"node_id": number, "series": series, "step_seconds": stretch.width_ns() / NS_PER_SECOND}
        return Answer(content={**told, "points": points, "count": len(points)})

    def _stretch(self, call: BoardCall) -> Stretch:
        to_ns = _moment(call, "to", self._clock.now_ns())
        step = whole(call, "step", default=0, low=1, high=STEP_LIMIT_SECONDS)
        return Stretch(from_ns=_moment(call, "from", to_ns - HOUR_NS), to_ns=to_ns, step_seconds=step)

    async def fleet(self, call: BoardCall) -> Answer[Json]:
        found = self._boards.all()
        page = page_in(call)
        numbers = [number_of(board) for board in page.of(found)]
        latest = await self._history.latest(numbers) if numbers else {}
        data = [{"node_id": number, **_latest(latest.get(number, {}))} for number in numbers]
        return Answer(
            content={
                "data": data, "series": list(samples.FLAT), "total": len(found), "limit": page.limit,
                "offset": page.offset,
            }
        )  # fmt: skip

    # Logs.

    async def logs(self, call: BoardCall) -> Stream:
        number = number_in(call)
        self._boards.require(number)
        asked = asked_by(call.caller.principal)
        wanted = _filter(call, now_ns=self._clock.now_ns())
        return Stream(chunks=self._entries(number, wanted, asked), content_type=EVENT_STREAM)

    async def _entries(self, number: int, wanted: pb.LogFilter, asked: Asked) -> AsyncGenerator[bytes]:
        """What goes wrong on the way is told in the stream: its beginning has gone out already."""
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


def _latest(found: Any) -> Json:
    return {name: {"value": one.value, "timestamp": spelled(one.at_ns)} for name, one in found.items()}


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
    tail = whole(call, "tail", default=TAIL, low=0, high=TAIL_LIMIT)
    if not tail and since is None:  # to a board, 0 is nothing said: what is meant is nothing from before
        since = now_ns
    return pb.LogFilter(
        min_level=_LEVELS[level] if level is not None else None,
        units=call.many["unit"],
        sources=call.many["source"],
        contains=call.query.get("contains", ""),
        regex=call.query.get("regex", ""),
        since=moment(since),
        until=moment(until),
        tail_lines=tail,
        follow=flag(call, "follow"),
        cursor=call.query.get("cursor") or call.headers.get("last-event-id") or "",
        current_boot_only=flag(call, "boot"),
    )
