"""The numbers of open sessions, for Prometheus, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.kernel.sessions.sessions import Sessions

PREFIX = "fleetplane_sessions_"


class SessionCollector(Collector):
    """One for all sessions that a domain holds; the label says which domain."""

    def __init__(self, sessions: Sessions, *, domain: str) -> None:
        self._sessions = sessions
        self._domain = domain

    @property
    def open(self) -> int:
        """How many are open now."""
        return len(self._sessions)

    def collect(self) -> Iterator[Metric]:
        numbers = self._sessions.statistics()
        gauges = (
            ("open", "Streams of agents open now", numbers.open),
            ("queued", "Messages waiting to be sent on them", numbers.queued),
        )
        counters = (
            ("opened", "Streams opened", numbers.opened),
            ("superseded", "Streams ended by a newer one of the same agent", numbers.superseded),
            ("revoked", "Streams ended because their caller was revoked", numbers.revoked),
            ("refused", "Messages that found a stream's queue full", numbers.refused),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["domain"])
            gauge.add_metric([self._domain], value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(PREFIX + name, text, labels=["domain"])
            counter.add_metric([self._domain], value)
            yield counter
