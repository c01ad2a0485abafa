from __future__ import annotations

import asyncio
import threading

import pytest

from fleetplane.domains.gpus.agent import driver
from fleetplane.domains.gpus.agent.driver import EventMonitor, GpusLost, Occurrence, WaitFailed
from fleetplane.domains.gpus.agent.health import GpuUuid
from fleetplane.domains.gpus.agent.library import Device, DriverError, DriverEvent, DriverEventKind, GpuLost

XID = DriverEvent(uuid=GpuUuid("GPU-1"), kind=DriverEventKind.XID, data=79)


class ScriptedEvents:
    """Answers each wait with the next of a script, then with silence or by hanging."""

    def __init__(self, *script: DriverEvent | Exception, hang: bool = False) -> None:
        self._script = list(script)
        self._hang = hang
        self.waiting = threading.Event()
        self.released = threading.Event()
        self.closed = threading.Event()

    def add(self, device: Device, kinds: DriverEventKind) -> None:
        raise NotImplementedError

    def wait(self, timeout_milliseconds: int) -> DriverEvent | None:
        if self._script:
            answer = self._script.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        self.waiting.set()
        self.released.wait(None if self._hang else timeout_milliseconds / 1000)
        return None

    def close(self) -> None:
        self.closed.set()


async def collect(events: ScriptedEvents, count: int) -> list[Occurrence]:
    """What the monitor hands over, until that many came."""
    heard: list[Occurrence] = []
    enough = asyncio.Event()

    async def handle(occurrence: Occurrence) -> None:
        heard.append(occurrence)
        if len(heard) >= count:
            enough.set()

    monitor = EventMonitor(events, {}, handle)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(monitor.run())
        await enough.wait()
        task.cancel()
    assert not monitor.stuck
    return heard


async def test_failures_of_a_wait_are_told_and_the_waiting_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "ERROR_PAUSE_SECONDS", 0.01)
    events = ScriptedEvents(XID, GpuLost("gone"), DriverError("odd"), XID)
    heard = await collect(events, 4)
    assert heard == [XID, GpusLost(answering={}), WaitFailed(message="odd"), XID]
    assert events.closed.is_set()


async def test_events_are_handed_over_one_at_a_time() -> None:
    inside = 0
    most = 0
    done = asyncio.Event()
    handled = 0

    async def handle(_occurrence: Occurrence) -> None:
        nonlocal inside, most, handled
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.01)
        inside -= 1
        handled += 1
        if handled == 5:
            done.set()

    monitor = EventMonitor(ScriptedEvents(*[XID] * 5), {}, handle)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(monitor.run())
        await done.wait()
        task.cancel()
    assert most == 1


async def test_a_thread_stuck_in_the_driver_is_left_behind_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "STOP_LIMIT_SECONDS", 0.1)
    events = ScriptedEvents(hang=True)

    async def handle(_occurrence: Occurrence) -> None:
        raise NotImplementedError

    monitor = EventMonitor(events, {}, handle)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(monitor.run())
        await asyncio.to_thread(events.waiting.wait, 60)
        task.cancel()
    assert monitor.stuck  # so the library must not be shut down under it
    assert not events.closed.is_set()
    events.released.set()
    await asyncio.to_thread(events.closed.wait, 60)


async def test_a_defect_in_the_handler_ends_the_monitor_aloud() -> None:
    async def handle(_occurrence: Occurrence) -> None:
        raise ZeroDivisionError

    with pytest.raises(DriverError, match="ZeroDivisionError"):
        await EventMonitor(ScriptedEvents(XID), {}, handle).run()
