"""The numbers of the edge domain, for Prometheus, read at each scrape.

Tenants are no label: they are unbounded. Of tools and reasons a bounded number is (`tallies`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.domains.edge.kinds import EDGE_NODE, NodeState
from fleetplane.domains.edge.runs.channel import EdgeRuns
from fleetplane.domains.edge.streams.assembly import StreamSide
from fleetplane.domains.edge.streams.call_encoding import Tallies
from fleetplane.fleet.runs.records import RunState
from fleetplane.kernel.store import Store

PREFIX = "fleetplane_edge_"


class EdgeCollector(Collector):
    def __init__(self, store: Store, *, streams: StreamSide, runs: EdgeRuns, tallies: Tallies) -> None:
        self._store = store
        self._streams = streams
        self._runs = runs
        self._tallies = tallies

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
        yield from self._fared()
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

    def _fared(self) -> Iterator[Metric]:
        """What became of commands."""
        tallies = self._tallies
        commands = CounterMetricFamily(
            PREFIX + "commands",
            "Targets of runs that ended, by tool, outcome and why",
            labels=["tool", "outcome", "reason"],
        )
        for labels, number in tallies.commands.items():
            commands.add_metric(labels, number)
        yield commands
        seconds = CounterMetricFamily(
            PREFIX + "command_seconds", "How long commands took on their daemons", labels=["tool"]
        )
        for tool, took in tallies.seconds.items():
            seconds.add_metric([tool], took)
        yield seconds
        skipped = CounterMetricFamily(
            PREFIX + "targets_skipped", "Daemons that were meant and left out, by why", labels=["reason"]
        )
        for reason, number in tallies.skipped.items():
            skipped.add_metric([reason], number)
        yield skipped

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
            if number:
                events.add_metric([cause], number)
        yield events
        yield CounterMetricFamily(
            PREFIX + "events_oversized", "Events that were too large and no results", streams.oversized
        )
