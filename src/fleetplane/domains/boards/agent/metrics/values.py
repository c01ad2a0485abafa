"""What is measured of a board, as plain values, and the arithmetic that makes shares of counters. Pure.

A group that could not be read is None or empty and named in `Snapshot.unavailable`, because a zero by
itself might be a measurement. Percents are 0 to 100, temperatures degrees Celsius.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from fleetplane.node.host.psutil_host import CpuTimes, Disk, LoadAverage, MemoryUse, NetworkInterface, percent

HOT_CELSIUS: Final = 80.0
"""Where the boards' firmware begins to slow the processor down."""
PROCESSOR_ZONES: Final = ("cpu", "soc", "gpu", "pkg", "core")
"""Parts of the names of zones that lie on the processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """Shares of the interval between two looks."""

    usage_percent: float
    per_core_percent: tuple[float, ...]
    user_percent: float
    system_percent: float
    idle_percent: float
    iowait_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Zone:
    name: str
    celsius: float
    critical_celsius: float | None = None

    @property
    def status(self) -> str:
        if self.critical_celsius is not None and self.celsius >= self.critical_celsius:
            return "critical"
        return "hot" if self.celsius >= HOT_CELSIUS else "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    total: int
    running: int
    sleeping: int
    stopped: int
    zombie: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """What the firmware says of its supply and its clock: now, and ever since boot."""

    raw: int
    under_voltage_now: bool
    frequency_capped_now: bool
    throttled_now: bool
    soft_temp_limit_now: bool
    under_voltage_seen: bool
    frequency_capped_seen: bool
    throttled_seen: bool
    soft_temp_limit_seen: bool

    @classmethod
    def of(cls, raw: int) -> Power:
        """From the firmware's word: bits 0 to 3 are now, 16 to 19 the same since boot."""
        return cls(
            raw=raw,
            under_voltage_now=bool(raw & 1 << 0),
            frequency_capped_now=bool(raw & 1 << 1),
            throttled_now=bool(raw & 1 << 2),
            soft_temp_limit_now=bool(raw & 1 << 3),
            under_voltage_seen=bool(raw & 1 << 16),
            frequency_capped_seen=bool(raw & 1 << 17),
            throttled_seen=bool(raw & 1 << 18),
            soft_temp_limit_seen=bool(raw & 1 << 19),
        )


class Reserve(StrEnum):
    """How much of a card's spare blocks is used up, in the card's own three words."""

    NORMAL = "normal"
    WARNING = "warning"
    URGENT = "urgent"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDevice:
    """One block device. Wear is what the device admits, and SD cards admit nothing."""

    name: str
    kind: str
    """`sd`, `mmc`, `nvme` or `disk`."""
    bytes_read: int
    bytes_written: int
    life_used_percent: int | None = None
    """The upper end of the device's own estimate, in steps of ten; 110 when it is past its life."""
    reserve: Reserve | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """What does not change until the next boot."""

    hostname: str = ""
    architecture: str = ""
    kernel_version: str = ""
    os_version: str = ""
    cpu_cores: int = 0
    model: str = ""
    serial_number: str = ""
    boot_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    at_ns: int
    board: Board = field(default_factory=Board)
    uptime_seconds: int = 0
    cpu: Cpu | None = None
    memory: MemoryUse | None = None
    disks: tuple[Disk, ...] = ()
    interfaces: tuple[NetworkInterface, ...] = ()
    zones: tuple[Zone, ...] = ()
    load: LoadAverage | None = None
    processes: Processes | None = None
    power: Power | None = None
    under_voltage_alarm: bool | None = None
    """The voltage monitor's own alarm, where the kernel has a driver for it."""
    storage: tuple[BlockDevice, ...] = ()
    root_read_only: bool | None = None
    clock_synchronised: bool | None = None
    unavailable: tuple[str, ...] = ()
    """Names of what could not be read."""

    @property
    def cpu_usage_percent(self) -> float:
        return self.cpu.usage_percent if self.cpu else 0.0

    @property
    def memory_usage_percent(self) -> float:
        return self.memory.usage_percent if self.memory else 0.0

    @property
    def temperature_celsius(self) -> float:
        """The temperature of the hottest processor zone, or of any zone where none is marked as such."""
        on_processor = [zone for zone in self.zones if any(part in zone.name for part in PROCESSOR_ZONES)]
        return max((zone.celsius for zone in on_processor or self.zones), default=0.0)

    @property
    def root_disk_usage_percent(self) -> float:
        return next((disk.usage_percent for disk in self.disks if disk.mountpoint == "/"), 0.0)


def cpu_shares(
    before: CpuTimes, after: CpuTimes, cores_before: tuple[CpuTimes, ...], cores_after: tuple[CpuTimes, ...]
) -> Cpu | None:
    """What the processors did between two looks; None when no time has passed between them."""
    whole = after.whole - before.whole
    if whole <= 0:
        return None

    def share(difference: float) -> float:
        return percent(max(0.0, difference), whole)

    idle, iowait = after.idle - before.idle, after.iowait - before.iowait

    cores = zip(cores_before, cores_after, strict=False)  # a core may have come or gone in between
    return Cpu(
        usage_percent=_busy(before, after),
        per_core_percent=tuple(_busy(*pair) for pair in cores),
        user_percent=share(after.user - before.user),
        system_percent=share(after.system - before.system),
        # The kernel may count time over from one of these two to the other, which is not to be told twice.
        idle_percent=share(idle + min(0.0, iowait)),
        iowait_percent=share(iowait + min(0.0, idle)),
    )


def _busy(before: CpuTimes, after: CpuTimes) -> float:
    whole = after.whole - before.whole
    idle = after.idle + after.iowait - before.idle - before.iowait
    return percent(whole - idle, whole)
