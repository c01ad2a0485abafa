"""The machine's own figures."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from fleetplane.node.host import proc
from fleetplane.node.host.proc import CpuUsage


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
