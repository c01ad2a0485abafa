"""Time series and log lines: batched writes, retention, range queries."""

from __future__ import annotations

from fleetplane.kernel.telemetry.telemetry import Telemetry
from fleetplane.kernel.telemetry.values import (
    Bucket,
    FoundLine,
    Line,
    LinePage,
    LineQuery,
    Point,
    Sample,
    TelemetryLimits,
    TelemetryStatistics,
)

__all__ = [
    "Bucket",
    "FoundLine",
    "Line",
    "LinePage",
    "LineQuery",
    "Point",
    "Sample",
    "Telemetry",
    "TelemetryLimits",
    "TelemetryStatistics",
]
