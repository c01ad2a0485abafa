"""Health of an agent that was started beside an NGINX which is not its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from fleetplane.domains.proxies.agent.observing.observed import NginxLook, ObservedNginx
from fleetplane.domains.proxies.agent.observing.takeover import Takeover, TakeoverPhase
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.node.host.proc import running_seconds

RATE_SECONDS: Final = 1.0
_OWN_ALERTS: Final = frozenset({"nginx_down", "nginx_broken"})


class ObservingReports:
    """What the agent's own observer reports, with what is seen of the other NGINX in its place."""

    def __init__(
        self,
        *,
        takeover: Takeover,
        observed: ObservedNginx,
        own: Callable[[], Awaitable[pb.HealthReport]],
        clock: Clock,
    ) -> None:
        self._takeover = takeover
        self._observed = observed
        self._own = own
        self._clock = clock
        self._last: tuple[int, float, int] | None = None
        self._rate = 0.0

    async def health(self) -> pb.HealthReport:
        report = await self._own()
        look = await self._observed.look()
        report.observation.CopyFrom(self._observed.told(look))
        report.observation.state = self._takeover.shown_phase
        report.observation.error = self._takeover.record.error
        alerts = [] if self._takeover.is_ours else [one for one in report.alerts if one.id not in _OWN_ALERTS]
        if self._takeover.is_ours:
            alerts = [*report.alerts, *self._second(look)]
        else:
            report.config_version, report.config_checksum = 0, ""
            report.nginx.CopyFrom(await self._nginx(look))
            alerts += self._missing(look)
        del report.alerts[:]
        report.alerts.extend(alerts)
        return report

    def _missing(self, look: NginxLook) -> list[pb.Alert]:
        if self._takeover.record.phase is not TakeoverPhase.OBSERVING and self._takeover.record.error:
            return [self._alert("observed_not_started", self._takeover.record.error)]
        return [self._alert("nginx_down", "NGINX is not running")] if look.origin is None else []

    def _second(self, look: NginxLook) -> list[pb.Alert]:
        """Somebody started the NGINX again that was taken over."""
        known, found = self._takeover.record.origin, look.origin
        if found is None or (known is not None and (known.pid, known.started) == (found.pid, found.started)):
            return []
        words = "the NGINX that was taken over runs again; disable its service, or give it back"
        return [self._alert("observed_runs", words)]

    def _alert(self, identity: str, words: str) -> pb.Alert:
        now = self._clock.now_ns() // 1_000_000
        return pb.Alert(id=identity, severity="critical", message=words[:1000], timestamp=now)

    async def _nginx(self, look: NginxLook) -> pb.NginxStatus:
        origin = look.origin
        if origin is None:
            return pb.NginxStatus(is_running=False)
        figures = await self._observed.figures(look)
        if figures is not None:
            self._count(origin.started, figures.requests)
        return pb.NginxStatus(
            is_running=True,
            pid=origin.pid,
            uptime_seconds=running_seconds(origin.started),
            active_connections=figures.active if figures is not None else 0,
            total_requests=figures.requests if figures is not None else 0,
            requests_per_second=self._rate if figures is not None else 0.0,
        )

    def _count(self, started: int, requests: int) -> None:
        now = self._clock.monotonic()
        if self._last is None or self._last[0] != started:
            self._last, self._rate = (started, now, requests), 0.0
        elif now - self._last[1] >= RATE_SECONDS:
            self._rate = max(0.0, (requests - self._last[2]) / (now - self._last[1]))
            self._last = (started, now, requests)
