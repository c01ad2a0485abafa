"""The store's numbers, for Prometheus, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.kernel.store.settings import StoreStatistics
from fleetplane.kernel.store.store import Store

COUNTERS = frozenset(
    {"queue_refusals", "commits", "transactions", "failed_commits", "coalesced_events", "refills"}
)
"""The numbers that only grow; all others are gauges."""


class StoreCollector(Collector):
    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        numbers = self._store.statistics()
        for field in fields(StoreStatistics):
            name, value = f"fleetplane_store_{field.name}", float(getattr(numbers, field.name))
            text = field.name.replace("_", " ").capitalize()
            if field.name in COUNTERS:
                yield CounterMetricFamily(name, text, value)
            else:
                yield GaugeMetricFamily(name, text, value)
