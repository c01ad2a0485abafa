"""Samples metrics in the background, so that requests are answered from memory.

Figures that move are looked at every interval, those that hardly do, or cost much, every few. A group
that fails is left out and named; the others are not held up by it. Everything is read on a thread,
because a network mount or a firmware call may take its time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from fleetplane.domains.boards.agent.metrics import board as board_sources
from fleetplane.domains.boards.agent.metrics.board import Ask, ask_program
from fleetplane.domains.boards.agent.metrics.values import (
    BlockDevice,
    Board,
    Power,
    Processes,
    Snapshot,
    cpu_shares,
)
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Unavailable
from fleetplane.node.host.psutil_host import CpuTimes, Disk, HostFacts

INTERVAL_SECONDS: Final = 1.0
SLOW_EVERY: Final = 5
"""Intervals between two looks at what hardly moves."""
FIRST_SECONDS: Final = 0.2
"""From the start to the first snapshot: shares need two looks."""
FIRST_LIMIT_SECONDS: Final = 10.0
LEAST_INTERVAL_SECONDS: Final = 0.1

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slow:
    """What is looked at every few intervals."""

    board: Board
    disks: tuple[Disk, ...]
    processes: Processes | None
    power: Power | None
    under_voltage_alarm: bool | None
    storage: tuple[BlockDevice, ...]
    root_read_only: bool | None
    clock_synchronised: bool | None
    unavailable: tuple[str, ...]


@dataclass(slots=True)
class _Missing:
    """Collects the names of what could not be read."""

    names: list[str] = field(default_factory=list)

    def __call__(self, name: str, read: Callable[[], T], otherwise: T) -> T:
        """What `read` gives, unless it gives or raises nothing useful."""
        try:
            value = read()
        except (OSError, RuntimeError, ValueError):
            value = otherwise
        if value is None or value == otherwise:
            self.names.append(name)
        return value


class MetricsSampler:
    """`run` it, and ask `latest` or wait for `first`. Nobody else may run it: shares are between looks."""

    def __init__(
        self,
        host: HostFacts,
        clock: Clock,
        *,
        root: Path = Path("/"),
        ask_firmware: Ask = ask_program,
        clock_synchronised: Callable[[], bool | None] = board_sources.clock_synchronised,
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        self._host = host
        self._clock = clock
        self._root = root
        self._ask_firmware = ask_firmware
        self._clock_synchronised = clock_synchronised
        self._interval_seconds = max(LEAST_INTERVAL_SECONDS, interval_seconds)
        self._times: tuple[CpuTimes, tuple[CpuTimes, ...]] | None = None
        self._slow: _Slow | None = None
        self._looks = 0
        self._latest: Snapshot | None = None
        self._ready = asyncio.Event()

    def __repr__(self) -> str:
        return f"<MetricsSampler every {self._interval_seconds:g} s looks={self._looks}>"

    @property
    def latest(self) -> Snapshot | None:
        """The last snapshot; None until the first one is there."""
        return self._latest

    async def first(self) -> Snapshot:
        """The last snapshot, once there is one."""
        if self._latest is None:
            try:
                async with asyncio.timeout(FIRST_LIMIT_SECONDS):
                    await self._ready.wait()
            except TimeoutError:
                raise Unavailable("nothing was measured yet", details={"cause": "starting"}) from None
        assert self._latest is not None
        return self._latest

    async def run(self) -> None:
        """Measure until cancelled."""
        await asyncio.to_thread(self._begin)
        await self._clock.sleep(min(FIRST_SECONDS, self._interval_seconds))
        while True:
            self._latest = await asyncio.to_thread(self.look)
            self._ready.set()
            await self._clock.sleep(self._interval_seconds)

    def _begin(self) -> None:
        self._times = _Missing()("cpu_usage", self._host.cpu_times, None)

    def look(self) -> Snapshot:
        """One look at everything that is due. Blocking."""
        if self._slow is None or self._looks % SLOW_EVERY == 0:
            self._slow = self._look_slowly()
        self._looks += 1
        slow, root, missing = self._slow, self._root, _Missing()
        before, self._times = self._times, missing("cpu_usage", self._host.cpu_times, None)
        cpu = (
            cpu_shares(before[0], self._times[0], before[1], self._times[1])
            if before and self._times
            else None
        )
        if cpu is None and self._times is not None:
            missing.names.append("cpu_usage")
        return Snapshot(
            at_ns=self._clock.now_ns(),
            board=slow.board,
            uptime_seconds=missing("uptime_seconds", lambda: board_sources.uptime_seconds(root), None) or 0,
            cpu=cpu,
            memory=missing("memory_usage", self._host.memory, None),
            disks=slow.disks,
            interfaces=missing("interfaces", self._host.interfaces, ()),
            zones=missing("temperature", lambda: board_sources.zones(root), ()),
            load=missing("load", self._host.load, None),
            processes=slow.processes,
            power=slow.power,
            under_voltage_alarm=slow.under_voltage_alarm,
            storage=slow.storage,
            root_read_only=slow.root_read_only,
            clock_synchronised=slow.clock_synchronised,
            unavailable=(*missing.names, *slow.unavailable),
        )

    def _look_slowly(self) -> _Slow:
        root, missing = self._root, _Missing()
        board = board_sources.board(root)
        missing.names.extend(
            name for name in ("model", "serial_number", "boot_id", "os_version") if not getattr(board, name)
        )
        return _Slow(
            board=board,
            disks=missing("disk_usage", self._host.disks, ()),
            processes=missing("processes", lambda: board_sources.processes(root), None),
            power=missing("power", lambda: board_sources.power(root, self._ask_firmware), None),
            under_voltage_alarm=missing(
                "under_voltage_alarm", lambda: board_sources.under_voltage_alarm(root), None
            ),
            storage=missing("storage", lambda: board_sources.storage(root), ()),
            root_read_only=missing("root_read_only", lambda: board_sources.root_read_only(root), None),
            clock_synchronised=missing("clock_synchronised", self._clock_synchronised, None),
            unavailable=tuple(missing.names),
        )
