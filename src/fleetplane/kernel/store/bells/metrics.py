"""The doorbell's own numbers, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.kernel.store.bells.doorbell import BellCounts
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


class BellCollector(Collector):
    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        bell = self._store.bell
        if bell is None:
            return
        yield GaugeMetricFamily(
            "fleetplane_bus_connected", "Whether the bus is connected", float(bell.state.connected)
        )
        for field in fields(BellCounts):
            value = float(getattr(bell.counts, field.name))
            yield CounterMetricFamily(f"fleetplane_bus_{field.name}", TEXTS[field.name], value)
