"""The gateway's numbers for Prometheus. No caller and no path is a label: both are unbounded."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.web.rest.gateway import AnyGateway


class GatewayCollector(Collector):
    def __init__(self, gateway: AnyGateway, *, domain: str) -> None:
        self._gateway = gateway
        self._domain = domain

    def collect(self) -> Iterator[Metric]:
        answers = CounterMetricFamily(
            "fleetplane_web_answers",
            "Answers of the REST API by class of status.",
            labels=["domain", "status"],
        )
        for status, count in sorted(self._gateway.answers.items()):
            answers.add_metric([self._domain, f"{status}xx"], count)
        yield answers
        refused = CounterMetricFamily(
            "fleetplane_web_rate_limited", "Requests beyond their caller's rate.", labels=["domain"]
        )
        refused.add_metric([self._domain], self._gateway.rate.refused)
        yield refused
