"""`pi_agent.PiAgentService`: the node as the original programs know it, with their shapes of answers.

Configuring a pin and setting a waveform answer with success or not, and a message; reading and writing
answer with a status. A pin is written only once it was configured. Beneath it is the same node.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from fleetplane.domains.boards.agent.buses.buses import Buses
from fleetplane.domains.boards.agent.gpio.chip import HIGH, LOW, LineDirection, LinePull
from fleetplane.domains.boards.agent.grpc.node_agent import actor
from fleetplane.domains.boards.agent.pins.rules import PinCaller
from fleetplane.domains.boards.agent.state import BoardAgentState
from fleetplane.domains.boards.agent.wire import messages as wire_gpio
from fleetplane.domains.boards.agent.wire import messages as wire_messages
from fleetplane.domains.boards.agent.wire import metrics as wire_metrics
from fleetplane.gen.pi_agent import pi_agent_pb2 as pi
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument
from fleetplane.kernel.values.timestamps import timestamp
from fleetplane.rpc import CallContext

STREAM_SECONDS: Final = 5
STREAM_LIMIT_SECONDS: Final = 3600
DONE: Final = "done"


class PiAgentService:
    def __init__(self, node: BoardAgentState, buses: Buses) -> None:
        self._node = node
        self._buses = buses
        self._clock = node.clock

    def __repr__(self) -> str:
        return f"<PiAgentService {self._node!r}>"

    # Pins.

    async def ConfigureGPIOPin(
        self, request: pi.ConfigureGPIOPinRequest, context: CallContext
    ) -> pi.ConfigureGPIOPinResponse:
        caller = PinCaller(user=actor(context))
        done, message = True, f"configured pin {request.pin}"
        try:
            await self._node.pins.configure(
                request.pin,
                direction=wire_gpio.direction(request.direction) or LineDirection.INPUT,
                pull=wire_gpio.pull(request.pull_mode) or LinePull.NONE,
                caller=caller,
            )
            if request.pwm_frequency > 0:
                await self._node.pins.pwm(
                    request.pin,
                    frequency_hz=request.pwm_frequency,
                    duty_percent=request.pwm_duty_cycle,
                    caller=caller,
                )
        except FleetplaneError as error:
            done, message = False, error.message
        return pi.ConfigureGPIOPinResponse(success=done, message=message, configured_at=self._now())

    async def ReadGPIOPin(
        self, request: pi.ReadGPIOPinRequest, context: CallContext
    ) -> pi.ReadGPIOPinResponse:
        reading = await self._node.pins.read(request.pin, caller=PinCaller(user=actor(context)))
        return pi.ReadGPIOPinResponse(
            pin=request.pin, value=reading.level, timestamp=timestamp(reading.at_ns)
        )

    async def WriteGPIOPin(
        self, request: pi.WriteGPIOPinRequest, context: CallContext
    ) -> pi.WriteGPIOPinResponse:
        """Any value above 0 is high, and is repeated as it came."""
        level = HIGH if request.value > 0 else LOW
        reading = await self._node.pins.write(request.pin, level, caller=PinCaller(user=actor(context)))
        return pi.WriteGPIOPinResponse(
            pin=request.pin, value=request.value, timestamp=timestamp(reading.at_ns)
        )

    async def SetGPIOPWM(self, request: pi.SetGPIOPWMRequest, context: CallContext) -> pi.SetGPIOPWMResponse:
        response = pi.SetGPIOPWMResponse(
            success=True,
            message=f"waveform on pin {request.pin}",
            pin=request.pin,
            frequency=request.frequency,
            duty_cycle=request.duty_cycle,
        )
        try:
            await self._node.pins.pwm(
                request.pin,
                frequency_hz=request.frequency,
                duty_percent=request.duty_cycle,
                caller=PinCaller(user=actor(context)),
            )
        except FleetplaneError as error:
            response.success, response.message = False, error.message
        response.configured_at.CopyFrom(self._now())
        return response

    async def ListConfiguredPins(
        self, _request: pi.ListConfiguredPinsRequest, _context: CallContext
    ) -> pi.ListConfiguredPinsResponse:
        states = await self._node.pins.list()
        return pi.ListConfiguredPinsResponse(pins=[wire_gpio.nested_state(state) for state in states])

    # The node itself.

    async def AgentHealth(
        self, _request: pi.AgentHealthRequest, _context: CallContext
    ) -> pi.AgentHealthResponse:
        """Asked before every call about a pin: answered from memory."""
        available = self._node.pins.available
        return pi.AgentHealthResponse(
            status="ok" if available else "gpio_unavailable",
            timestamp=self._now(),
            version=self._node.version,
            uptime=wire_messages.uptime(self._node.uptime_seconds),
            gpio_available=available,
            capabilities=self._node.capabilities,
        )

    async def GetSystemInfo(
        self, _request: pi.GetSystemInfoRequest, _context: CallContext
    ) -> pi.GetSystemInfoResponse:
        return wire_metrics.system_info(await self._node.sampler.first(), now_ns=self._clock.now_ns())

    async def GetSystemMetrics(
        self, _request: pi.GetSystemMetricsRequest, _context: CallContext
    ) -> pi.GetSystemMetricsResponse:
        snapshot = await self._node.sampler.first()
        return pi.GetSystemMetricsResponse(
            metrics=wire_metrics.nested(snapshot), timestamp=timestamp(snapshot.at_ns)
        )

    async def StreamSystemMetrics(
        self, request: pi.StreamSystemMetricsRequest, _context: CallContext
    ) -> AsyncIterator[pi.SystemMetricsResponse]:
        """The first comes after one interval."""
        seconds = request.interval_seconds if request.interval_seconds > 0 else STREAM_SECONDS
        if seconds > STREAM_LIMIT_SECONDS:
            raise InvalidArgument(
                f"interval_seconds is at most {STREAM_LIMIT_SECONDS}", field="interval_seconds"
            )
        while True:
            await self._clock.sleep(seconds)
            snapshot = await self._node.sampler.first()
            yield pi.SystemMetricsResponse(
                metrics=wire_metrics.nested(snapshot), timestamp=timestamp(snapshot.at_ns)
            )

    # Buses.

    async def SPIExchange(
        self, request: pi.SPIExchangeRequest, context: CallContext
    ) -> pi.SPIExchangeResponse:
        data = await self._buses.spi_exchange(request.channel, request.data, user=actor(context))
        return pi.SPIExchangeResponse(data=data)

    async def SPIWrite(self, request: pi.SPIWriteRequest, context: CallContext) -> pi.SPIWriteResponse:
        success, message = await _tried(
            self._buses.spi_write(request.channel, request.data, user=actor(context))
        )
        return pi.SPIWriteResponse(success=success, message=message)

    async def SPIRead(self, request: pi.SPIReadRequest, context: CallContext) -> pi.SPIReadResponse:
        data = await self._buses.spi_read(request.channel, request.length, user=actor(context))
        return pi.SPIReadResponse(data=data)

    async def I2CWrite(self, request: pi.I2CWriteRequest, context: CallContext) -> pi.I2CWriteResponse:
        success, message = await _tried(
            self._buses.i2c_write(request.bus, request.address, request.data, user=actor(context))
        )
        return pi.I2CWriteResponse(success=success, message=message)

    async def I2CRead(self, request: pi.I2CReadRequest, context: CallContext) -> pi.I2CReadResponse:
        data = await self._buses.i2c_read(request.bus, request.address, request.length, user=actor(context))
        return pi.I2CReadResponse(data=data)

    async def I2CWriteRegister(
        self, request: pi.I2CWriteRegisterRequest, context: CallContext
    ) -> pi.I2CWriteRegisterResponse:
        success, message = await _tried(
            self._buses.i2c_write_register(
                request.bus, request.address, request.register, request.data, user=actor(context)
            )
        )
        return pi.I2CWriteRegisterResponse(success=success, message=message)

    async def I2CReadRegister(
        self, request: pi.I2CReadRegisterRequest, context: CallContext
    ) -> pi.I2CReadRegisterResponse:
        data = await self._buses.i2c_read_register(
            request.bus, request.address, request.register, request.length, user=actor(context)
        )
        return pi.I2CReadRegisterResponse(data=data)

    def _now(self) -> Timestamp:
        return timestamp(self._clock.now_ns())


async def _tried(work: Awaitable[None]) -> tuple[bool, str]:
    """The shape of answers that say themselves whether it worked."""
    try:
        await work
    except FleetplaneError as error:
        return False, error.message
    return True, DONE
