"""What is measured of a machine, as plain values. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """Seconds since boot, of one core or of all."""

    user: float
    system: float
    idle: float
    iowait: float
    other: float
    """Interrupts and stolen time; guest time is user time already."""

    @property
    def whole(self) -> float:
        return self.user + self.system + self.idle + self.iowait + self.other


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    total_bytes: int
    available_bytes: int
    used_bytes: int
    free_bytes: int
    cached_bytes: int
    buffers_bytes: int
    usage_percent: float
    swap_total_bytes: int
    swap_used_bytes: int
    swap_usage_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    device: str
    mountpoint: str
    filesystem: str
    total_bytes: int
    used_bytes: int
    free_bytes: int
    usage_percent: float
    inodes_total: int
    inodes_used: int
    inodes_free: int
    inodes_usage_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkInterface:
    """Counters since boot."""

    name: str
    bytes_sent: int
    bytes_recv: int
    packets_sent: int
    packets_recv: int
    err_in: int
    err_out: int
    drop_in: int
    drop_out: int
    addresses: tuple[str, ...] = ()
    mac_address: str = ""
    up: bool = False
    mtu: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadAverage:
    load1: float
    load5: float
    load15: float


def percent(part: float, whole: float) -> float:
    return min(100.0, max(0.0, 100.0 * part / whole)) if whole > 0 else 0.0
