"""What agents reported over time: taken from their batches, kept by the kernel, told to REST.

Of the measurements only those are kept that an answer is made from. Counts by virtual host are
added up: a workspace's traffic is asked for, and hosts come and go.
"""

from __future__ import annotations

import math
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from fleetplane.domains.proxies import wire
from fleetplane.domains.proxies.kinds import Agent
from fleetplane.domains.proxies.ports import (
    LEVELS,
    AccessLogEntry,
    ErrorLogEntry,
    ErrorPage,
    ErrorQuery,
    LogPage,
    LogQuery,
    Traffic,
)
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.errors import Unavailable
from fleetplane.kernel.telemetry import FoundLine, Line, LineQuery, Point, Sample, Telemetry
from fleetplane.web.times import spelled

NS_PER_SECOND = 1_000_000_000
AHEAD_NS = 300 * NS_PER_SECOND
"""How far an agent's clock may run ahead of ours; what is later than that happened now."""
FRESH_NS = 300 * NS_PER_SECOND
"""How old the last figure of an agent may be to stand for a moment: twenty reports of 15 s."""
TEXT_LIMIT = 256
"""Of what lines are found by, in characters: hosts and methods are whatever a visitor sent."""
RETRY_SECONDS = 5.0

ACCESS: Final = "access"
ERRORS: Final = "error"
CONNECTIONS: Final = "nginx_connections_active"
REQUESTS: Final = "nginx_http_requests_total"
RESPONSES: Final = "nginx_http_responses_total"
RECEIVED: Final = "nginx_http_request_bytes_total"
SENT: Final = "nginx_http_response_bytes_total"
CLASSES: Final = ("2xx", "3xx", "4xx", "5xx")
"""Interim answers (1xx) are no answers, and are not counted."""
_SINGLE: Final = frozenset({CONNECTIONS, REQUESTS, RECEIVED, SENT})
_COUNTED_FROM_LOG: Final = frozenset({RESPONSES, RECEIVED, SENT})
_SEVERITIES: Final = {level: rank for rank, level in enumerate(LEVELS)}
_UNRANKED: Final = _SEVERITIES["info"]
"""Of levels that are an agent's own."""
_ENCODER: Final = msgspec.json.Encoder()


class AgentRecords:
    """An `Intake` for the agents' half, and the `Records` of the other."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def __repr__(self) -> str:
        return f"<AgentRecords {self._telemetry!r}>"

    # From agents.

    async def metrics(self, agent: Agent, batch: pb.MetricsBatch, *, now_ns: int) -> None:
        if not self._telemetry.offer(points=list(_points(agent, batch, now_ns))):
            raise _full()

    async def logs(self, agent: Agent, batch: pb.LogBatch, *, now_ns: int) -> None:
        lines = [line_of(agent, entry, number, now_ns) for number, entry in enumerate(batch.entries)]
        if not self._telemetry.offer(lines=lines):
            raise _full()

    # For REST.

    async def traffic(self, workspace: str, agents: Collection[str], *, from_ns: int, to_ns: int) -> Traffic:
        async def grown(series: str) -> int:
            by_agent = await self._telemetry.growth(
                workspace, series, from_ns=from_ns, to_ns=to_ns, sources=agents
            )
            return round(sum(by_agent.values()))

        async def last(series: str, count: int) -> Mapping[str, Sequence[Sample]]:
            return await self._telemetry.latest(
                workspace, series, from_ns=to_ns - FRESH_NS, to_ns=to_ns + 1, sources=agents, count=count
            )

        classes = {code_class: await grown(_of_class(code_class)) for code_class in CLASSES}
        total = sum(classes.values())
        connections = (await last(CONNECTIONS, 1)).values()
        requests = (await last(REQUESTS, 2)).values()
        return Traffic(
            requests_total=total,
            requests_per_second=round(sum(_rate(samples) for samples in requests), 3),
            error_rate=classes["5xx"] / total if total else 0.0,
            active_connections=round(sum(samples[0].value for samples in connections)),
            in_bytes=await grown(RECEIVED),
            out_bytes=await grown(SENT),
            status_2xx=classes["2xx"],
            status_3xx=classes["3xx"],
            status_4xx=classes["4xx"],
            status_5xx=classes["5xx"],
        )

    async def access_log(self, workspace: str, query: LogQuery) -> LogPage:
        page = await self._telemetry.lines(
            LineQuery(
                scope=workspace, stream=ACCESS, from_ns=query.from_ns, to_ns=query.to_ns, limit=query.limit,
                code_low=query.status_low, code_high=query.status_high, source=query.agent_id,
                subject=query.host[:TEXT_LIMIT], action=query.method[:TEXT_LIMIT], cursor=query.cursor,
            )
        )  # fmt: skip
        return LogPage(entries=[_entry(one) for one in page.lines], total=page.total, cursor=page.cursor)

    async def error_log(self, workspace: str, query: ErrorQuery) -> ErrorPage:
        page = await self._telemetry.lines(
            LineQuery(
                scope=workspace, stream=ERRORS, from_ns=query.from_ns, to_ns=query.to_ns, limit=query.limit,
                code_high=query.severity, source=query.agent_id, subject=query.source[:TEXT_LIMIT],
                cursor=query.cursor,
            )
        )  # fmt: skip
        found = [_complaint(one) for one in page.lines]
        return ErrorPage(entries=found, total=page.total, cursor=page.cursor)


def _full() -> Unavailable:
    return Unavailable("too much is waiting to be written: send it again", retry_after_seconds=RETRY_SECONDS)


def _moment_ns(value: int, now_ns: int) -> int:
    at_ns = wire.moment_ns(value)
    return now_ns if at_ns is None or at_ns > now_ns + AHEAD_NS else at_ns


# Measurements.


def _points(agent: Agent, batch: pb.MetricsBatch, now_ns: int) -> Iterator[Point]:
    for (series, at_ns), value in _sums(batch, now_ns).items():
        yield Point(
            scope=agent.scope, series=series, source=agent.name, at_ns=at_ns, value=value,
            counter=series != CONNECTIONS,
        )  # fmt: skip


def _sums(batch: pb.MetricsBatch, now_ns: int) -> Mapping[tuple[str, int], float]:
    """By series and moment."""
    sums: dict[tuple[str, int], float] = defaultdict(float)
    for metric in batch.metrics:
        at_ns = _moment_ns(metric.timestamp or batch.timestamp, now_ns)
        if not math.isfinite(metric.value):
            continue
        if metric.name in _COUNTED_FROM_LOG:
            # A class is first mentioned with its first answer. Until then it is nothing, and has
            # to be said to be: that answer would not count as growth otherwise.
            for code_class in CLASSES:
                sums[_of_class(code_class), at_ns] += 0.0
        if metric.name in _SINGLE:
            sums[metric.name, at_ns] += metric.value
        elif metric.name == RESPONSES and metric.labels.get("code_class") in CLASSES:
            sums[_of_class(metric.labels["code_class"]), at_ns] += metric.value
    return sums


def _of_class(code_class: str) -> str:
    return f"{RESPONSES}/{code_class}"


def _rate(samples: Sequence[Sample]) -> float:
    """Per second, between the last two."""
    if len(samples) < 2:
        return 0.0
    newest, before = samples[:2]
    return (newest.value - before.value) / ((newest.at_ns - before.at_ns) / NS_PER_SECOND)


# Log lines.


def line_of(agent: Agent, entry: pb.LogEntry, number: int, now_ns: int) -> Line:
    fields = dict(entry.fields)
    # Agents that do not number their lines send a batch again as it was.
    place = f"{agent.name} {entry.timestamp} {number} {entry.message}"
    identity = fields.pop("id", "") or str(uuid.uuid5(uuid.NAMESPACE_OID, place))
    is_access = entry.level == ACCESS
    return Line(
        scope=agent.scope,
        stream=ACCESS if is_access else ERRORS,
        source=agent.name,
        at_ns=_moment_ns(entry.timestamp, now_ns),
        identity=identity,
        code=_integer(fields.get("status", "")) if is_access else _SEVERITIES.get(entry.level, _UNRANKED),
        subject=fields.get("host", "")[:TEXT_LIMIT] if is_access else fields.get("source", "")[:TEXT_LIMIT],
        action=fields.get("method", "")[:TEXT_LIMIT] if is_access else entry.level[:TEXT_LIMIT],
        body=_ENCODER.encode(
            _Kept(
                id=identity,
                message=entry.message,
                fields=fields,
                level="" if is_access else entry.level[:TEXT_LIMIT],
            )
        ),
    )


class _Kept(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line as it lies in the file."""

    id: str
    message: str = ""
    level: str = ""
    """Of what is no request."""
    fields: dict[str, str] = {}


_DECODER: Final = msgspec.json.Decoder(_Kept)


def _entry(found: FoundLine) -> AccessLogEntry:
    kept = _DECODER.decode(found.body)
    said = kept.fields.get
    return AccessLogEntry(
        id=kept.id,
        agent_id=found.source,
        timestamp=spelled(found.at_ns),
        remote_addr=said("remote_addr", ""),
        method=said("method", ""),
        uri=said("uri", ""),
        protocol=said("protocol", ""),
        host=said("host", ""),
        status=_integer(said("status", "")),
        body_bytes_sent=_integer(said("body_bytes_sent", "")),
        response_time_ms=_number(said("response_time_ms", "")),
        user_agent=said("user_agent", ""),
        referer=said("referer", ""),
        request_id=said("request_id", ""),
    )


def _complaint(found: FoundLine) -> ErrorLogEntry:
    kept = _DECODER.decode(found.body)
    return ErrorLogEntry(
        id=kept.id,
        agent_id=found.source,
        timestamp=spelled(found.at_ns),
        level=kept.level,
        message=kept.message,
        source=kept.fields.get("source", ""),
    )


def _integer(text: str) -> int:
    """0 for what is no number: NGINX writes `-` where it has none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else 0


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0
