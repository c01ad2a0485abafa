"""Alerts: what is wrong with an agent, from its own reports and from thresholds. Pure.

An alert has a stable id per condition, so that a report that repeats it changes nothing. It is
a resource while it is open, and gone when it is resolved. Thresholds have hysteresis: an alert
that was opened by a number ends only once the number has fallen clearly below.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from fleetplane.domains.proxies.kinds import Nothing, Spec
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.resources import Kind, Resource

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


class AlertSpec(Spec, frozen=True):
    """Named by the alert's id, in the agent's scope. Written by the agents' service only."""

    severity: Severity
    message: str
    metric: str | None = None
    """What was measured; None for an alert that the agent raised by itself."""
    value: float | None = None


Alert = Resource[AlertSpec, Nothing]
ALERT: Kind[AlertSpec, Nothing] = Kind("proxy-alert", AlertSpec, Nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    alert: str
    metric: str
    words: str
    warning: float
    critical: float


HYSTERESIS = 5.0
"""Percentage points that a number has to fall below a threshold before its alert ends."""
THRESHOLDS = (
    Threshold(alert="cpu_high", metric="cpu_percent", words="High CPU usage", warning=80, critical=95),
    Threshold(
        alert="memory_high", metric="memory_percent", words="High memory usage", warning=85, critical=95
    ),
    Threshold(alert="disk_high", metric="disk_percent", words="High disk usage", warning=85, critical=95),
)
NGINX_DOWN = "nginx_down"


def current(report: pb.HealthReport, open_: Mapping[str, AlertSpec]) -> dict[str, AlertSpec]:
    """Every alert that should be open after a report."""
    found: dict[str, AlertSpec] = {}
    for identity, spec in (*_measured(report, open_), *_reported(report.alerts)):
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
    changed: dict[str, AlertSpec | None] = dict.fromkeys(open_.keys() - wanted.keys())
    for identity, spec in wanted.items():
        known = open_.get(identity)
        if known is None or known.severity is not spec.severity:
            changed[identity] = spec
    return changed


def _measured(report: pb.HealthReport, open_: Mapping[str, AlertSpec]) -> Iterator[tuple[str, AlertSpec]]:
    system = report.system
    values = {
        "cpu_percent": round(system.cpu_percent, 1) if math.isfinite(system.cpu_percent) else 0.0,
        "memory_percent": _percent(system.memory_used_bytes, system.memory_total_bytes),
        "disk_percent": _percent(system.disk_used_bytes, system.disk_total_bytes),
    }
    for threshold in THRESHOLDS:
        value = values[threshold.metric]
        known = open_.get(threshold.alert)
        severity = _severity(value, threshold, known.severity if known is not None else None)
        if severity is not None:
            message = f"{threshold.words}: {value:g}%"
            yield (
                threshold.alert,
                AlertSpec(severity=severity, message=message, metric=threshold.metric, value=value),
            )
    if report.HasField("nginx") and not report.nginx.is_running:
        yield (
            NGINX_DOWN,
            AlertSpec(
                severity=Severity.CRITICAL, message="NGINX is not running", metric="nginx_running", value=0.0
            ),
        )


def _severity(value: float, threshold: Threshold, before: Severity | None) -> Severity | None:
    critical = threshold.critical - (HYSTERESIS if before is Severity.CRITICAL else 0)
    warning = threshold.warning - (HYSTERESIS if before is not None else 0)
    if value >= critical:
        return Severity.CRITICAL
    return Severity.WARNING if value >= warning else None


def _percent(used: int, total: int) -> float:
    return round(100 * used / total, 1) if total else 0.0


def _reported(alerts: Iterable[pb.Alert]) -> Iterator[tuple[str, AlertSpec]]:
    for alert in alerts:
        if not alert.id or len(alert.id) > ID_LIMIT or "\0" in alert.id:
            continue  # nothing by which the next report could mean the same one
        severity = alert.severity.lower()
        yield (
            alert.id,
            AlertSpec(
                severity=Severity(severity) if severity in list(Severity) else Severity.WARNING,
                message=alert.message[:MESSAGE_LIMIT],
            ),
        )
