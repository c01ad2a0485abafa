"""Orders about pins, carried out: which calls each stands for, and what is said of the outcome."""

from __future__ import annotations

from fleetplane.domains.boards.agent.gpio.chip import LineDirection, LinePull
from fleetplane.domains.boards.agent.pins.pins import Pins
from fleetplane.domains.boards.agent.pins.rules import PinCaller, PinOperation
from fleetplane.domains.boards.agent.pins.states import PinState
from fleetplane.domains.boards.agent.wire import pins as wire_gpio
from fleetplane.domains.boards.agent.wire.pins import PinOrder
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument
from fleetplane.kernel.values.timestamps import timestamp


class PinOrders:
    def __init__(self, pins: Pins, clock: Clock) -> None:
        self._pins = pins
        self._clock = clock
        self._only_read: set[int] = set()
        """Inputs that nobody configured: they were claimed to be read, and may become outputs."""

    def __repr__(self) -> str:
        return f"<PinOrders {self._pins!r}>"

    async def carry_out(self, order: PinOrder, caller: PinCaller, *, may_claim: bool) -> pb.GPIOResponse:
        pin = order.pin
        if order.operation is PinOperation.READ:
            return await self._read(order, caller, may_claim=may_claim)
        match order.operation:
            case PinOperation.WRITE:
                response = await self._write(order, caller)
            case PinOperation.CONFIGURE:
                response = await self._configure(order, caller)
            case PinOperation.PWM:
                state = await self._wave(order, caller)
                response = wire_gpio.of_state(state, f"waveform on pin {pin}")
            case PinOperation.RELEASE:
                await self._pins.release(pin, caller=caller)
                now = timestamp(self._clock.now_ns())
                response = pb.GPIOResponse(
                    success=True, message=f"released pin {pin}", pin=pin, timestamp=now
                )
            case PinOperation.LEASE:
                raise InvalidArgument("a lease is taken by what is done under it", field="action")
        self._only_read.discard(pin)
        return response

    async def _read(self, order: PinOrder, caller: PinCaller, *, may_claim: bool) -> pb.GPIOResponse:
        try:
            reading = await self._pins.read(order.pin, caller=caller)
        except FailedPrecondition as error:
            if not may_claim or error.details.get("cause") != "unconfigured":
                raise
            reading = await self._pins.read(order.pin, caller=caller, claim=True)
            self._only_read.add(order.pin)
        return wire_gpio.of_reading(reading, f"read pin {order.pin}")

    async def _write(self, order: PinOrder, caller: PinCaller) -> pb.GPIOResponse:
        """Write a level. Direction output makes an output of the pin, as does a pin that was only read."""
        if order.direction is LineDirection.OUTPUT or order.pin in self._only_read:
            state = await self._pins.configure(
                order.pin,
                direction=LineDirection.OUTPUT,
                pull=order.pull or LinePull.NONE,
                level=order.level,
                caller=caller,
            )
            return wire_gpio.of_state(state, f"wrote pin {order.pin}")
        reading = await self._pins.write(order.pin, order.level, caller=caller, claim=True)
        return wire_gpio.of_reading(reading, f"wrote pin {order.pin}", direction=LineDirection.OUTPUT)

    async def _configure(self, order: PinOrder, caller: PinCaller) -> pb.GPIOResponse:
        direction = order.direction or LineDirection.INPUT
        state = await self._pins.configure(
            order.pin,
            direction=direction,
            pull=order.pull or LinePull.NONE,
            level=order.level if direction is LineDirection.OUTPUT else None,
            caller=caller,
        )
        if order.frequency_hz:
            state = await self._wave(order, caller)
        return wire_gpio.of_state(state, f"configured pin {order.pin}")

    async def _wave(self, order: PinOrder, caller: PinCaller) -> PinState:
        return await self._pins.pwm(
            order.pin, frequency_hz=order.frequency_hz, duty_percent=order.duty_percent, caller=caller
        )
