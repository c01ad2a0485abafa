"""Processors, memory and up-time of this machine, read from /proc, and its address towards a server.

Blocking, though never for long. Functions take the folder that /proc lies in, which tests replace.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final


def address_towards(server: str, family: socket.AddressFamily = socket.AddressFamily.AF_UNSPEC) -> str:
    """The address this machine would speak to `server` (host:port) from; empty if there is none.

    Asks the routing table by way of a datagram socket that sends nothing. Blocking on name look-up.
    """
    host, _, port = server.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), family, socket.SOCK_DGRAM)
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[0][4])
            return str(probe.getsockname()[0])
    except (OSError, ValueError, IndexError):
        return ""


ROOT: Final = Path("/")
_IDLE_COLUMNS: Final = (3, 4)
"""Of a line of /proc/stat: idle, and waiting for the disk."""
_COUNTED_COLUMNS: Final = 8
"""Guest time, in the columns behind, is part of user time already."""
KIBIBYTE: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticks:
    busy: int
    whole: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Available:
    """Memory that there is, and what of it could be had without swapping."""

    total_bytes: int
    available_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.available_bytes

    @property
    def used_percent(self) -> float:
        return 100.0 * self.used_bytes / self.total_bytes


class CpuUsage:
    """Usage in percent of the time since this reader's last look, so each reader has one of its own."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._ticks: dict[str, Ticks] = {}

    def __repr__(self) -> str:
        return f"<CpuUsage {self._root} lines={len(self._ticks)}>"

    def look(self) -> dict[str, float]:
        """By line of /proc/stat, the whole (`cpu`) first; empty on the first look, or if it is unreadable."""
        try:
            now = parse_ticks((self._root / "proc/stat").read_text())
        except (OSError, ValueError):
            return {}
        before, self._ticks = self._ticks, now
        return {
            name: percent for name in now if (percent := _percent(before.get(name), now[name])) is not None
        }


def parse_ticks(text: str) -> dict[str, Ticks]:
    """The time counters of /proc/stat, for the machine (`cpu`) and each core (`cpu0`, ...)."""
    found: dict[str, Ticks] = {}
    for line in text.splitlines():
        name, *columns = line.split()
        if not name.startswith("cpu"):
            break  # the processor lines come first
        counts = [int(column) for column in columns[:_COUNTED_COLUMNS]]
        idle = sum(counts[column] for column in _IDLE_COLUMNS if column < len(counts))
        found[name] = Ticks(busy=sum(counts) - idle, whole=sum(counts))
    return found


def _percent(before: Ticks | None, now: Ticks) -> float | None:
    if before is None or now.whole <= before.whole:
        return None
    return max(0.0, min(100.0, 100.0 * (now.busy - before.busy) / (now.whole - before.whole)))


def memory(root: Path = ROOT) -> Available | None:
    """None where /proc does not say."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        total, available = kilobytes["MemTotal"], kilobytes["MemAvailable"]
        if available > total:  # some containers say how much the host has
            available = kilobytes["MemFree"]
    except (OSError, ValueError, KeyError, IndexError):
        return None
    return Available(total_bytes=total * KIBIBYTE, available_bytes=available * KIBIBYTE) if total else None


def memory_bytes() -> int:
    """All of the machine's memory, on any system; 0 where it is not told."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def uptime_seconds(root: Path = ROOT) -> float:
    """Since boot; 0 where it is not told."""
    try:
        return float((root / "proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0


def running_seconds(started_ticks: int, root: Path = ROOT) -> int:
    """How long a process has run, from the tick after boot at which it started."""
    return max(0, int(uptime_seconds(root) - started_ticks / os.sysconf("SC_CLK_TCK")))
