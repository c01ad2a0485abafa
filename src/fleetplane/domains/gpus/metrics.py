"""The device API's Prometheus metrics, read from real state at each scrape.

The names are those that the device API's dashboards and alerts already query; the same
numbers of the gRPC layer appear under `fleetplane_rpc_*` for every domain alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.domains.gpus import rules
from fleetplane.domains.gpus.grpc.device_api import GpuReader
from fleetplane.domains.gpus.providers import ProviderLeases
from fleetplane.domains.gpus.registry import Gpus
from fleetplane.kernel.store import Store
from fleetplane.rpc import CallStatistics
from fleetplane.rpc.serving.status import CODE_NAMES

PREFIX = "device_api_server_"
NVML_PROVIDER = "nvml-provider"
"""The name our NVML provider goes by unless told otherwise."""


class GpuCollector(Collector):
    def __init__(
        self,
        *,
        store: Store,
        gpus: Gpus,
        reader: GpuReader,
        providers: ProviderLeases,
        calls: CallStatistics,
        version: str,
        node: str,
    ) -> None:
        self._store = store
        self._gpus = gpus
        self._reader = reader
        self._providers = providers
        self._calls = calls
        self._info = {"version": version, "node": node}

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(PREFIX + "info", "Which server this is", labels=list(self._info))
        info.add_metric(list(self._info.values()), 1)
        yield info
        yield from self._cache()
        yield from self._watches()
        yield from self._leases()
        yield from self._requests()

    def _cache(self) -> Iterator[Metric]:
        tally = Counter(rules.health(gpu.conditions) for gpu in self._gpus.all())
        yield _gauge("cache_gpus_total", "GPUs registered", tally.total())
        for health in rules.GpuHealth:
            yield _gauge(f"cache_gpus_{health}", f"GPUs that are {health}", tally[health])
        yield _gauge("cache_resource_version", "Version of the last change to a GPU", self._gpus.version)
        writes = CounterMetricFamily(PREFIX + "cache_updates", "Writes to GPUs", labels=["operation"])
        for operation, count in self._gpus.writes.items():
            writes.add_metric([operation], count)
        yield writes

    def _watches(self) -> Iterator[Metric]:
        yield _gauge("watch_streams_active", "Watches open now", self._reader.open_watches)
        events = CounterMetricFamily(PREFIX + "watch_events", "Events sent to watchers", labels=["type"])
        for kind, count in self._reader.events_sent.items():
            events.add_metric([kind], count)
        yield events
        yield CounterMetricFamily(
            PREFIX + "watch_events_dropped",
            "Intermediate states that slow watchers skipped; each was followed by a newer one",
            self._store.statistics().coalesced_events,
        )

    def _leases(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            PREFIX + "provider_connection_state", "1 while the provider's lease holds", labels=["provider_id"]
        )
        heard = GaugeMetricFamily(
            PREFIX + "provider_last_heartbeat_timestamp_seconds", "Last word", labels=["provider_id"]
        )
        managed = GaugeMetricFamily(
            PREFIX + "provider_gpus_managed", "GPUs named in the last heartbeat", labels=["provider_id"]
        )
        beats = CounterMetricFamily(PREFIX + "provider_heartbeat", "Heartbeats", labels=["provider_id"])
        expiries = CounterMetricFamily(
            PREFIX + "provider_heartbeat_timeout", "Leases that ran out", labels=["provider_id"]
        )
        nvml_alive, nvml_count = 0, 0
        for lease, alive in self._providers.leases():
            label = [lease.provider]
            state.add_metric(label, int(alive))
            heard.add_metric(label, lease.heard_at_ns / 1e9)
            managed.add_metric(label, lease.gpus_named)
            beats.add_metric(label, lease.heartbeats)
            expiries.add_metric(label, lease.expiries)
            if lease.provider == NVML_PROVIDER:
                nvml_alive, nvml_count = int(alive), lease.gpus_named
        yield from (state, heard, managed, beats, expiries)
        yield _gauge("nvml_provider_enabled", "1 while the NVML provider's lease holds", nvml_alive)
        yield _gauge("nvml_gpu_count", "GPUs the NVML provider looks after", nvml_count)

    def _requests(self) -> Iterator[Metric]:
        for prefix, total, seconds, labels in (
            (PREFIX, "grpc_requests", "grpc_request_duration_seconds", ("method", "code")),
            ("", "grpc_server_handled", "grpc_server_handling_seconds", ("grpc_method", "grpc_code")),
        ):
            requests = CounterMetricFamily(prefix + total, "Calls finished", labels=labels)
            duration = HistogramMetricFamily(prefix + seconds, "How long calls took", labels=labels[:1])
            for method in self._calls.methods():
                if method.started and method.path.startswith("/nvidia."):
                    for code, count in sorted(method.finished.items()):
                        requests.add_metric((method.path, CODE_NAMES[code]), count)
                    duration.add_metric((method.path,), method.cumulative_buckets(), method.seconds)
            yield from (requests, duration)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value)
