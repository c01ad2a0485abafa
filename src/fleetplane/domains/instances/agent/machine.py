"""What the machine says of itself: load, memory, network and up-time, read from /proc and /sys.

Every figure is optional. A machine that lacks one, such as a container without conntrack, still
reports the others. Usage is in percent of the time since the last look.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fleetplane.node.host import proc

INTERFACE_COUNTERS: Final = (
    "rx_bytes",
    "tx_bytes",
    "rx_packets",
    "tx_packets",
    "rx_dropped",
    "tx_dropped",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSample:
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


class MachineSampler:
    """Reads the figures below `root`, which tests replace. Blocking, though never for long."""

    def __init__(self, *, interface: str = "", ebpf_counters: str = "", root: Path = proc.ROOT) -> None:
        """eBPF connection counters are not read; configuring them is reported as an error."""
        self._ebpf_error = f"{ebpf_counters}: counters of this kind are not read" if ebpf_counters else ""
        self._interface = interface
        self._root = root
        self._usage = proc.CpuUsage(root)

    def __repr__(self) -> str:
        return f"<Machine {self._root} interface={self._interface or 'none'}>"

    def look(self) -> MachineSample:
        percents = self._usage.look()
        memory = proc.memory(self._root)
        counters, interface_error = self._interface_counters()
        count, most, conntrack_error = self._conntrack()
        return MachineSample(
            uptime_seconds=proc.uptime_seconds(self._root),
            cpu_percent=percents.pop("cpu", None),
            core_percents=tuple(percents.values()),
            memory_percent=None if memory is None else memory.used_percent,
            interface=self._interface,
            interface_counters=counters,
            interface_error=interface_error,
            conntrack_count=count,
            conntrack_max=most,
            conntrack_error=conntrack_error,
            ebpf_error=self._ebpf_error,
        )

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
