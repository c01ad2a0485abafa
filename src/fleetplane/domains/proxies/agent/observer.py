"""What the agent reports of NGINX and of the machine: health, measurements, alerts.

Measurements have the names that NGINX's own exporter made customary. An alert has one id as long as its
cause lasts, so that the server can tell a repetition from news; a figure must fall a little below the
threshold that raised an alert before the alert ends.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Final

from fleetplane.domains.proxies.agent.log_shipping import (
    BUCKETS_SECONDS,
    AccessLog,
    LoggedTraffic,
    Shipper,
)
from fleetplane.domains.proxies.agent.nginx.applier import VersionApplier
from fleetplane.domains.proxies.agent.nginx.control import Nginx
from fleetplane.domains.proxies.agent.nginx.http_get import StubStatus
from fleetplane.domains.proxies.agent.nginx.processes import Master
from fleetplane.domains.proxies.agent.outbox import ProxyOutbox
from fleetplane.domains.proxies.agent.prober import UpstreamProber
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.node.host import proc
from fleetplane.node.host.proc import CpuUsage, running_seconds

HYSTERESIS_POINTS: Final = 5.0
EXPIRY_WARNING_DAYS: Final = 14.0
EXPIRY_CRITICAL_DAYS: Final = 3.0
_DAY_MS: Final = 86_400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    id: str
    severity: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageThreshold:
    id: str
    what: str
    warning: float
    critical: float


THRESHOLDS: Final = (
    UsageThreshold(id="cpu_high", what="CPU usage", warning=80.0, critical=95.0),
    UsageThreshold(id="memory_high", what="memory usage", warning=85.0, critical=95.0),
    UsageThreshold(id="disk_high", what="disk usage", warning=85.0, critical=95.0),
)


@dataclass(slots=True)
class UsageAlerts:
    """Alerts on percentages, with memory of which are on."""

    _severities: dict[str, str] = field(default_factory=dict)

    def judge(self, percents: dict[str, float]) -> list[Alert]:
        """`percents` by the threshold's id."""
        alerts = []
        for threshold in THRESHOLDS:
            percent = percents.get(threshold.id, 0.0)
            severity = self._severity(threshold, percent)
            if severity:
                self._severities[threshold.id] = severity
                message = f"High {threshold.what}: {percent:.0f}%"
                alerts.append(Alert(id=threshold.id, severity=severity, message=message))
            else:
                self._severities.pop(threshold.id, None)
        return alerts

    def _severity(self, threshold: UsageThreshold, percent: float) -> str:
        was = self._severities.get(threshold.id, "")
        critical = threshold.critical - (HYSTERESIS_POINTS if was == "critical" else 0.0)
        warning = threshold.warning - (HYSTERESIS_POINTS if was else 0.0)
        return "critical" if percent >= critical else "warning" if percent >= warning else ""


def expiring(certificates: Iterable[tuple[str, str, int]], *, now_ms: int) -> list[Alert]:
    """From (id, domain, end in milliseconds) of what is served; 0 means that nobody said."""
    alerts = []
    for identity, domain, ends_ms in certificates:
        days = (ends_ms - now_ms) / _DAY_MS
        if ends_ms and days < EXPIRY_WARNING_DAYS:
            severity = "critical" if days < EXPIRY_CRITICAL_DAYS else "warning"
            words = f"ends in {days:.1f} days" if days > 0 else "has ended"
            message = f"The certificate of {domain} {words}"
            alerts.append(Alert(id=f"certificate_expiring:{identity}", severity=severity, message=message))
    return alerts


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUsage:
    cpu_percent: float
    memory_used_bytes: int
    memory_total_bytes: int
    disk_used_bytes: int
    disk_total_bytes: int
    load_1m: float

    def percents(self) -> dict[str, float]:
        """By the id of the alert they may raise."""
        return {
            "cpu_high": self.cpu_percent,
            "memory_high": _percent(self.memory_used_bytes, self.memory_total_bytes),
            "disk_high": _percent(self.disk_used_bytes, self.disk_total_bytes),
        }


class UsageSampler:
    """CPU usage is measured since the last call, so there must be only one caller."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._usage = CpuUsage()
        self._usage.look()

    def __repr__(self) -> str:
        return f"<Machine disk of {self._folder}>"

    def look(self) -> NodeUsage:
        """0 for what the machine does not tell."""
        memory, disk = proc.memory(), shutil.disk_usage(self._folder)
        return NodeUsage(
            cpu_percent=round(self._usage.look().get("cpu", 0.0), 1),
            memory_used_bytes=memory.used_bytes if memory else 0,
            memory_total_bytes=memory.total_bytes if memory else 0,
            disk_used_bytes=disk.used,
            disk_total_bytes=disk.total,
            load_1m=os.getloadavg()[0],
        )


def _percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 0.0


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


RATE_SECONDS: Final = 1.0
"""The least that a rate of requests is taken over."""
MESSAGE_LIMIT: Final = 1000
"""Characters of an alert; the server keeps as many."""


class Observer:
    def __init__(
        self,
        *,
        applier: VersionApplier,
        nginx: Nginx,
        prober: UpstreamProber,
        access_log: AccessLog,
        shippers: tuple[Shipper, ...],
        outbox: ProxyOutbox,
        machine: UsageSampler,
        clock: Clock,
    ) -> None:
        self._applier = applier
        self._nginx = nginx
        self._prober = prober
        self._access_log = access_log
        self._shippers = shippers
        self._outbox = outbox
        self._machine = machine
        self._clock = clock
        self._reading = machine.look()
        self._figures = UsageAlerts()
        self._since: dict[str, int] = {}
        """When each alert began."""
        self._rate = 0.0
        self._last: tuple[float, int] | None = None
        self._master: Master | None = None
        self.drifted = False

    def __repr__(self) -> str:
        return f"<Observer alerts={sorted(self._since)} rate={self._rate:.1f}/s>"

    # Figures.

    async def _count(self) -> StubStatus | None:
        """NGINX's figures; the rate of requests since the last look is worked out on the way."""
        master = self._nginx.master()
        if master != self._master:  # its counters began anew
            self._master, self._last = master, None
        figures = await self._nginx.figures() if master is not None else None
        if figures is None:
            self._rate = 0.0
            return None
        now, requests = self._clock.monotonic(), figures.requests - self._nginx.asked
        if self._last is None:
            self._last = (now, requests)
        elif now - self._last[0] >= RATE_SECONDS:
            self._rate = max(0.0, (requests - self._last[1]) / (now - self._last[0]))
            self._last = (now, requests)
        return figures

    async def measurements(self) -> pb.MetricsBatch:
        figures = await self._count()
        tails = [self._access_log.tail]
        return batch(
            at_ms=self._now_ms(),
            figures=figures,
            own_requests=self._nginx.asked,
            traffic=self._access_log.traffic,
            reading=self._reading,
            servers=self._prober.verdicts.states(),
            dropped={
                "events": self._outbox.dropped,
                "log_bytes": sum(tail.lost_bytes for tail in tails),
                "log_lines": sum(shipper.refused_lines for shipper in self._shippers)
                + sum(tail.oversize_lines for tail in tails)
                + self._access_log.traffic.unreadable,
            },
        )

    # Health.

    async def health(self) -> pb.HealthReport:
        figures = await self._count()
        self._reading = await asyncio.to_thread(self._machine.look)
        live = self._applier.live
        return pb.HealthReport(
            nginx=self._nginx_status(figures),
            system=_system(self._reading),
            config_checksum=live.manifest.checksum if live is not None else "",
            config_version=live.manifest.version if live is not None else 0,
            alerts=self._dated(self._alerts()),
        )

    def _nginx_status(self, figures: StubStatus | None) -> pb.NginxStatus:
        master = self._master
        return pb.NginxStatus(
            is_running=master is not None,
            pid=master.pid if master is not None else 0,
            uptime_seconds=running_seconds(master.started) if master is not None else 0,
            active_connections=max(0, figures.active - 1) if figures is not None else 0,
            total_requests=max(0, figures.requests - self._nginx.asked) if figures is not None else 0,
            requests_per_second=self._rate,
        )

    def _alerts(self) -> list[Alert]:
        live = self._applier.live
        found = self._figures.judge(self._reading.percents())
        if self._master is None:
            words = "NGINX was stopped by a command" if self._applier.stopped else "NGINX is not running"
            found.append(Alert(id="nginx_down", severity="critical", message=words))
        if self._applier.broken:
            found.append(Alert(id="nginx_broken", severity="critical", message=self._applier.broken))
        if self.drifted:
            words = "The configuration on disk was changed by hand"
            found.append(Alert(id="config_drift", severity="warning", message=words))
        for name in sorted(name for shipper in self._shippers for name in shipper.refused_files):
            words = f"{name} is a link or no ordinary file: it is not read as a log"
            found.append(Alert(id=f"log_refused:{name}", severity="warning", message=words))
        for upstream in sorted(self._prober.verdicts.all_dead()):
            words = f"No server of upstream {upstream} passes its health check; all are kept in service"
            found.append(Alert(id=f"upstream_dead:{upstream}", severity="critical", message=words))
        if live is not None:
            found += [
                Alert(id=identity, severity="warning", message=message)
                for identity, message in live.manifest.notes.items()
            ]
            found += [
                Alert(id=f"set_aside:{one}", severity="error", message=f"Set aside: {words}"[:MESSAGE_LIMIT])
                for one, words in sorted(live.manifest.set_aside.items())
            ]
            served = [(one.id, one.domain, one.expires_at) for one in live.served.certificates.values()]
            found += expiring(served, now_ms=self._now_ms())
        return found

    def _dated(self, alerts: list[Alert]) -> list[pb.Alert]:
        now = self._now_ms()
        self._since = {alert.id: self._since.get(alert.id, now) for alert in alerts}
        return [
            pb.Alert(
                id=alert.id, severity=alert.severity, message=alert.message, timestamp=self._since[alert.id]
            )
            for alert in alerts
        ]

    def _now_ms(self) -> int:
        return self._clock.now_ns() // 1_000_000


def _system(reading: NodeUsage) -> pb.SystemMetrics:
    return pb.SystemMetrics(
        cpu_percent=reading.cpu_percent,
        memory_used_bytes=reading.memory_used_bytes,
        memory_total_bytes=reading.memory_total_bytes,
        disk_used_bytes=reading.disk_used_bytes,
        disk_total_bytes=reading.disk_total_bytes,
        load_average_1m=reading.load_1m,
    )
