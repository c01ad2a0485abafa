"""REST: what agents reported over time: traffic, requests, logs and summaries by virtual host."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.proxies.access import READ
from fleetplane.domains.proxies.agents.ports import (
    LEVELS,
    AccessLogEntry,
    AgentLogQuery,
    ErrorLogEntry,
    ErrorQuery,
    ReportedRecords,
)
from fleetplane.domains.proxies.kinds.records import AGENT, UPSTREAM, VIRTUAL_HOST
from fleetplane.domains.proxies.rest.common import NS_PER_DAY, WINDOW, ProxyCall, window
from fleetplane.domains.proxies.traffic.summary import (
    ERROR,
    PERCENTILES,
    STATUS_CLASSES,
    TOP_TOLD,
    Frequent,
    TrafficReport,
    TrafficSummary,
)
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.store import Store
from fleetplane.kernel.telemetry.summaries import DAY, HOUR, WIDTHS
from fleetplane.kernel.values.times import NS, spelled
from fleetplane.web.rest.pages import number
from fleetplane.web.rest.problems import Problem, Rejected
from fleetplane.web.rest.routes import Answer, Query, Route, RouteGroup

_ROUTES = RouteGroup("Metrics and logs")

LONGEST_NS = 31 * NS_PER_DAY
MINUTES_UP_TO = 2 * HOUR
"""Seconds of a stretch that is told by the minute."""
HOURS_UP_TO = 4 * DAY
BY_LOCATION = "location"
PLACES_TOLD = 1_000
"""Of locations, and of upstreams: a few hundred bytes each."""

K = TypeVar("K")


class FiguresView(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    in_bytes: int
    out_bytes: int
    status_codes: dict[str, int]
    """Requests by class: `1xx` to `5xx`, and `other`."""
    latency_ms: dict[str, float]
    """`p50`, `p90`, `p95`, `p99`; each within `latency_error` of a request that was really there."""
    cache_hits: int
    cache_lookups: int
    upstream_failures: int


class FrequentView(msgspec.Struct, frozen=True, kw_only=True):
    value: str
    requests: int
    """At least."""


class TopView(msgspec.Struct, frozen=True, kw_only=True):
    values: Sequence[FrequentView]
    missed: int
    """How many more requests any value may have had."""


class MomentView(msgspec.Struct, frozen=True, kw_only=True):
    at: str
    figures: FiguresView


class TrafficOfHost(msgspec.Struct, frozen=True, kw_only=True):
    virtual_host_id: str
    name: str
    figures: FiguresView


class TrafficOfAgent(msgspec.Struct, frozen=True, kw_only=True):
    agent_id: str
    name: str
    figures: FiguresView


class TrafficOfLocation(msgspec.Struct, frozen=True, kw_only=True):
    virtual_host_id: str
    virtual_host: str
    """Its name."""
    location: str
    """Its path."""
    upstream_id: str
    """Empty where requests were not passed on to an upstream."""
    figures: FiguresView


class TrafficOfUpstream(msgspec.Struct, frozen=True, kw_only=True):
    upstream_id: str
    name: str
    figures: FiguresView


class TrafficView(msgspec.Struct, frozen=True, kw_only=True):
    total: FiguresView
    day_before: FiguresView
    """The same stretch, 24 hours earlier."""
    over_time: Sequence[MomentView]
    virtual_hosts: Sequence[TrafficOfHost]
    """Busiest first."""
    agents: Sequence[TrafficOfAgent]
    top: dict[str, TopView]
    """`paths`, `clients`, `referrers`, `user_agents`."""
    latency_error: float
    locations: Sequence[TrafficOfLocation] = ()
    """With `by=location`, or where one location or upstream is asked for. Busiest first, at most 1,000."""
    upstreams: Sequence[TrafficOfUpstream] = ()
    """Likewise."""


class TrafficRoutes:
    def __init__(self, store: Store, clock: Clock, records: ReportedRecords) -> None:
        self._store = store
        self._clock = clock
        self._records = records

    def routes(self) -> Sequence[Route]:
        return (
            _ROUTES.get(
                "/workspaces/{workspace_id}/traffic",
                self.traffic,
                READ,
                query=(
                    *WINDOW,
                    Query(name="virtual_host_id", summary="Only of this virtual host"),
                    Query(name="agent_id", summary="Only of this agent"),
                    Query(name="by", summary="`location`: also by location and by upstream"),
                    Query(name="location", summary="Only of this path of a location, without `top`"),
                    Query(name="upstream_id", summary="Only of this upstream, without `top`"),
                ),
            ),
        )

    async def traffic(self, call: ProxyCall) -> Answer[TrafficView]:
        """Get what the requests of a workspace came to, over time, by host and by agent."""
        query, scope = call.query, call.scope
        from_ns, to_ns = window(query, now_ns=self._clock.now_ns(), longest_ns=LONGEST_NS)
        by, location, upstream = (query.get(name, "") for name in ("by", "location", "upstream_id"))
        if by not in ("", BY_LOCATION):
            raise Rejected(Problem(field="by", message=f"Must be {BY_LOCATION}, or left out"))
        host, agent = query.get("virtual_host_id", ""), query.get("agent_id", "")
        step = step_of((to_ns - from_ns) // NS)
        narrow = bool(location or upstream)

        of = {"host": host, "source": agent}
        places = partial(self._records.placed_requests, location=location, upstream=upstream)
        ask = places if narrow else self._records.requests
        now = await ask(scope, from_ns=from_ns, to_ns=to_ns, step_seconds=step, **of)
        placed = now
        if by and not narrow:
            placed = await places(scope, from_ns=from_ns, to_ns=to_ns, step_seconds=step, **of)
        start, stop = from_ns - NS_PER_DAY, to_ns - NS_PER_DAY
        if narrow:
            before = (await places(scope, from_ns=start, to_ns=stop, step_seconds=step, **of)).total
        else:
            before = await self._records.requests_total(
                scope, from_ns=start, to_ns=stop, step_seconds=step, **of
            )
        return Answer(content=self._view(scope, now, before, placed))

    def _view(
        self, scope: str, now: TrafficReport, before: TrafficSummary, placed: TrafficReport
    ) -> TrafficView:
        hosts = {one.name: one.spec.name for one in self._store.list(VIRTUAL_HOST, scope)}
        agents = {one.name: one.spec.name for one in self._store.list(AGENT, scope)}
        upstreams = {one.name: one.spec.name for one in self._store.list(UPSTREAM, scope)}
        return TrafficView(
            total=figures(now.total),
            day_before=figures(before),
            over_time=[
                MomentView(at=spelled(at * NS), figures=figures(one)) for at, one in now.over_time.items()
            ],
            virtual_hosts=[
                TrafficOfHost(virtual_host_id=one, name=hosts.get(one, ""), figures=figures(said))
                for one, said in _busiest(now.hosts)
            ],
            agents=[
                TrafficOfAgent(agent_id=one, name=agents.get(one, ""), figures=figures(said))
                for one, said in _busiest(now.sources)
            ],
            top={
                "paths": _top(now.total.paths),
                "clients": _top(now.total.clients),
                "referrers": _top(now.total.referrers),
                "user_agents": _top(now.total.agents),
            },
            latency_error=ERROR,
            locations=[
                TrafficOfLocation(
                    virtual_host_id=one.host,
                    virtual_host=hosts.get(one.host, ""),
                    location=one.location,
                    upstream_id=one.upstream,
                    figures=figures(said),
                )
                for one, said in _busiest(placed.places)[:PLACES_TOLD]
            ],
            upstreams=[
                TrafficOfUpstream(upstream_id=one, name=upstreams.get(one, ""), figures=figures(said))
                for one, said in _busiest(placed.upstreams)[:PLACES_TOLD]
            ],
        )


def step_of(seconds: int) -> int:
    """How finely a stretch is told."""
    minute, hour, day = WIDTHS
    return minute if seconds <= MINUTES_UP_TO else hour if seconds <= HOURS_UP_TO else day


def figures(said: TrafficSummary) -> FiguresView:
    return FiguresView(
        requests=said.requests,
        in_bytes=said.received,
        out_bytes=said.sent,
        status_codes=dict(zip(STATUS_CLASSES, said.classes, strict=True)),
        latency_ms={name: round(said.percentile(share), 3) for name, share in PERCENTILES.items()},
        cache_hits=said.cache_hits,
        cache_lookups=said.cache_asked,
        upstream_failures=said.upstream_failures,
    )


def _busiest(many: Mapping[K, TrafficSummary]) -> list[tuple[K, TrafficSummary]]:
    return sorted(many.items(), key=lambda one: (-one[1].requests, str(one[0])))


def _top(said: Frequent) -> TopView:
    ordered = sorted(said.counts.items(), key=lambda one: (-one[1], one[0]))[:TOP_TOLD]
    return TopView(
        values=[FrequentView(value=value, requests=times) for value, times in ordered], missed=said.missed
    )


METRICS_LONGEST_NS = 31 * NS_PER_DAY
LOGS_LONGEST_NS = 7 * NS_PER_DAY
LOGS = 100
LOGS_LIMIT = 1000
_RECORDS = RouteGroup("Metrics and logs")
_AGENT = "/agents/{agent_id}"
_OF_WORKSPACE = "/workspaces/{workspace_id}"
_LIMIT = Query(
    name="limit", summary="Maximum number of rows", kind="integer", default=LOGS, low=1, high=LOGS_LIMIT
)
_OF_AGENT = Query(name="agent_id", summary="Only of this agent")
_CURSOR = Query(name="cursor", summary="`next_cursor` of the previous page")


class Bandwidth(msgspec.Struct, frozen=True, kw_only=True):
    in_bytes: int
    out_bytes: int


class MetricsView(msgspec.Struct, frozen=True, kw_only=True):
    requests_total: int
    requests_per_second: float
    error_rate: float
    active_connections: int
    bandwidth: Bandwidth
    status_codes: dict[str, int]
    """Requests by class: `2xx`, `3xx`, `4xx`, `5xx`."""


class LogMeta(msgspec.Struct, frozen=True, kw_only=True):
    total: int
    limit: int
    cursor: str | UnsetType = UNSET


class LogListing(msgspec.Struct, frozen=True, kw_only=True):
    data: Sequence[AccessLogEntry]
    meta: LogMeta


class ErrorLogListing(msgspec.Struct, frozen=True, kw_only=True):
    data: Sequence[ErrorLogEntry]
    meta: LogMeta


class RecordRoutes:
    def __init__(self, store: Store, clock: Clock, records: ReportedRecords) -> None:
        self._store = store
        self._clock = clock
        self._records = records

    def routes(self) -> Sequence[Route]:
        return (
            _RECORDS.get(f"{_OF_WORKSPACE}/metrics", self.workspace_metrics, READ, query=WINDOW),
            _RECORDS.get(f"{_AGENT}/metrics", self.agent_metrics, READ, query=WINDOW),
            _RECORDS.get(
                f"{_OF_WORKSPACE}/access-logs",
                self.access_logs,
                READ,
                query=(
                    *WINDOW,
                    Query(name="status_code", summary="A status such as 500, or a class such as 5xx"),
                    _LIMIT,
                    _OF_AGENT,
                    Query(name="host", summary="Only for this host"),
                    Query(name="method", summary="Only with this method"),
                    _CURSOR,
                ),
            ),
            _RECORDS.get(
                f"{_OF_WORKSPACE}/error-logs",
                self.error_logs,
                READ,
                query=(
                    *WINDOW,
                    Query(name="level", summary="Minimum severity", choices=LEVELS, default=LEVELS[-1]),
                    _LIMIT,
                    _OF_AGENT,
                    Query(name="source", summary="nginx_error or agent"),
                    _CURSOR,
                ),
            ),
        )

    async def workspace_metrics(self, call: ProxyCall) -> Answer[MetricsView]:
        """Get traffic metrics of a workspace."""
        agents = {agent.name for agent in self._store.list(AGENT, call.scope)}
        return await self._metrics(call, agents)

    async def agent_metrics(self, call: ProxyCall) -> Answer[MetricsView]:
        """Get traffic metrics of an agent."""
        return await self._metrics(call, {call.path["agent_id"]})

    async def _metrics(self, call: ProxyCall, agents: Collection[str]) -> Answer[MetricsView]:
        from_ns, to_ns = window(call.query, now_ns=self._clock.now_ns(), longest_ns=METRICS_LONGEST_NS)
        found = await self._records.traffic(call.scope, agents, from_ns=from_ns, to_ns=to_ns)
        view = MetricsView(
            requests_total=found.requests_total,
            requests_per_second=found.requests_per_second,
            error_rate=found.error_rate,
            active_connections=found.active_connections,
            bandwidth=Bandwidth(in_bytes=found.in_bytes, out_bytes=found.out_bytes),
            status_codes={
                "2xx": found.status_2xx,
                "3xx": found.status_3xx,
                "4xx": found.status_4xx,
                "5xx": found.status_5xx,
            },
        )
        return Answer(content=view)

    async def access_logs(self, call: ProxyCall) -> Answer[LogListing]:
        """List access log entries, newest first."""
        query = call.query
        from_ns, to_ns = window(query, now_ns=self._clock.now_ns(), longest_ns=LOGS_LONGEST_NS)
        problems: list[Problem] = []
        limit = number(query, "limit", LOGS, low=1, high=LOGS_LIMIT, problems=problems)
        low, high = _statuses(query.get("status_code"), problems)
        if problems:
            raise Rejected(*problems)
        page = await self._records.access_log(
            call.scope,
            AgentLogQuery(
                from_ns=from_ns,
                to_ns=to_ns,
                limit=limit,
                status_low=low,
                status_high=high,
                agent_id=query.get("agent_id", ""),
                host=query.get("host", ""),
                method=query.get("method", ""),
                cursor=query.get("cursor", ""),
            ),
        )
        meta = LogMeta(total=page.total, limit=limit, cursor=page.cursor or UNSET)
        return Answer(content=LogListing(data=page.entries, meta=meta))

    async def error_logs(self, call: ProxyCall) -> Answer[ErrorLogListing]:
        """List error log entries of NGINX and agents, newest first."""
        query = call.query
        from_ns, to_ns = window(query, now_ns=self._clock.now_ns(), longest_ns=LOGS_LONGEST_NS)
        problems: list[Problem] = []
        limit = number(query, "limit", LOGS, low=1, high=LOGS_LIMIT, problems=problems)
        severity = _severity(query, problems)
        if problems:
            raise Rejected(*problems)
        page = await self._records.error_log(
            call.scope,
            ErrorQuery(
                from_ns=from_ns,
                to_ns=to_ns,
                limit=limit,
                severity=severity,
                agent_id=query.get("agent_id", ""),
                source=query.get("source", ""),
                cursor=query.get("cursor", ""),
            ),
        )
        meta = LogMeta(total=page.total, limit=limit, cursor=page.cursor or UNSET)
        return Answer(content=ErrorLogListing(data=page.entries, meta=meta))


def _severity(query: Mapping[str, str], problems: list[Problem]) -> int:
    level = query.get("level", LEVELS[-1])
    if level in LEVELS:
        return LEVELS.index(level)
    problems.append(Problem(field="level", message=f"Must be one of {', '.join(LEVELS)}"))
    return 0


def _statuses(text: str | None, problems: list[Problem]) -> tuple[int, int]:
    """The lowest and highest status that is asked for."""
    if text is None:
        return 0, 999
    if len(text) == 3 and text[0] in "12345" and text[1:] == "xx":
        return int(text[0]) * 100, int(text[0]) * 100 + 99
    if len(text) == 3 and text.isascii() and text.isdecimal():
        return int(text), int(text)
    problems.append(Problem(field="status_code", message="Must be a status such as 500, or 5xx"))
    return 0, 999
