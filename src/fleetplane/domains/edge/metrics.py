"""The numbers of the edge domain, for Prometheus, read at each scrape.

Tenants and tools are no labels: both are unbounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.domains.edge.fleet import FleetRuns
from fleetplane.domains.edge.kinds import EDGE_NODE, NodeState
from fleetplane.domains.edge.runs import RunState
from fleetplane.domains.edge.stream_side import StreamSide
from fleetplane.kernel.store import Store

PREFIX = "fleetplane_edge_"


class EdgeCollector(Collector):
    def __init__(self, store: Store, *, streams: StreamSide, runs: FleetRuns) -> None:
        self._store = store
        self._streams = streams
        self._runs = runs

    def collect(self) -> Iterator[Metric]:
        states = Counter(
            node.status.state if node.status is not None else NodeState.DISCONNECTED
            for node in self._store.list(EDGE_NODE)
        )
        daemons = GaugeMetricFamily(PREFIX + "daemons", "Daemons by state", labels=["state"])
        for state in NodeState:
            daemons.add_metric([state], states[state])
        yield daemons
        runs = CounterMetricFamily(PREFIX + "fleet_runs", "Runs that ended, by how", labels=["outcome"])
        for outcome in RunState:
            if outcome is not RunState.RUNNING:
                runs.add_metric([outcome], self._runs.ended[outcome])
        yield runs
        yield from self._heard()
        dispatcher = self._streams.dispatcher
        yield GaugeMetricFamily(
            PREFIX + "commands_open", "Targets of commands without an outcome", dispatcher.ledger.open_count
        )
        yield CounterMetricFamily(
            PREFIX + "answers_ignored",
            "Words of daemons that came too late, twice, or about nothing known",
            dispatcher.ignored + dispatcher.ledger.ignored,
        )

    def _heard(self) -> Iterator[Metric]:
        """What came in on streams."""
        streams, refused = self._streams.streams, self._streams.verifier.refused
        yield CounterMetricFamily(
            PREFIX + "heartbeats", "Heartbeats that were believed", sum(streams.heartbeats.values())
        )
        yield CounterMetricFamily(
            PREFIX + "stream_seconds", "How long streams lasted that have ended", streams.stream_seconds
        )
        events = CounterMetricFamily(
            PREFIX + "events_refused", "Hellos and events that were not believed, by why", labels=["cause"]
        )
        for cause, number in refused.items():
            events.add_metric([cause], number)
        yield events
