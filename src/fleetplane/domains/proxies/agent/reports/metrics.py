"""Measurements as the server takes them, under the names that NGINX's own exporter made customary. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from fleetplane.domains.proxies.agent.nginx.stub_status import StubStatus
from fleetplane.domains.proxies.agent.reports.log_lines import BUCKETS_SECONDS, LoggedTraffic
from fleetplane.domains.proxies.agent.reports.machine import NodeUsage
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb


def batch(
    *,
    at_ms: int,
    figures: StubStatus | None,
    own_requests: int,
    traffic: LoggedTraffic,
    reading: NodeUsage,
    servers: Mapping[tuple[str, str], bool],
    dropped: Mapping[str, int],
) -> pb.MetricsBatch:
    """`own_requests`: how many of the requests that NGINX counts were the agent's."""
    found = [
        *(_connections(figures, own_requests) if figures is not None else ()),
        *_traffic(traffic),
        *_machine(reading),
        *(
            _gauge("nginx_upstream_server_up", float(up), upstream=upstream, server=server)
            for (upstream, server), up in servers.items()
        ),
        *(_counter("nxmesh_agent_dropped_total", count, kind=kind) for kind, count in dropped.items()),
    ]
    for metric in found:
        metric.timestamp = at_ms
    return pb.MetricsBatch(timestamp=at_ms, metrics=found)


def _connections(figures: StubStatus, own_requests: int) -> Iterator[pb.Metric]:
    yield _gauge("nginx_connections_active", max(0, figures.active - 1))  # one of them asks
    yield _gauge("nginx_connections_reading", figures.reading)
    yield _gauge("nginx_connections_writing", max(0, figures.writing - 1))
    yield _gauge("nginx_connections_waiting", figures.waiting)
    yield _counter("nginx_connections_accepted", max(0, figures.accepted - own_requests))
    yield _counter("nginx_connections_handled", max(0, figures.handled - own_requests))
    yield _counter("nginx_http_requests_total", max(0, figures.requests - own_requests))


def _traffic(traffic: LoggedTraffic) -> Iterator[pb.Metric]:
    for key, count in traffic.responses.items():
        code_class, _, host = key.partition(" ")
        yield _counter("nginx_http_responses_total", count, code_class=code_class, virtual_host_id=host)
    yield _counter("nginx_http_request_bytes_total", traffic.request_bytes)
    yield _counter("nginx_http_response_bytes_total", traffic.response_bytes)
    name = "nginx_http_request_duration_seconds"
    edges = [*(f"{edge:g}" for edge in BUCKETS_SECONDS), "+Inf"]
    for edge, count in zip(edges, accumulate(traffic.durations), strict=True):
        yield _metric(f"{name}_bucket", count, pb.HISTOGRAM, le=edge)
    yield _metric(f"{name}_sum", traffic.duration_seconds, pb.HISTOGRAM)
    yield _metric(f"{name}_count", sum(traffic.durations), pb.HISTOGRAM)


def _machine(reading: NodeUsage) -> Iterator[pb.Metric]:
    yield _gauge("system_cpu_percent", reading.cpu_percent)
    yield _gauge("system_memory_used_bytes", reading.memory_used_bytes)
    yield _gauge("system_memory_total_bytes", reading.memory_total_bytes)
    yield _gauge("system_disk_used_bytes", reading.disk_used_bytes)
    yield _gauge("system_disk_total_bytes", reading.disk_total_bytes)
    yield _gauge("system_load_average_1m", reading.load_1m)


def _gauge(name: str, value: float, /, **labels: str) -> pb.Metric:
    return _metric(name, value, pb.GAUGE, **labels)


def _counter(name: str, value: float, /, **labels: str) -> pb.Metric:
    return _metric(name, value, pb.COUNTER, **labels)


def _metric(name: str, value: float, kind: pb.MetricType, /, **labels: str) -> pb.Metric:
    return pb.Metric(name=name, value=value, labels=labels, type=kind)
