"""The methods of `pi_controller.PiControllerService` about GPIO devices, and the service as a whole.

The service is put together from parts. A part is any object with methods named as in the contract; a method
that two parts define is an error, and a method that none defines is answered UNIMPLEMENTED.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from google.protobuf.message import Message

from fleetplane.domains.boards.access import PI_CONTROLLER
from fleetplane.domains.boards.calls.channels import asked_by
from fleetplane.domains.boards.pins.devices import Devices
from fleetplane.domains.boards.pins.driver import PinDriver
from fleetplane.domains.boards.pins.kinds import Device, device_number, status_of
from fleetplane.domains.boards.pins.rules import check_active
from fleetplane.domains.boards.wire import pins as gpio_wire
from fleetplane.domains.boards.wire.message_json import page_of
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    SettingsError,
    Unimplemented,
)
from fleetplane.kernel.values.timestamps import timestamp
from fleetplane.rpc import CallContext


class PiControllerService:
    def __init__(self, parts: Iterable[object]) -> None:
        found = tuple(parts)
        self.missing: list[str] = []
        """Methods that no part has."""
        for method in PI_CONTROLLER.methods:
            offers = [part for part in found if hasattr(part, method.name)]
            if len(offers) > 1:
                names = ", ".join(type(part).__name__ for part in offers)
                raise SettingsError(f"{method.name} is offered by {names}")
            if offers:
                behaviour = getattr(offers[0], method.name)
            else:
                self.missing.append(method.name)
                behaviour = _nowhere(method.name, streaming=method.server_streaming)
            setattr(self, method.name, behaviour)

    def __repr__(self) -> str:
        return f"<PiControllerService missing={len(self.missing)}>"


def _nowhere(name: str, *, streaming: bool) -> Callable[[Message, CallContext], object]:
    def refusal() -> Unimplemented:
        return Unimplemented(f"this server does not offer {name}")

    async def unary(_request: Message, _context: CallContext) -> Message:
        raise refusal()

    async def stream(_request: Message, _context: CallContext) -> AsyncIterator[Message]:
        raise refusal()
        yield  # a generator, although it never gets here

    return stream if streaming else unary


RATE_USUAL: Final = 1
RATE_LIMIT: Final = 20
"""Readings per second of one stream: each is a call to the board."""
STREAMS_LIMIT: Final = 256
STREAMS_PER_DEVICE: Final = 4
KEEP_SECONDS: Final = 1.0
"""Between readings of a stream that are kept."""


class GpioMethods:
    def __init__(self, *, devices: Devices, driver: PinDriver, clock: Clock) -> None:
        self._devices = devices
        self._driver = driver
        self._clock = clock
        self._streams: Counter[int] = Counter()

    def __repr__(self) -> str:
        return f"<GpioMethods streams={self._streams.total()}>"

    # Describing.

    async def CreateGPIODevice(
        self, request: pi.CreateGPIODeviceRequest, context: CallContext
    ) -> pi.GPIODevice:
        if not request.node_id:
            raise InvalidArgument("node_id is required", field="node_id")
        made = await self._devices.create(gpio_wire.created(request), actor=context.principal.name)
        return gpio_wire.device(made)

    async def GetGPIODevice(self, request: pi.GetGPIODeviceRequest, _context: CallContext) -> pi.GPIODevice:
        await self._devices.up_to_date()
        return gpio_wire.device(self._require(request.id))

    async def ListGPIODevices(
        self, request: pi.ListGPIODevicesRequest, _context: CallContext
    ) -> pi.ListGPIODevicesResponse:
        kind = gpio_wire.device_type(request.device_type)
        state = gpio_wire.state(request.status)
        await self._devices.up_to_date()
        found = [
            device
            for device in self._devices.all()
            if (not request.HasField("node_id") or device.spec.board == request.node_id)
            and (kind is None or device.spec.device_type is kind)
            and (state is None or status_of(device).state is state)
        ]
        page = page_of(found, page=request.page, page_size=request.page_size)
        return pi.ListGPIODevicesResponse(
            gpio_devices=[gpio_wire.device(device) for device in page], total_count=len(found)
        )

    async def UpdateGPIODevice(
        self, request: pi.UpdateGPIODeviceRequest, context: CallContext
    ) -> pi.GPIODevice:
        changes = gpio_wire.changes(request)
        self._require(request.id)
        name = context.principal.name
        changed = await self._devices.update(request.id, holder=name, actor=name, **changes)
        return gpio_wire.device(changed)

    async def DeleteGPIODevice(
        self, request: pi.DeleteGPIODeviceRequest, context: CallContext
    ) -> pi.DeleteGPIODeviceResponse:
        await self._devices.up_to_date()
        self._require(request.id)
        name = context.principal.name
        await self._devices.delete(request.id, holder=name, actor=name)
        return pi.DeleteGPIODeviceResponse(success=True)

    # Levels.

    async def ReadGPIO(self, request: pi.ReadGPIORequest, context: CallContext) -> pi.ReadGPIOResponse:
        await self._devices.up_to_date()
        device = self._require(request.id)
        read = await self._driver.read(request.id, asked=asked_by(context.principal))
        return pi.ReadGPIOResponse(
            device_id=request.id, pin=device.spec.pin, value=read.level, timestamp=timestamp(read.at_ns)
        )

    async def WriteGPIO(self, request: pi.WriteGPIORequest, context: CallContext) -> pi.WriteGPIOResponse:
        await self._devices.up_to_date()
        device = self._require(request.id)
        asked = asked_by(context.principal)
        written = await self._driver.write(request.id, request.value, holder=asked.actor, asked=asked)
        return pi.WriteGPIOResponse(
            device_id=request.id,
            pin=device.spec.pin,
            value=written.level,
            timestamp=timestamp(written.at_ns),
        )

    async def StreamGPIOReadings(
        self, request: pi.StreamGPIOReadingsRequest, context: CallContext
    ) -> AsyncIterator[pi.GPIOReading]:
        """Readings until the caller has enough, or the board is lost."""
        await self._devices.up_to_date()
        device = self._devices.require(request.device_id, field="device_id")
        check_active(device)
        if not 0 <= request.sample_rate <= RATE_LIMIT:
            raise InvalidArgument(f"sample_rate must be 0 to {RATE_LIMIT}", field="sample_rate")
        every = 1.0 / (request.sample_rate or RATE_USUAL)
        asked = asked_by(context.principal)
        with self._streaming(device):
            number, due, kept = 0, self._clock.monotonic(), float("-inf")
            while True:
                now = self._clock.monotonic()
                keep = now - kept >= KEEP_SECONDS
                kept = now if keep else kept
                read = await self._driver.read(request.device_id, asked=asked, keep=keep)
                number += 1
                yield pi.GPIOReading(
                    id=number,
                    device_id=request.device_id,
                    value=read.level,
                    timestamp=timestamp(read.at_ns),
                )
                due = max(
                    due + every, self._clock.monotonic()
                )  # a slow board or reader is not caught up with
                await self._clock.sleep(max(0.0, due - self._clock.monotonic()))

    @contextmanager
    def _streaming(self, device: Device) -> Iterator[None]:
        number = device_number(device)
        if self._streams.total() >= STREAMS_LIMIT or self._streams[number] >= STREAMS_PER_DEVICE:
            raise ResourceExhausted(
                f"device {number} is read by {self._streams[number]} streams, "
                f"of {self._streams.total()} in all"
            )
        self._streams[number] += 1
        try:
            yield
        finally:
            self._streams[number] -= 1
            if not self._streams[number]:
                del self._streams[number]

    def _require(self, number: int) -> Device:
        if not number:
            raise InvalidArgument("id is required", field="id")
        device = self._devices.get(number)
        if device is None:
            raise NotFound(f"GPIO device {number} is not known", field="id")
        return device
