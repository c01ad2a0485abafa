"""Pins of boards, read and written for somebody who waits, and brought to what they should be.

A level is written down when the board drives it, not before: a write that fails leaves what was
wanted before, and the controller sees to it that the pin is that. One thing at a time is done about
one device, also by several servers (`turns.py`), so that what is written down last is what was driven last.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final
from weakref import WeakValueDictionary

import msgspec

from fleetplane.domains.boards.access import OPERATOR
from fleetplane.domains.boards.calls.channels import CallOrigin
from fleetplane.domains.boards.calls.errors import AWAY, reason_of
from fleetplane.domains.boards.inventory.boards import SERVER
from fleetplane.domains.boards.kinds import SCOPE
from fleetplane.domains.boards.pins import rules
from fleetplane.domains.boards.pins.client import Hold, PinsOfNode, Read
from fleetplane.domains.boards.pins.devices import Devices
from fleetplane.domains.boards.pins.kinds import (
    Device,
    DeviceType,
    Direction,
    GpioStatus,
    device_number,
    status_of,
)
from fleetplane.domains.boards.pins.rules import Drive, GiveUpPin, LeaveAlone, PinSeen, Wave, Wish
from fleetplane.domains.boards.pins.turns import WAIT_SECONDS, Check, PinBusy, PinTurn, PinTurns
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument
from fleetplane.kernel.telemetry import Point, Sample, Telemetry

SERIES: Final = "gpio"
MESSAGE_LIMIT: Final = 256
READINGS_LIMIT: Final = 1000
"""Of one answer about the past."""
DOUBTS_LIMIT: Final = 4096
"""Boards to be looked at because a write failed; beyond it they wait for their next look."""
OWED_SECONDS: Final = 1.0
"""The lifetime of a lease that is sent to a board only to end it."""

CONTROLLER: Final = CallOrigin(actor=SERVER, role=OPERATOR)
"""What the server does by itself: devices are as operators want them, and boards obey nobody below that."""


class PinDriver:
    def __init__(
        self,
        devices: Devices,
        pins: PinsOfNode,
        turns: PinTurns,
        clock: Clock,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._devices = devices
        self._pins = pins
        self._turns = turns
        self._clock = clock
        self._telemetry = telemetry
        self.doubtful: asyncio.Queue[int] = asyncio.Queue(DOUBTS_LIMIT)
        """Boards with a write of unknown outcome, for the controller to verify; of several servers, the store
        tells it."""
        self._locks: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()
        """Guard: what is written down of a device is what was last done about it."""

    def __repr__(self) -> str:
        return f"<Driver busy={len(self._locks)}>"

    # For somebody who waits.

    async def read(self, number: int, *, asked: CallOrigin, keep: bool = True) -> Read:
        """The level now, of a waveform its duty cycle; `keep` it as a reading."""
        async with self._alone(number, wait_seconds=WAIT_SECONDS):
            device = self._devices.require(number)
            rules.check_active(device)
            if device.spec.device_type is DeviceType.PWM:
                wanted = rules.wish(device)
                duty = wanted.duty_percent if isinstance(wanted, Wave) else 0
                return Read(level=duty, at_ns=self._clock.now_ns())
            spec = device.spec
            if spec.direction is Direction.INPUT and not status_of(device).held:
                async with self._turn(number, lambda found, _: rules.check_active(found)) as turn:
                    await self._bring(turn, rules.wish(turn.device), asked=CONTROLLER)
                device = self._devices.require(number)
            read = await self._pins.read(spec.board, spec.pin, pull=spec.pull, asked=asked)
            await self._noticed(device, read.level, at_ns=read.at_ns)
        if keep:
            self._keep(number, read)
        return read

    async def write(self, number: int, value: int, *, holder: str, asked: CallOrigin) -> Read:
        """Drive a level, or a duty cycle, from now on; `holder` must have the reservation if there is one."""

        def check(device: Device, now_ns: int) -> None:
            rules.check_writable(device, value, holder, now_ns=now_ns)

        async with self._alone(number, wait_seconds=WAIT_SECONDS), self._turn(number, check) as turn:
            device = turn.device
            if status_of(device).owed_lease_id:  # the lease before this one must end at the board first
                await self._bring(turn, GiveUpPin(), asked=asked)
            wanted, hold = self._driving(device, value), self._hold(device)
            try:
                await self._pins.apply(turn, wanted, asked=asked, hold=hold)
            except AWAY:
                await self._doubt(turn)
                raise
            read = Read(level=value, at_ns=self._clock.now_ns())
            await self._devices.written(
                turn,
                value,
                lease_id=hold.id if hold is not None else "",
                at_ns=read.at_ns,
                actor=asked.actor,
            )
        self._keep(number, read)
        return read

    async def reserve(self, number: int, holder: str, *, seconds: float | None, asked: CallOrigin) -> Device:
        """Reserve a pin for one holder. A board that drives the pin under the lease is told first:
        if it cannot be, the lease is not longer than it knows."""

        def check(device: Device, now_ns: int) -> None:
            rules.check_holder(device, holder, now_ns=now_ns)

        async with self._alone(number, wait_seconds=WAIT_SECONDS), self._turn(number, check) as turn:
            device, now_ns = turn.device, self._clock.now_ns()
            if status_of(device).doubted:  # whatever is still on its way must not arrive any more
                await self._bring(turn, rules.wish(device), asked=CONTROLLER)
            hold = self._hold_of_level(device)
            if hold is not None and seconds is not None:
                lease = rules.taken(
                    status_of(device).lease, holder, seconds=seconds, fresh_id=hold.id, now_ns=now_ns
                )
                left = rules.seconds_left(lease, now_ns=now_ns) or seconds
                await self._pins.apply(
                    turn,
                    self._driving(device, device.spec.level or 0),
                    asked=asked,
                    hold=Hold(id=hold.id, seconds=left),
                )
            return await self._devices.reserve(turn, holder, seconds=seconds, actor=asked.actor)

    async def readings(self, number: int, *, from_ns: int, to_ns: int, limit: int) -> Sequence[Sample]:
        """What was kept, newest first."""
        if not 1 <= limit <= READINGS_LIMIT:
            raise InvalidArgument(f"limit must be 1 to {READINGS_LIMIT}", field="limit")
        if self._telemetry is None:
            return ()
        source = str(number)
        found = await self._telemetry.latest(
            SCOPE, SERIES, from_ns=from_ns, to_ns=to_ns, sources=[source], count=limit
        )
        return found.get(source, ())

    # For the controller.

    async def see_to(
        self, number: int, seen: Mapping[int, PinSeen], *, held: FleetplaneError | None = None
    ) -> FleetplaneError | None:
        """Bring a device to what it should be, given what its board says; what is in the way if it cannot be.

        `held` is why nothing may be done now, only looked; the end of a reservation is a promise to whoever
        relies on the pin being safe then, and is kept all the same. Raises only what says nothing about the
        pin: that the board cannot be reached.
        """
        async with self._alone(number):
            device = self._devices.kept(number)
            if device is None:
                return None
            wanted, pin = rules.wish(device), seen.get(device.spec.pin)
            if rules.is_met(wanted, device, pin):
                await self._in_order(device, wanted, pin)
                return None
            if held is not None and not status_of(device).owed_lease_id:
                return held
            try:
                async with self._turn(number, _anything, wait_seconds=0.0, removing=True) as turn:
                    await self._bring(turn, rules.wish(turn.device), asked=CONTROLLER)
            except AWAY:
                raise
            except FleetplaneError as error:
                return error
            return None

    async def sweep(self) -> None:
        """See to devices that a server left without saying what it did."""
        await self._turns.sweep()

    async def away(self, device: Device, error: FleetplaneError) -> None:
        """Note that nothing can be done about a device, or known of it, for now."""
        await self._devices.found(device, _because(error))

    async def _in_order(self, device: Device, wanted: Wish, seen: PinSeen | None) -> None:
        if isinstance(wanted, GiveUpPin):
            await self._given_up(device)
            return

        def step(status: GpioStatus) -> GpioStatus:
            held = status.held if isinstance(wanted, LeaveAlone) else True
            return msgspec.structs.replace(status, held=held, reason="", message="")

        noted = await self._devices.found(device, step, applied=not isinstance(wanted, LeaveAlone))
        shows_level = device.spec.device_type is DeviceType.DIGITAL and status_of(device).held
        if noted is not None and seen is not None and shows_level and device.spec.enabled:
            await self._noticed(noted, seen.level, at_ns=self._clock.now_ns())
            if device.spec.config.sample_rate:
                self._keep(device_number(device), Read(level=seen.level, at_ns=self._clock.now_ns()))

    async def _bring(self, turn: PinTurn, wanted: Wish, *, asked: CallOrigin) -> None:
        device = turn.device
        if isinstance(wanted, LeaveAlone):
            return
        hold = self._owed(device) if isinstance(wanted, GiveUpPin) else self._hold_of_level(device)
        try:
            await self._pins.apply(turn, wanted, asked=asked, hold=hold)
        except FleetplaneError as error:
            await self._devices.found(device, _because(error), turn=turn)
            raise
        if isinstance(wanted, GiveUpPin):
            await self._given_up(device, turn)
            return
        value = float(wanted.level) if isinstance(wanted, Drive) else None
        value = float(wanted.duty_percent) if isinstance(wanted, Wave) else value
        now_ns = self._clock.now_ns()

        def step(status: GpioStatus) -> GpioStatus:
            status = msgspec.structs.replace(status, held=True, reason="", message="")
            return status if value is None else _showing(status, value, at_ns=now_ns)

        await self._devices.found(device, step, applied=True, turn=turn)

    async def _given_up(self, device: Device, turn: PinTurn | None = None) -> None:
        if device.spec.removing:
            await self._devices.forget(device_number(device))
            return

        def step(status: GpioStatus) -> GpioStatus:
            return msgspec.structs.replace(
                status, held=False, value=None, value_at_ns=None, reason="", message="", owed_lease_id=""
            )

        await self._devices.found(device, step, applied=True, turn=turn)

    # What they share.

    @asynccontextmanager
    async def _alone(self, number: int, *, wait_seconds: float | None = None) -> AsyncIterator[None]:
        """Whoever waits gives up after a while: on a board that stalls, every call before takes its time."""
        lock = self._locks.get(number)
        if lock is None:
            lock = self._locks[number] = asyncio.Lock()
        try:
            async with asyncio.timeout(wait_seconds):
                await lock.acquire()
        except TimeoutError:
            raise PinBusy(
                f"others are at the pin of device {number}; nothing was sent", retry_after_seconds=1.0
            ) from None
        try:
            yield
        finally:
            lock.release()

    @asynccontextmanager
    async def _turn(
        self, number: int, check: Check, *, wait_seconds: float = WAIT_SECONDS, removing: bool = False
    ) -> AsyncIterator[PinTurn]:
        """A turn at a device, for whoever is alone with it here."""
        turn = await self._turns.take(number, check, wait_seconds=wait_seconds, removing=removing)
        try:
            yield turn
        finally:
            await self._turns.give_back(turn)

    async def _doubt(self, turn: PinTurn) -> None:
        """Have the controller look at what a board made of an order."""
        if turn.fence is not None:
            with suppress(FleetplaneError):  # else at its next look
                await self._devices.doubted(turn)
        elif not self.doubtful.full():
            self.doubtful.put_nowait(turn.device.spec.board)

    def _driving(self, device: Device, value: int) -> Drive | Wave:
        if device.spec.device_type is DeviceType.PWM:
            return Wave(frequency_hz=device.spec.config.frequency, duty_percent=value)
        return Drive(level=value, pull=device.spec.pull)

    def _hold(self, device: Device) -> Hold | None:
        """The lease that a board should know: one that has an end."""
        now_ns = self._clock.now_ns()
        lease = rules.standing(status_of(device).lease, now_ns=now_ns)
        left = rules.seconds_left(lease, now_ns=now_ns) if lease is not None else None
        if lease is None or left is None:
            return None
        return Hold(id=lease.id, seconds=max(left, 0.001))

    def _hold_of_level(self, device: Device) -> Hold | None:
        """The lease that what is driven ends with."""
        hold = self._hold(device)
        return hold if hold is not None and hold.id == device.spec.lease_id else None

    def _owed(self, device: Device) -> Hold | None:
        owed = status_of(device).owed_lease_id
        return Hold(id=owed, seconds=OWED_SECONDS) if owed else None

    async def _noticed(self, device: Device, level: int, *, at_ns: int) -> None:
        """A level that was read; only a change is written down, so that watching shows changes."""
        if status_of(device).value != float(level) or not status_of(device).held:

            def step(status: GpioStatus) -> GpioStatus:
                held = msgspec.structs.replace(status, held=True)
                return _showing(held, float(level), at_ns=at_ns)

            await self._devices.found(device, step)

    def _keep(self, number: int, read: Read) -> None:
        if self._telemetry is not None:
            point = Point(
                scope=SCOPE, series=SERIES, source=str(number), at_ns=read.at_ns, value=float(read.level)
            )
            self._telemetry.offer(points=[point])


def _anything(_device: Device, _now_ns: int) -> None:
    """The controller brings a device to what it should be, whoever has reserved it."""


def _showing(status: GpioStatus, value: float, *, at_ns: int) -> GpioStatus:
    if status.value == value:
        return status
    return msgspec.structs.replace(status, value=value, value_at_ns=at_ns)


def _because(error: FleetplaneError) -> Callable[[GpioStatus], GpioStatus]:
    """The words stay those of the first time: figures in them that change are no news."""
    reason, message = reason_of(error), error.message[:MESSAGE_LIMIT]

    def step(status: GpioStatus) -> GpioStatus:
        if status.reason == reason:
            return status
        return msgspec.structs.replace(status, reason=reason, message=message)

    return step
