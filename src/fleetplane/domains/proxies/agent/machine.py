"""The machine's own figures."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
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


class Machine:
    """CPU usage is since the last look, so whoever looks must be the only one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        psutil.cpu_percent(None)

    def __repr__(self) -> str:
        return f"<Machine disk of {self._folder}>"

    def look(self) -> Reading:
        memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(self._folder))
        return Reading(
            cpu_percent=psutil.cpu_percent(None),
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            disk_used_bytes=disk.used,
            disk_total_bytes=disk.total,
            load_1m=os.getloadavg()[0],
        )


def uptime_seconds(started_ticks: int) -> int:
    """Of a process, from the tick after boot at which it started."""
    with Path("/proc/uptime").open() as file:
        since_boot = float(file.read().split()[0])
    return max(0, int(since_boot - started_ticks / os.sysconf("SC_CLK_TCK")))


def _percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 0.0
