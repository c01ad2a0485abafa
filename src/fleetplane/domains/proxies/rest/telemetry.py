"""REST: what agents reported over time: traffic, requests, and what NGINX had to say."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

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
from fleetplane.domains.proxies.kinds.records import AGENT
from fleetplane.domains.proxies.rest.common import NS_PER_DAY, WINDOW, ProxyCall, window
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.store import Store
from fleetplane.web.rest.pages import number
from fleetplane.web.rest.problems import Problem, Rejected
from fleetplane.web.rest.routes import Answer, Query, Route, RouteGroup

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
