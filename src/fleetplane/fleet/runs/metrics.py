"""The numbers of one domain's runs, for Prometheus, read at each scrape. Edge has its own names for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.fleet.runs.records import RunState
from fleetplane.fleet.runs.runs import Runs


class RunCollector(Collector):
    def __init__(self, runs: Runs[Any, Any, Any], *, domain: str) -> None:
        self._runs = runs
        self._prefix = f"fleetplane_{domain}_"

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            self._prefix + "runs_open", "Runs that have not ended", value=self._runs.open_count
        )
        ended = CounterMetricFamily(self._prefix + "runs", "Runs that ended, by how", labels=["outcome"])
        for state in RunState:
            if state is not RunState.RUNNING:
                ended.add_metric([state], self._runs.ended[state])
        yield ended
