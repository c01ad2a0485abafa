"""What agents of instances measure, from the health reports that every generation of them sends. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fleetplane.domains.instances.kinds import HealthReport
from fleetplane.domains.instances.records.reports import ReceivedReport
from fleetplane.fleet.figures import CPU, MEMORY, Measure
from fleetplane.kernel.values.times import NS

PREFIX: Final = "instances"
RATE_MOST: Final = 1e12
"""Bytes of a second that no interface has."""
MEASURES: Final = (
    CPU,
    MEMORY,
    Measure(name="conntrackPercent", title="Tracked connections", unit="%", most=100.0, high=80.0),
    Measure(name="receivedBytesPerSecond", title="Received", unit="B/s", most=RATE_MOST),
    Measure(name="sentBytesPerSecond", title="Sent", unit="B/s", most=RATE_MOST),
    Measure(name="droppedPacketsPerSecond", title="Dropped packets", unit="/s", most=1e9),
)


def figures(report: HealthReport, before: ReceivedReport | None, now_ns: int) -> Mapping[str, float | None]:
    """What one report says, by name; rates since the one before, unless a counter began anew."""
    last = before.report if before is not None else None
    seconds = (now_ns - before.at_ns) / NS if before is not None else 0.0

    def rate(then: int | None, now: int | None) -> float | None:
        return None if then is None or now is None or now < then or seconds <= 0 else (now - then) / seconds

    return {
        CPU.name: report.cpu_usage,
        MEMORY.name: report.memory_usage,
        "conntrackPercent": report.conntrack_percent,
        "receivedBytesPerSecond": rate(last.received_bytes if last else None, report.received_bytes),
        "sentBytesPerSecond": rate(last.sent_bytes if last else None, report.sent_bytes),
        "droppedPacketsPerSecond": rate(last.dropped_packets if last else None, report.dropped_packets),
    }
