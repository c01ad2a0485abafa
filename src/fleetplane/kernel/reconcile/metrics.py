"""The numbers of controllers, for Prometheus, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.kernel.reconcile.reconciler import Reconciler

PREFIX = "fleetplane_reconcile_"
_GAUGES = {"queued": "Keys waiting for a pass", "running": "Keys being worked on"}
_COUNTERS = {
    "passes": "Passes over a key",
    "failures": "Passes that failed",
    "leases_lost": "Times that another server took a controller over",
}


class ReconcileCollector(Collector):
    """One for any number of controllers, told apart by name; there may be more of them later."""

    def __init__(self, controllers: Callable[[], Iterable[Reconciler]]) -> None:
        self._controllers = controllers

    @property
    def held(self) -> int:
        """How many of them are this server's to run now."""
        return sum(controller.is_ours for controller in self._controllers())

    def collect(self) -> Iterator[Metric]:
        found = [(controller.name, controller.statistics()) for controller in self._controllers()]
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["controller"])
            for controller, numbers in found:
                gauge.add_metric([controller], getattr(numbers, name))
            yield gauge
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=["controller"])
            for controller, numbers in found:
                counter.add_metric([controller], getattr(numbers, name))
            yield counter
