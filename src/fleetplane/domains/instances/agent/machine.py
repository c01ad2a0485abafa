"""What the machine says of itself: load, memory, network and up-time, read from /proc and /sys.

Every figure is optional. A machine that lacks one, such as a container without conntrack, still
reports the others. Usage is in percent of the time since the last look.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

INTERFACE_COUNTERS: Final = (
    "rx_bytes",
    "tx_bytes",
    "rx_packets",
    "tx_packets",
    "rx_dropped",
    "tx_dropped",
)
_IDLE_COLUMNS: Final = (3, 4)
"""Of a line of /proc/stat: idle, and waiting for the disk."""
_COUNTED_COLUMNS: Final = 8
"""Guest time, in the columns behind, is part of user time already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticks:
    busy: int
    whole: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look at the machine; what could not be read is None or an error in words."""

    uptime_seconds: float = 0.0
    cpu_percent: float | None = None
    core_percents: tuple[float, ...] = ()
    memory_percent: float | None = None
    interface: str = ""
    interface_counters: dict[str, int] = field(default_factory=dict)
    interface_error: str = ""
    conntrack_count: int | None = None
    conntrack_max: int | None = None
    conntrack_error: str = ""
    ebpf_error: str = ""


class Machine:
    """Reads the figures below `root`, which tests replace. Blocking, though never for long."""

    def __init__(self, *, interface: str = "", ebpf_counters: str = "", root: Path = Path("/")) -> None:
        """Counters of connections that a kernel program keeps are not read; who asks for them is told."""
        self._ebpf_error = f"{ebpf_counters}: counters of this kind are not read" if ebpf_counters else ""
        self._interface = interface
        self._root = root
        self._ticks: dict[str, Ticks] = {}

    def __repr__(self) -> str:
        return f"<Machine {self._root} interface={self._interface or 'none'}>"

    def look(self) -> Reading:
        percents = self._cpu_percents()
        counters, interface_error = self._interface_counters()
        count, most, conntrack_error = self._conntrack()
        return Reading(
            uptime_seconds=self._uptime(),
            cpu_percent=percents.pop("cpu", None),
            core_percents=tuple(percents.values()),
            memory_percent=self._memory_percent(),
            interface=self._interface,
            interface_counters=counters,
            interface_error=interface_error,
            conntrack_count=count,
            conntrack_max=most,
            conntrack_error=conntrack_error,
            ebpf_error=self._ebpf_error,
        )

    def _cpu_percents(self) -> dict[str, float]:
        """By line of /proc/stat, the whole first. Empty on the first look, which has nothing to compare."""
        try:
            now = parse_ticks((self._root / "proc/stat").read_text())
        except (OSError, ValueError):
            return {}
        before, self._ticks = self._ticks, now
        return {
            name: percent for name in now if (percent := _percent(before.get(name), now[name])) is not None
        }

    def _memory_percent(self) -> float | None:
        try:
            lines = (self._root / "proc/meminfo").read_text().splitlines()
            kilobytes = {
                name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)
            }
            return 100.0 * (1 - kilobytes["MemAvailable"] / kilobytes["MemTotal"])
        except (OSError, ValueError, KeyError, IndexError, ZeroDivisionError):
            return None

    def _uptime(self) -> float:
        try:
            return float((self._root / "proc/uptime").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return 0.0

    def _interface_counters(self) -> tuple[dict[str, int], str]:
        if not self._interface:
            return {}, ""
        folder = self._root / "sys/class/net" / self._interface / "statistics"
        try:
            return {name: int((folder / name).read_text()) for name in INTERFACE_COUNTERS}, ""
        except (OSError, ValueError) as error:
            return {}, f"interface {self._interface}: {error}"

    def _conntrack(self) -> tuple[int | None, int | None, str]:
        folder = self._root / "proc/sys/net/netfilter"
        try:
            count = int((folder / "nf_conntrack_count").read_text())
            return count, int((folder / "nf_conntrack_max").read_text()), ""
        except FileNotFoundError:
            return None, None, ""  # no connection tracking on this machine
        except (OSError, ValueError) as error:
            return None, None, f"conntrack: {error}"


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


def address_towards(server: str, family: socket.AddressFamily) -> str:
    """The address this machine would speak to `server` (host:port) from; empty if there is none.

    Asks the routing table by way of a datagram socket that sends nothing. Blocking on name look-up.
    """
    host, _, port = server.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), family, socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(found[0][4])
            return str(probe.getsockname()[0])
    except (OSError, ValueError, IndexError):
        return ""
