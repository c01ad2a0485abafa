"""What the agent reports of NGINX and of the machine: health, measurements, alerts."""

from __future__ import annotations

import asyncio
from typing import Final

from fleetplane.domains.proxies.agent.nginx.applier import VersionApplier
from fleetplane.domains.proxies.agent.nginx.control import Nginx
from fleetplane.domains.proxies.agent.nginx.processes import Master
from fleetplane.domains.proxies.agent.nginx.stub_status import StubStatus
from fleetplane.domains.proxies.agent.outbox import ProxyOutbox
from fleetplane.domains.proxies.agent.reports import metrics
from fleetplane.domains.proxies.agent.reports.alerts import Alert, UsageAlerts, expiring
from fleetplane.domains.proxies.agent.reports.log_shipping import AccessLog, Shipper
from fleetplane.domains.proxies.agent.reports.machine import NodeUsage, UsageSampler
from fleetplane.domains.proxies.agent.reports.prober import UpstreamProber
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.node.host.proc import running_seconds

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
        return metrics.batch(
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
