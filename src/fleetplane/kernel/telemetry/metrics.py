"""The telemetry's own numbers, for Prometheus, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.kernel.telemetry.telemetry import Telemetry
from fleetplane.kernel.telemetry.values import TelemetryStatistics

GAUGES = frozenset({"queued", "series", "used_bytes"})
"""All other numbers only grow."""


class TelemetryCollector(Collector):
    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterator[Metric]:
        numbers = self._telemetry.statistics()
        for field in fields(TelemetryStatistics):
            name, value = f"fleetplane_telemetry_{field.name}", float(getattr(numbers, field.name))
            text = field.name.replace("_", " ").capitalize()
            family = GaugeMetricFamily if field.name in GAUGES else CounterMetricFamily
            yield family(name, text, value)
