"""Telemetry of agents: taken from their batches, stored by the kernel, read by REST and by Prometheus.

Only measurements that an answer is made from are kept. Counts by virtual host are added up for the workspace,
because hosts come and go.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.domains.proxies.agents.controller import AgentController
from fleetplane.domains.proxies.agents.live import AgentPresences
from fleetplane.domains.proxies.agents.ports import (
    AgentLogQuery,
    AgentTraffic,
    ErrorLogPage,
    ErrorQuery,
    LogPage,
)
from fleetplane.domains.proxies.kinds.records import AGENT, Agent
from fleetplane.domains.proxies.kinds.values import AgentState
from fleetplane.domains.proxies.live.app import ProxyEventsApp
from fleetplane.domains.proxies.rules.alerts import ALERT, Severity
from fleetplane.domains.proxies.tenancy.quotas import Quotas
from fleetplane.domains.proxies.traffic.fields import ACCESS
from fleetplane.domains.proxies.traffic.lines import (
    ERRORS,
    TEXT_LIMIT,
    access_entry,
    error_entry,
    lines_of,
    moment_ns,
)
from fleetplane.domains.proxies.traffic.summary import (
    PLACES,
    STATUS_CLASSES,
    AccessSummarizer,
    RequestTotals,
    TrafficReport,
    TrafficSummary,
    placed,
    report,
    total,
)
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.commands import Commands
from fleetplane.kernel.errors import Unavailable
from fleetplane.kernel.store import Store
from fleetplane.kernel.telemetry import LineQuery, Point, Sample, Telemetry
from fleetplane.kernel.values.times import NS


class Intake(Protocol):
    """Takes batches of telemetry. An error is sent to the agent, which keeps the batch and sends it again."""

    async def metrics(self, agent: Agent, batch: pb.MetricsBatch, *, now_ns: int) -> None: ...

    async def logs(self, agent: Agent, batch: pb.LogBatch, *, now_ns: int) -> None: ...


class DiscardReports:
    """Takes everything and keeps nothing."""

    async def metrics(self, agent: Agent, batch: pb.MetricsBatch, *, now_ns: int) -> None: ...

    async def logs(self, agent: Agent, batch: pb.LogBatch, *, now_ns: int) -> None: ...


PREFIX = "fleetplane_proxies_"


class ProxyCollector(Collector):
    def __init__(
        self,
        store: Store,
        *,
        controller: AgentController,
        commands: Commands,
        events: ProxyEventsApp,
        presences: AgentPresences,
        quotas: Quotas,
    ) -> None:
        self._quotas = quotas
        self._presences = presences
        self._store = store
        self._controller = controller
        self._commands = commands
        self._events = events

    def collect(self) -> Iterator[Metric]:
        states = Counter(
            agent.status.state if agent.status is not None else AgentState.OFFLINE
            for agent in self._store.list(AGENT)
        )
        yield _by("agents", "Agents by state", "state", {state: states[state] for state in AgentState})
        severities = Counter(alert.spec.severity for alert in self._store.list(ALERT))
        yield _by(
            "alerts", "Open alerts by severity", "severity", {level: severities[level] for level in Severity}
        )
        yield GaugeMetricFamily(
            PREFIX + "commands_open", "Targets of commands without an outcome", self._commands.open_count
        )
        yield CounterMetricFamily(
            PREFIX + "answers_ignored",
            "Answers to commands that came too late, twice, or to none",
            self._commands.ignored,
        )
        yield CounterMetricFamily(
            PREFIX + "agent_events_dropped",
            "Events of agents beyond what is taken in a minute",
            self._presences.events_dropped,
        )
        yield CounterMetricFamily(
            PREFIX + "quota_refusals",
            "Things that were not made for want of quota",
            self._quotas.refused.total(),
        )
        yield GaugeMetricFamily(PREFIX + "event_sockets", "Listeners to events", len(self._events))
        numbers = self._controller.reconciler.statistics()
        yield CounterMetricFamily(PREFIX + "passes", "Times that an agent was looked at", numbers.passes)
        yield CounterMetricFamily(PREFIX + "passes_failed", "Of these, those that failed", numbers.failures)


class TrafficCollector(Collector):
    """What requests came to, of all tenants together: labels are classes, and there are six of them."""

    def __init__(self, totals: RequestTotals) -> None:
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        totals = self._totals
        requests = CounterMetricFamily(PREFIX + "requests", "Requests by class of status", labels=["class"])
        for name, times in zip(STATUS_CLASSES, totals.classes, strict=True):
            requests.add_metric([name], times)
        yield requests
        for name, text, value in (
            ("request_bytes", "Bytes of requests", totals.received),
            ("response_bytes", "Bytes of answers", totals.sent),
            ("cache_hits", "Requests answered from a cache", totals.cache_hits),
            ("upstream_failures", "Attempts at upstream servers that failed", totals.upstream_failures),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value)


def _by(name: str, text: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(PREFIX + name, text, labels=[label])
    for value, count in values.items():
        gauge.add_metric([str(value)], count)
    return gauge


FRESH_NS = 300 * NS
"""How old the last figure of an agent may be to stand for a moment: twenty reports of 15 s."""
RETRY_SECONDS = 5.0
COLUMNS_LINE_BYTES: Final = 300
"""About what a line takes in a batch by column, to tell how many there are before they are decoded."""

CONNECTIONS: Final = "nginx_connections_active"
REQUESTS: Final = "nginx_http_requests_total"
RESPONSES: Final = "nginx_http_responses_total"
RECEIVED: Final = "nginx_http_request_bytes_total"
SENT: Final = "nginx_http_response_bytes_total"
CLASSES: Final = ("2xx", "3xx", "4xx", "5xx")
"""Interim answers (1xx) are no answers, and are not counted."""
_SINGLE: Final = frozenset({CONNECTIONS, REQUESTS, RECEIVED, SENT})
_COUNTED_FROM_LOG: Final = frozenset({RESPONSES, RECEIVED, SENT})


class AgentRecords:
    """An `Intake` for the agents' half, and the `Records` of the other."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._summarizer = AccessSummarizer()
        telemetry.summarize(self._summarizer)

    def __repr__(self) -> str:
        return f"<AgentRecords {self._telemetry!r}>"

    @property
    def totals(self) -> RequestTotals:
        """Of all requests since the server started."""
        return self._summarizer.totals

    # From agents.

    async def metrics(self, agent: Agent, batch: pb.MetricsBatch, *, now_ns: int) -> None:
        if not self._telemetry.offer(points=list(_points(agent, batch, now_ns))):
            raise _full()

    async def logs(self, agent: Agent, batch: pb.LogBatch, *, now_ns: int) -> None:
        count, size = len(batch.entries), len(batch.columns)
        rows = count + size // COLUMNS_LINE_BYTES
        # A server that is busy is sent the same lines again and again: it must not decode them each time.
        if not self._telemetry.has_room(agent.scope, agent.name, rows=rows, size=size):
            raise _full()
        if not self._telemetry.offer(lines=lines_of(agent, batch, now_ns)):
            raise _full()

    # For REST.

    async def traffic(
        self, workspace: str, agents: Collection[str], *, from_ns: int, to_ns: int
    ) -> AgentTraffic:
        async def by_agent(series: str) -> Mapping[str, float]:
            return await self._telemetry.growth(
                workspace, series, from_ns=from_ns, to_ns=to_ns, sources=agents
            )

        async def grown(series: str) -> int:
            return round(sum((await by_agent(series)).values()))

        async def last(series: str, count: int) -> Mapping[str, Sequence[Sample]]:
            return await self._telemetry.latest(
                workspace, series, from_ns=to_ns - FRESH_NS, to_ns=to_ns + 1, sources=agents, count=count
            )

        answers = {code_class: await by_agent(_of_class(code_class)) for code_class in CLASSES}
        classes = {code_class: round(sum(found.values())) for code_class, found in answers.items()}
        answered = sum(classes.values())
        counting = set().union(*answers.values())
        unclassed = sum(grew for name, grew in (await by_agent(REQUESTS)).items() if name not in counting)
        connections = (await last(CONNECTIONS, 1)).values()
        requests = (await last(REQUESTS, 2)).values()
        return AgentTraffic(
            requests_total=answered + round(unclassed),
            requests_per_second=round(sum(_rate(samples) for samples in requests), 3),
            error_rate=classes["5xx"] / answered if answered else 0.0,
            active_connections=round(sum(samples[0].value for samples in connections)),
            in_bytes=await grown(RECEIVED),
            out_bytes=await grown(SENT),
            status_2xx=classes["2xx"],
            status_3xx=classes["3xx"],
            status_4xx=classes["4xx"],
            status_5xx=classes["5xx"],
        )

    async def requests(
        self, workspace: str, *, from_ns: int, to_ns: int, step_seconds: int, host: str = "", source: str = ""
    ) -> TrafficReport:
        found = await self._telemetry.summaries(
            workspace, ACCESS, from_ns=from_ns, to_ns=to_ns, step_seconds=step_seconds
        )
        # A month of a full workspace is tens of thousands of summaries.
        return await asyncio.to_thread(report, found, step_seconds=step_seconds, host=host, source=source)

    async def requests_total(
        self, workspace: str, *, from_ns: int, to_ns: int, step_seconds: int, host: str = "", source: str = ""
    ) -> TrafficSummary:
        found = await self._telemetry.summaries(
            workspace, ACCESS, from_ns=from_ns, to_ns=to_ns, step_seconds=step_seconds
        )
        return await asyncio.to_thread(total, found, host=host, source=source)

    async def placed_requests(
        self,
        workspace: str,
        *,
        from_ns: int,
        to_ns: int,
        step_seconds: int,
        host: str = "",
        source: str = "",
        location: str = "",
        upstream: str = "",
    ) -> TrafficReport:
        found = await self._telemetry.summaries(
            workspace, PLACES, from_ns=from_ns, to_ns=to_ns, step_seconds=step_seconds
        )
        return await asyncio.to_thread(
            placed,
            found,
            step_seconds=step_seconds,
            host=host,
            source=source,
            location=location,
            upstream=upstream,
        )

    async def access_log(self, workspace: str, query: AgentLogQuery) -> LogPage:
        page = await self._telemetry.lines(
            LineQuery(
                scope=workspace,
                stream=ACCESS,
                from_ns=query.from_ns,
                to_ns=query.to_ns,
                limit=query.limit,
                code_low=query.status_low,
                code_high=query.status_high,
                source=query.agent_id,
                subject=query.host[:TEXT_LIMIT],
                action=query.method[:TEXT_LIMIT],
                cursor=query.cursor,
            )
        )
        return LogPage(
            entries=[access_entry(one) for one in page.lines], total=page.total, cursor=page.cursor
        )

    async def error_log(self, workspace: str, query: ErrorQuery) -> ErrorLogPage:
        page = await self._telemetry.lines(
            LineQuery(
                scope=workspace,
                stream=ERRORS,
                from_ns=query.from_ns,
                to_ns=query.to_ns,
                limit=query.limit,
                code_high=query.severity,
                source=query.agent_id,
                subject=query.source[:TEXT_LIMIT],
                cursor=query.cursor,
            )
        )
        found = [error_entry(one) for one in page.lines]
        return ErrorLogPage(entries=found, total=page.total, cursor=page.cursor)


def _full() -> Unavailable:
    return Unavailable("too much is waiting to be written: send it again", retry_after_seconds=RETRY_SECONDS)


# Measurements.


def _points(agent: Agent, batch: pb.MetricsBatch, now_ns: int) -> Iterator[Point]:
    for (series, at_ns), value in _sums(batch, now_ns).items():
        yield Point(
            scope=agent.scope,
            series=series,
            source=agent.name,
            at_ns=at_ns,
            value=value,
            counter=series != CONNECTIONS,
        )


def _sums(batch: pb.MetricsBatch, now_ns: int) -> Mapping[tuple[str, int], float]:
    """By series and moment."""
    sums: dict[tuple[str, int], float] = defaultdict(float)
    for metric in batch.metrics:
        at_ns = moment_ns(metric.timestamp or batch.timestamp, now_ns)
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
    return (newest.value - before.value) / ((newest.at_ns - before.at_ns) / NS)
