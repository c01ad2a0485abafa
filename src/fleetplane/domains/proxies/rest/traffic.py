"""REST: what the requests of a workspace came to, over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from fleetplane.domains.proxies.access import READ
from fleetplane.domains.proxies.agents.ports import ReportedRecords
from fleetplane.domains.proxies.kinds.records import AGENT, UPSTREAM, VIRTUAL_HOST
from fleetplane.domains.proxies.rest.common import NS_PER_DAY, WINDOW, ProxyCall, window
from fleetplane.domains.proxies.traffic.report import TrafficReport
from fleetplane.domains.proxies.traffic.summary import (
    ERROR,
    PERCENTILES,
    STATUS_CLASSES,
    TOP_TOLD,
    Frequent,
    TrafficSummary,
)
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.store import Store
from fleetplane.kernel.telemetry.summaries import DAY, HOUR, WIDTHS
from fleetplane.kernel.values.times import NS, spelled
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
