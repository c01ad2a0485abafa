"""Metrics of the store and of its commit notifier for Prometheus, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.kernel.store.notifiers.notifier import NotifierCounts
from fleetplane.kernel.store.settings import StoreStatistics
from fleetplane.kernel.store.store import Store

TEXTS = {
    "rung": "Messages sent to other servers",
    "coalesced": "Commits announced together with a later one",
    "heard": "Messages about groups that were not there yet",
    "known": "Messages about groups that were there already",
    "ignored": "Messages that were no bell of this installation",
    "dropped": "Times when messages were too many or too large to be held",
    "reads": "Times the log was read because of a bell",
    "connections": "Times the bus was connected to",
}


class NotifierCollector(Collector):
    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        bell = self._store.bell
        if bell is None:
            return
        yield GaugeMetricFamily(
            "fleetplane_bus_connected", "Whether the bus is connected", float(bell.state.connected)
        )
        for field in fields(NotifierCounts):
            value = float(getattr(bell.counts, field.name))
            yield CounterMetricFamily(f"fleetplane_bus_{field.name}", TEXTS[field.name], value)


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
