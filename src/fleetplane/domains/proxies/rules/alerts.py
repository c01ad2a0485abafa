"""Alerts: what is wrong with an agent, from its own reports and from thresholds. Pure.

An alert has a stable id per condition, so that a report that repeats it changes nothing. It is
a resource while it is open, and gone when it is resolved. Thresholds have hysteresis: an alert
that was opened by a number ends only once the number has fallen clearly below; and a number is
critical only once it has been so for a while, so that one spike degrades nobody. Where an agent
reports the number, the server's thresholds decide, whatever the agent itself thinks of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from fleetplane.domains.proxies.kinds.records import ProxiesSpec
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.resources import Kind, Nothing, Resource

ALERTS_LIMIT = 64
"""Open per agent; what an agent reports beyond them is not kept."""
ID_LIMIT = 128
MESSAGE_LIMIT = 1024


class Severity(StrEnum):
    """From least to worst."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


RANK = {severity: rank for rank, severity in enumerate(Severity)}
GRAVE = frozenset({Severity.ERROR, Severity.CRITICAL})


class AlertSpec(ProxiesSpec, frozen=True):
    """Named by the alert's id, in the agent's scope. Written by the agents' service only."""

    severity: Severity
    message: str
    metric: str | None = None
    """What was measured; None for an alert that the agent raised by itself."""
    value: float | None = None


Alert = Resource[AlertSpec, Nothing]
ALERT: Kind[AlertSpec, Nothing] = Kind("proxy-alert", AlertSpec, Nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertThreshold:
    alert: str
    metric: str
    words: str
    warning: float
    critical: float


HYSTERESIS = 5.0
"""Percentage points that a number has to fall below a threshold before its alert ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertPolicy:
    """From which percentage on a figure is worth an alert. An operator may set all of it."""

    cpu_warning: float = 80.0
    cpu_critical: float = 95.0
    memory_warning: float = 85.0
    memory_critical: float = 95.0
    disk_warning: float = 85.0
    disk_critical: float = 95.0
    critical_after_seconds: float = 120.0
    """How long without a break a figure is in the critical range before its alert is critical."""

    def thresholds(self) -> Iterator[AlertThreshold]:
        for what, words in (("cpu", "CPU"), ("memory", "memory"), ("disk", "disk")):
            yield AlertThreshold(
                alert=f"{what}_high",
                metric=f"{what}_percent",
                words=f"High {words} usage",
                warning=getattr(self, f"{what}_warning"),
                critical=getattr(self, f"{what}_critical"),
            )


@dataclass(slots=True)
class Heights:
    """Since when figures of one agent are in the critical range."""

    since_ns: dict[str, int] = field(default_factory=dict)

    def lasts(self, alert: str, *, critical: bool, seconds: float, now_ns: int) -> bool:
        """Whether a figure has been critical for long enough; call it with every reported figure."""
        if not critical:
            self.since_ns.pop(alert, None)
            return False
        return now_ns - self.since_ns.setdefault(alert, now_ns) >= seconds * 1e9


NGINX_DOWN = "nginx_down"
MACHINE_ALERT = "machine_contended"
"""Another machine says that it is this agent; see `machines`."""
OF_THE_SERVER = frozenset({MACHINE_ALERT})
"""Raised and ended by the server itself: no report of the agent's says anything about them."""


def current(
    report: pb.HealthReport,
    open_: Mapping[str, AlertSpec],
    *,
    policy: AlertPolicy | None = None,
    heights: Heights | None = None,
    now_ns: int = 0,
) -> dict[str, AlertSpec]:
    """Every alert that should be open after a report; `heights` is remembered from one to the next."""
    policy, heights = policy or AlertPolicy(), heights if heights is not None else Heights()
    measured = _values(report)
    own = {threshold.alert for threshold in policy.thresholds() if threshold.metric in measured}
    found: dict[str, AlertSpec] = {}
    for identity, spec in (
        *_measured(measured, open_, policy, heights, now_ns),
        *_nginx(report),
        *_reported(report.alerts, but=own),
    ):
        known = found.get(identity)
        if known is None:
            if len(found) < ALERTS_LIMIT:
                found[identity] = spec
        elif RANK[spec.severity] > RANK[known.severity]:
            found[identity] = msgspec.structs.replace(known, severity=spec.severity, message=spec.message)
    return found


def differences(
    open_: Mapping[str, AlertSpec], wanted: Mapping[str, AlertSpec]
) -> dict[str, AlertSpec | None]:
    """What to write: an alert opened or of another severity, None for one that ended."""
    changed: dict[str, AlertSpec | None] = dict.fromkeys(open_.keys() - wanted.keys() - OF_THE_SERVER)
    for identity, spec in wanted.items():
        known = open_.get(identity)
        if known is None or known.severity is not spec.severity:
            changed[identity] = spec
    return changed


def _values(report: pb.HealthReport) -> dict[str, float]:
    """The figures that a report has."""
    system = report.system
    found = {}
    if report.HasField("system"):
        found["cpu_percent"] = round(system.cpu_percent, 1) if math.isfinite(system.cpu_percent) else 0.0
    if system.memory_total_bytes:
        found["memory_percent"] = round(100 * system.memory_used_bytes / system.memory_total_bytes, 1)
    if system.disk_total_bytes:
        found["disk_percent"] = round(100 * system.disk_used_bytes / system.disk_total_bytes, 1)
    return found


def _measured(
    values: Mapping[str, float],
    open_: Mapping[str, AlertSpec],
    policy: AlertPolicy,
    heights: Heights,
    now_ns: int,
) -> Iterator[tuple[str, AlertSpec]]:
    for threshold in policy.thresholds():
        value = values.get(threshold.metric, 0.0)
        known = open_.get(threshold.alert)
        before = known.severity if known is not None else None
        severity = _severity(value, threshold, before)
        lasting = heights.lasts(
            threshold.alert,
            critical=severity is Severity.CRITICAL,
            seconds=policy.critical_after_seconds,
            now_ns=now_ns,
        )
        if severity is Severity.CRITICAL and not lasting and before is not Severity.CRITICAL:
            severity = Severity.WARNING
        if severity is not None:
            yield threshold.alert, _spec(threshold, severity, value)


def _spec(threshold: AlertThreshold, severity: Severity, value: float) -> AlertSpec:
    message = f"{threshold.words}: {value:g}%"
    return AlertSpec(severity=severity, message=message, metric=threshold.metric, value=value)


def _nginx(report: pb.HealthReport) -> Iterator[tuple[str, AlertSpec]]:
    if report.HasField("nginx") and not report.nginx.is_running:
        yield (
            NGINX_DOWN,
            AlertSpec(
                severity=Severity.CRITICAL, message="NGINX is not running", metric="nginx_running", value=0.0
            ),
        )


def _severity(value: float, threshold: AlertThreshold, before: Severity | None) -> Severity | None:
    critical = threshold.critical - (HYSTERESIS if before is Severity.CRITICAL else 0)
    warning = threshold.warning - (HYSTERESIS if before is not None else 0)
    if value >= critical:
        return Severity.CRITICAL
    return Severity.WARNING if value >= warning else None


def _reported(alerts: Iterable[pb.Alert], *, but: Collection[str]) -> Iterator[tuple[str, AlertSpec]]:
    for alert in alerts:
        if alert.id in but:
            continue  # the figure itself was reported
        if not alert.id or len(alert.id) > ID_LIMIT or "\0" in alert.id or alert.id in OF_THE_SERVER:
            continue  # nothing by which the next report could mean the same one
        severity = alert.severity.lower()
        yield (
            alert.id,
            AlertSpec(
                severity=Severity(severity) if severity in list(Severity) else Severity.WARNING,
                message=alert.message[:MESSAGE_LIMIT],
            ),
        )
