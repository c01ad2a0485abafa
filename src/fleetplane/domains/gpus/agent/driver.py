"""Asking the driver without ever waiting for it on the event loop.

A sick GPU can keep a driver call for minutes, so every call runs on a daemon thread: the loop
stays responsive and the process can end. This module moves facts from the driver to the loop; what
they mean is decided in `health`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from fleetplane.domains.gpus.agent.health import GpuSighting, GpuUuid
from fleetplane.domains.gpus.agent.library import (
    WATCHED_EVENTS,
    Device,
    DriverError,
    DriverEvent,
    DriverEventKind,
    DriverUnavailable,
    EventSet,
    GpuLost,
    Library,
    NotSupported,
    Part,
)
from fleetplane.kernel.errors import FleetplaneError

CALL_LIMIT_SECONDS = 120.0
"""Initialising a driver of eight GPUs without persistence mode takes tens of seconds."""

WAIT_MILLISECONDS = 250
"""One wait for events. It cannot be interrupted, so it bounds how long stopping takes."""

STOP_LIMIT_SECONDS = 3.0
"""Twelve waits. A thread still in the driver by then is left behind, and the driver with it."""

ERROR_PAUSE_SECONDS = 1.0
"""Between two failing waits, which return at once."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusLost:
    """Some GPU is lost; which of ours still answer."""

    answering: Mapping[GpuUuid, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitFailed:
    message: str


Occurrence = DriverEvent | GpusLost | WaitFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class Enumeration:
    driver_version: str
    devices: Mapping[GpuUuid, Device]
    sightings: Mapping[GpuUuid, GpuSighting]
    skipped: int
    """Devices without a readable UUID or parent: they cannot be named, so they cannot be reported."""


async def in_thread(call: Callable[[], T], *, limit_seconds: float = CALL_LIMIT_SECONDS) -> T:
    """Run one blocking driver call on a daemon thread of its own."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(outcome: T | None, error: BaseException | None) -> None:
        if result.done():
            return  # nobody waits any more
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(outcome)  # type: ignore[arg-type]

    def work() -> None:
        outcome: T | None = None
        failure: BaseException | None = None
        try:
            outcome = call()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed: the process is ending
            loop.call_soon_threadsafe(settle, outcome, failure)

    threading.Thread(target=work, name="gpu-driver-call", daemon=True).start()
    try:
        async with asyncio.timeout(limit_seconds):
            return await result
    except TimeoutError:
        raise DriverUnavailable(
            f"the driver did not answer within {limit_seconds:.0f} s", hint="see `dmesg` for what holds it up"
        ) from None


def measured(devices: Mapping[str, Device]) -> dict[str, Mapping[str, float]]:
    """What GPUs measure now, by their names, without those that do not answer. Blocking."""
    found: dict[str, Mapping[str, float]] = {}
    for name, device in devices.items():
        with suppress(FleetplaneError):
            found[name] = device.figures()
    return found


def enumerate_gpus(library: Library) -> Enumeration:
    """Look at every GPU once. Blocking."""
    devices: dict[GpuUuid, Device] = {}
    sightings: dict[GpuUuid, GpuSighting] = {}
    skipped = 0
    for device in library.devices():
        try:
            uuid = device.uuid()
        except FleetplaneError:
            skipped += 1
            continue
        try:
            part = device.part_of()
        except FleetplaneError:
            skipped += 1  # a part of nobody knows what
            continue
        devices[uuid] = device
        seen = _look_at(uuid, device)
        sightings[uuid] = seen if part is None else _as_part(seen, part, sightings.get(part.parent))
    return Enumeration(
        driver_version=library.driver_version(), devices=devices, sightings=sightings, skipped=skipped
    )


def _as_part(seen: GpuSighting, part: Part, whole: GpuSighting | None) -> GpuSighting:
    """A MIG device is as sound as the GPU that it is a part of, at best."""
    seen = replace(seen, parent=part.parent, instance=part.instance)
    if whole is None:
        return seen
    return replace(
        seen,
        answering=seen.answering and whole.answering,
        lost=seen.lost or whole.lost,
        retirement_pending=seen.retirement_pending or whole.retirement_pending,
    )


def _look_at(uuid: GpuUuid, device: Device) -> GpuSighting:
    memory_bytes, answering, lost = None, True, False
    try:
        memory_bytes = device.memory_bytes()
    except NotSupported:
        pass  # GPUs that share the machine's memory say so; they are well
    except GpuLost:
        answering, lost = False, True
    except FleetplaneError:
        answering = False
    try:
        product = device.product()
    except FleetplaneError:
        product = "Unknown"
    try:
        retirement_pending = device.retirement_pending()
    except FleetplaneError:
        retirement_pending = False  # most GPUs without ECC memory cannot say
    return GpuSighting(
        uuid=uuid,
        product=product,
        memory_bytes=memory_bytes,
        answering=answering,
        lost=lost,
        retirement_pending=retirement_pending,
    )


def subscribe(library: Library, devices: Mapping[GpuUuid, Device]) -> tuple[EventSet, int] | None:
    """An event set for the GPUs that have events, and their number; None if none has. Blocking."""
    events = library.event_set()
    listening = 0
    for device in devices.values():
        try:
            kinds = device.supported_events() & WATCHED_EVENTS
            if kinds:
                events.add(device, DriverEventKind(kinds))
                listening += 1
        except FleetplaneError:
            continue  # this GPU reports nothing; the others still do
    if listening:
        return events, listening
    events.close()
    return None


class EventMonitor:
    """Waits for driver events on a thread of its own and hands them over one at a time.

    The next wait begins after the loop has dealt with the last event, so a storm of XIDs piles
    up in the driver's bounded queue and not here.
    """

    def __init__(
        self,
        events: EventSet,
        devices: Mapping[GpuUuid, Device],
        handle: Callable[[Occurrence], Coroutine[None, None, None]],
    ) -> None:
        self._events = events
        self._devices = devices
        self._handle = handle
        self._stop = threading.Event()
        self.handed_over = 0
        self.stuck = False
        """After `run`: the thread is still inside the driver, which must then not be shut down."""

    def __repr__(self) -> str:
        return f"<EventMonitor gpus={len(self._devices)} handed_over={self.handed_over}>"

    async def run(self) -> None:
        """Until cancelled. The event set is freed by the thread that waits on it."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        failures: list[Exception] = []

        def work() -> None:
            try:
                self._watch(loop)
            except Exception as error:
                failures.append(error)
            finally:
                with suppress(RuntimeError):  # the loop is closed: the process is ending
                    loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=work, name="gpu-events", daemon=True).start()
        try:
            await ended.wait()
            cause = failures[0] if failures else None
            raise DriverError(f"the thread that waits for GPU events ended: {cause!r}") from cause
        finally:
            self._stop.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_LIMIT_SECONDS):
                    await ended.wait()
            self.stuck = not ended.is_set()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while not self._stop.is_set():
                occurrence = self._wait()
                if occurrence is None:
                    continue
                self._hand_over(occurrence, loop)
                if not isinstance(occurrence, DriverEvent):
                    self._stop.wait(ERROR_PAUSE_SECONDS)
        finally:
            with suppress(FleetplaneError):
                self._events.close()

    def _wait(self) -> Occurrence | None:
        try:
            return self._events.wait(WAIT_MILLISECONDS)
        except GpuLost:
            return GpusLost(answering={uuid: _answers(device) for uuid, device in self._devices.items()})
        except FleetplaneError as error:
            return WaitFailed(message=error.message)

    def _hand_over(self, occurrence: Occurrence, loop: asyncio.AbstractEventLoop) -> None:
        try:
            handed = asyncio.run_coroutine_threadsafe(self._handle(occurrence), loop)
        except RuntimeError:
            return  # the loop is closed: the process is ending
        self.handed_over += 1
        while not self._stop.is_set():
            with suppress(TimeoutError):
                with suppress(CancelledError):  # the loop is being taken down; `run` sets the stop
                    handed.result(timeout=WAIT_MILLISECONDS / 1000)
                return


def _answers(device: Device) -> bool:
    try:
        device.memory_bytes()
    except NotSupported:
        return True
    except FleetplaneError:
        return False
    return True
