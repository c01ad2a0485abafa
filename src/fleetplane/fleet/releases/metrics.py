"""The numbers of releases and of agents' versions, for Prometheus, read at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.fleet.releases.check_in import CheckIns
from fleetplane.fleet.releases.records import AGENT_VERSION, agents_scope
from fleetplane.kernel.store import Store


class ReleaseCollector(Collector):
    def __init__(self, store: Store, check_ins: CheckIns) -> None:
        self._store = store
        self._check_ins = check_ins

    def collect(self) -> Iterator[Metric]:
        found = self._check_ins
        yield GaugeMetricFamily(
            "fleetplane_releases", "Releases of agents that this server has", len(found.releases.list())
        )
        versions = GaugeMetricFamily(
            "fleetplane_agents_running",
            "Agents by the version that they said they run",
            labels=["domain", "version"],
        )
        for domain in sorted(found.registers):
            said = (one.status for one in self._store.list(AGENT_VERSION, agents_scope(domain)))
            for version, number in sorted(Counter(one.version for one in said if one is not None).items()):
                versions.add_metric([domain, version], number)
        yield versions
        for name, words, numbers in (
            ("check_ins", "Check-ins of agents with their version", found.check_ins),
            ("failures", "Upgrades that agents refused or took back", found.failures),
            ("sent_bytes", "Bytes of releases that agents fetched", found.sent_bytes),
        ):
            counter = CounterMetricFamily(f"fleetplane_releases_{name}", words, labels=["domain"])
            for domain in sorted(found.registers):
                counter.add_metric([domain], numbers[domain])
            yield counter
