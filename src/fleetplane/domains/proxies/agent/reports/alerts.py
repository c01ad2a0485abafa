"""What is worth an alert, and when it is over. Pure.

An alert has one id as long as its cause lasts, so that the server can tell a repetition from news.
Figures must fall a little below the threshold that raised an alert before it goes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

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
