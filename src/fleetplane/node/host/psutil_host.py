"""Metrics of this machine by psutil, as plain values. Blocking, though never for long."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Final, Protocol

import psutil


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


LOOPBACK: Final = "lo"
DISKS_LIMIT: Final = 64
INTERFACES_LIMIT: Final = 64
"""A board that runs containers has one for each of them."""


class HostFacts(Protocol):
    """Each question may raise OSError or RuntimeError; then that group is unavailable."""

    def cpu_times(self) -> tuple[CpuTimes, tuple[CpuTimes, ...]]:
        """CPU times of all cores together, and of each."""
        ...

    def memory(self) -> MemoryUse: ...

    def disks(self) -> tuple[Disk, ...]: ...

    def interfaces(self) -> tuple[NetworkInterface, ...]: ...

    def load(self) -> LoadAverage: ...


class PsutilHost:
    def __repr__(self) -> str:
        return f"<PsutilHost psutil {psutil.__version__}>"

    def cpu_times(self) -> tuple[CpuTimes, tuple[CpuTimes, ...]]:
        cores = tuple(_times(core) for core in psutil.cpu_times(percpu=True))
        return _times(psutil.cpu_times()), cores

    def memory(self) -> MemoryUse:
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        return MemoryUse(
            total_bytes=memory.total,
            available_bytes=memory.available,
            used_bytes=memory.used,
            free_bytes=memory.free,
            cached_bytes=getattr(memory, "cached", 0),
            buffers_bytes=getattr(memory, "buffers", 0),
            usage_percent=memory.percent,
            swap_total_bytes=swap.total,
            swap_used_bytes=swap.used,
            swap_usage_percent=swap.percent,
        )

    def disks(self) -> tuple[Disk, ...]:
        """Physical ones, each mount point. One that does not answer does not hide the others."""
        found: list[Disk] = []
        for partition in psutil.disk_partitions(all=False)[:DISKS_LIMIT]:
            try:
                found.append(_disk(partition.device, partition.mountpoint, partition.fstype))
            except OSError:
                continue
        if not any(disk.mountpoint == "/" for disk in found):
            found.insert(0, _disk("", "/", ""))  # in a container the root has no device of its own
        return tuple(found)

    def interfaces(self) -> tuple[NetworkInterface, ...]:
        addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
        found: list[NetworkInterface] = []
        for name, counters in sorted(psutil.net_io_counters(pernic=True).items()):
            if name == LOOPBACK or len(found) >= INTERFACES_LIMIT:
                continue
            known, state = addresses.get(name, []), states.get(name)
            found.append(
                NetworkInterface(
                    name=name,
                    bytes_sent=counters.bytes_sent,
                    bytes_recv=counters.bytes_recv,
                    packets_sent=counters.packets_sent,
                    packets_recv=counters.packets_recv,
                    err_in=counters.errin,
                    err_out=counters.errout,
                    drop_in=counters.dropin,
                    drop_out=counters.dropout,
                    addresses=tuple(
                        known_address.address.partition("%")[0]
                        for known_address in known
                        if known_address.family in (socket.AF_INET, socket.AF_INET6)
                    ),
                    mac_address=next(
                        (entry.address for entry in known if entry.family == psutil.AF_LINK), ""
                    ),
                    up=state.isup if state else False,
                    mtu=state.mtu if state else 0,
                )
            )
        return tuple(found)

    def load(self) -> LoadAverage:
        load1, load5, load15 = os.getloadavg()
        return LoadAverage(load1=load1, load5=load5, load15=load15)


def _times(times: object) -> CpuTimes:
    """Which columns there are depends on the kernel."""

    def named(*names: str) -> float:
        return sum(float(getattr(times, name, 0.0)) for name in names)

    return CpuTimes(
        user=named("user", "nice"),
        system=named("system"),
        idle=named("idle"),
        iowait=named("iowait"),
        other=named("irq", "softirq", "steal"),
    )


def _disk(device: str, mountpoint: str, filesystem: str) -> Disk:
    usage, inodes = psutil.disk_usage(mountpoint), os.statvfs(mountpoint)
    used = inodes.f_files - inodes.f_ffree
    return Disk(
        device=device,
        mountpoint=mountpoint,
        filesystem=filesystem,
        total_bytes=usage.total,
        used_bytes=usage.used,
        free_bytes=usage.free,
        usage_percent=usage.percent,
        inodes_total=inodes.f_files,
        inodes_used=used,
        inodes_free=inodes.f_ffree,
        inodes_usage_percent=percent(used, inodes.f_files),
    )
