"""Measuring in the background: shares of intervals, what is missing, and answers from memory."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.boards.board_trees import FOURTH, plant

from fleetplane.domains.boards.agent.metrics.sampler import FIRST_SECONDS, SLOW_EVERY, MetricsSampler
from fleetplane.domains.boards.agent.metrics.values import Snapshot, Zone, cpu_shares
from fleetplane.kernel.clock import SystemClock
from fleetplane.node.host.psutil_host import (
    CpuTimes,
    Disk,
    LoadAverage,
    MemoryUse,
    NetworkInterface,
    PsutilHost,
)
from fleetplane.sim.clock import VirtualClock

seconds = st.floats(0, 1e7)
times = st.builds(CpuTimes, user=seconds, system=seconds, idle=seconds, iowait=seconds, other=seconds)


def cpu(user: float, idle: float, *, system: float = 0.0, iowait: float = 0.0) -> CpuTimes:
    return CpuTimes(user=user, system=system, idle=idle, iowait=iowait, other=0.0)


class HostDouble:
    """A machine with two cores that works when told to."""

    def __init__(self) -> None:
        self.cores = [cpu(1000.0, 9000.0), cpu(0.0, 10_000.0)]
        self.broken: set[str] = set()
        self.asked: list[str] = []

    def cpu_times(self) -> tuple[CpuTimes, tuple[CpuTimes, ...]]:
        self._answer("cpu_times")
        first, second = self.cores
        return cpu(first.user + second.user, first.idle + second.idle), tuple(self.cores)

    def memory(self) -> MemoryUse:
        self._answer("memory")
        return PsutilHost().memory()

    def disks(self) -> tuple[Disk, ...]:
        self._answer("disks")
        return PsutilHost().disks()

    def interfaces(self) -> tuple[NetworkInterface, ...]:
        self._answer("interfaces")
        return PsutilHost().interfaces()

    def load(self) -> LoadAverage:
        self._answer("load")
        return LoadAverage(load1=0.1, load5=0.2, load15=0.3)

    def _answer(self, name: str) -> None:
        self.asked.append(name)
        if name in self.broken:
            raise OSError(5, "Input/output error")


def test_shares_are_of_the_interval_not_since_boot() -> None:
    before = cpu(user=1000.0, idle=9000.0)
    after = cpu(user=1000.5, idle=9000.25, system=0.15, iowait=0.1)
    share = cpu_shares(before, after, (before,), (after,))
    assert share is not None
    assert share.user_percent == pytest.approx(50.0)
    assert share.system_percent == pytest.approx(15.0)
    assert share.idle_percent == pytest.approx(25.0)
    assert share.iowait_percent == pytest.approx(10.0)
    assert share.usage_percent == pytest.approx(65.0)
    assert share.per_core_percent == pytest.approx((65.0,))


def test_time_that_the_kernel_counts_over_to_another_share_is_not_told_twice() -> None:
    waiting, idle = cpu(user=1000.0, idle=9000.0, iowait=5.0), cpu(user=1000.5, idle=9000.9, iowait=4.6)
    for before, after in ((waiting, idle), (swapped(waiting), swapped(idle))):
        share = cpu_shares(before, after, (before,), (after,))
        assert share is not None
        assert share.user_percent == pytest.approx(50.0)
        assert sorted((share.idle_percent, share.iowait_percent)) == pytest.approx([0.0, 50.0])


def swapped(times: CpuTimes) -> CpuTimes:
    return cpu(user=times.user, idle=times.iowait, iowait=times.idle)


@given(before=times, after=times)
def test_shares_stay_within_their_bounds_whatever_the_counters_do(before: CpuTimes, after: CpuTimes) -> None:
    share = cpu_shares(before, after, (before,), (after, after))
    if share is None:
        assert after.whole <= before.whole
        return
    figures = (share.usage_percent, share.user_percent, share.idle_percent, *share.per_core_percent)
    assert all(0.0 <= figure <= 100.0 for figure in figures)


def sampler(host: HostDouble, root: Path, *, clock: VirtualClock | None = None) -> MetricsSampler:
    return MetricsSampler(
        host, clock or VirtualClock(), root=root, clock_synchronised=lambda: True, interval_seconds=1.0
    )


@pytest.fixture
def fourth(tmp_path: Path) -> Path:
    return plant(tmp_path, FOURTH)


async def run_until_looks(measuring: MetricsSampler, clock: VirtualClock, seconds: float) -> None:
    """Let time pass once the sampler sleeps: it looks on a thread, which simulated time does not wait for."""
    deadline = time.monotonic() + 60
    while not clock.sleepers:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)
    await clock.advance(seconds)


async def test_a_whole_board_is_measured_and_nothing_is_missing(fourth: Path) -> None:
    host, clock = HostDouble(), VirtualClock()
    measuring = sampler(host, fourth, clock=clock)
    assert measuring.latest is None
    running = asyncio.create_task(measuring.run())
    await run_until_looks(measuring, clock, 0.0)
    host.cores = [cpu(1000.15, 9000.05), cpu(0.0, 10_000.2)]
    await run_until_looks(measuring, clock, FIRST_SECONDS)
    snapshot = await measuring.first()
    assert snapshot.unavailable == ()
    assert snapshot.at_ns == clock.now_ns()
    assert snapshot.cpu is not None
    assert snapshot.cpu.per_core_percent == pytest.approx((75.0, 0.0))
    assert snapshot.cpu_usage_percent == pytest.approx(37.5)
    assert snapshot.temperature_celsius == 48.312
    assert snapshot.power is not None
    assert snapshot.under_voltage_alarm is True
    assert snapshot.root_read_only is False
    assert snapshot.clock_synchronised is True
    assert snapshot.uptime_seconds == 3601
    assert snapshot.board.model.startswith("Raspberry Pi 4")
    assert snapshot.processes is not None
    running.cancel()


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        ("cpu_times", "cpu_usage"),
        ("memory", "memory_usage"),
        ("disks", "disk_usage"),
        ("interfaces", "interfaces"),
        ("load", "load"),
    ],
)
def test_a_group_that_fails_is_named_and_holds_nothing_else_up(fourth: Path, broken: str, name: str) -> None:
    host = HostDouble()
    measuring = sampler(host, fourth)
    measuring.look()
    host.broken.add(broken)
    host.cores[0] = cpu(1001.0, 9001.0)
    for _ in range(SLOW_EVERY):
        snapshot = measuring.look()
        host.cores[0] = cpu(host.cores[0].user + 1, host.cores[0].idle)
    assert name in snapshot.unavailable
    assert set(snapshot.unavailable) == {name}
    assert snapshot.power is not None
    host.broken.clear()
    for _ in range(SLOW_EVERY + 1):
        snapshot = measuring.look()
        host.cores[0] = cpu(host.cores[0].user + 1, host.cores[0].idle)
    assert snapshot.unavailable == ()


def test_a_bare_machine_names_everything_it_does_not_have(tmp_path: Path) -> None:
    measuring = MetricsSampler(HostDouble(), VirtualClock(), root=tmp_path, clock_synchronised=lambda: None)
    assert set(measuring.look().unavailable) == {
        "cpu_usage",
        "uptime_seconds",
        "temperature",
        "model",
        "serial_number",
        "boot_id",
        "os_version",
        "processes",
        "power",
        "under_voltage_alarm",
        "storage",
        "root_read_only",
        "clock_synchronised",
    }


def test_what_hardly_moves_is_looked_at_less_often(fourth: Path) -> None:
    host = HostDouble()
    measuring = sampler(host, fourth)
    for _ in range(2 * SLOW_EVERY):
        measuring.look()
    assert host.asked.count("memory") == 2 * SLOW_EVERY
    assert host.asked.count("disks") == 2


def test_the_hottest_zone_on_the_processor_is_the_temperature() -> None:
    zones = (
        Zone(name="nvme Composite", celsius=70.0),
        Zone(name="cpu-thermal", celsius=50.0),
        Zone(name="gpu-thermal", celsius=55.0),
    )
    assert Snapshot(at_ns=0, zones=zones).temperature_celsius == 55.0
    assert Snapshot(at_ns=0, zones=zones[:1]).temperature_celsius == 70.0
    assert Snapshot(at_ns=0).temperature_celsius == 0.0


async def test_this_machine_is_measured_and_asking_costs_nothing() -> None:
    measuring = MetricsSampler(PsutilHost(), SystemClock())
    running = asyncio.create_task(measuring.run())
    snapshot = await measuring.first()
    took = []
    for _ in range(100):
        started = time.perf_counter()
        assert await measuring.first() is not None
        assert measuring.latest is not None
        took.append(time.perf_counter() - started)
    assert min(took) < 0.050
    assert snapshot.cpu is not None
    assert snapshot.memory is not None
    assert snapshot.memory.total_bytes > snapshot.memory.available_bytes > 0
    assert any(disk.mountpoint == "/" and disk.inodes_total >= disk.inodes_used for disk in snapshot.disks)
    assert all(interface.name != "lo" for interface in snapshot.interfaces)
    assert snapshot.processes is not None
    assert snapshot.processes.running + snapshot.processes.sleeping >= 1
    running.cancel()
