"""Time series and log lines: batched writes, retention, range queries."""

from __future__ import annotations

from fleetplane.kernel.telemetry.telemetry import Telemetry
from fleetplane.kernel.telemetry.values import (
    FoundLine,
    LinePage,
    LineQuery,
    LogRecord,
    Point,
    PointBucket,
    Sample,
    TelemetryLimits,
    TelemetryStatistics,
)

__all__ = [
    "FoundLine",
    "LinePage",
    "LineQuery",
    "LogRecord",
    "Point",
    "PointBucket",
    "Sample",
    "Telemetry",
    "TelemetryLimits",
    "TelemetryStatistics",
]
