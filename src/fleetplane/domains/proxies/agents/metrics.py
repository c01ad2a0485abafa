"""The numbers of the agents' half, for Prometheus, read at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.domains.proxies.agents.controller import AgentController
from fleetplane.domains.proxies.agents.live import AgentPresences
from fleetplane.domains.proxies.kinds.records import AGENT
from fleetplane.domains.proxies.kinds.values import AgentState
from fleetplane.domains.proxies.live.app import ProxyEventsApp
from fleetplane.domains.proxies.rules.alerts import ALERT, Severity
from fleetplane.domains.proxies.tenancy.quotas import Quotas
from fleetplane.domains.proxies.traffic.summary import STATUS_CLASSES, RequestTotals
from fleetplane.kernel.commands import Commands
from fleetplane.kernel.store import Store

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
