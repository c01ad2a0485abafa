"""The node's own ports, and the service that they offer to original programs.

One port is TLS with client certificates. If configured, another offers the original service,
`pi_agent.PiAgentService`, in plain text on this machine. It answers in the shapes of the original:
configuring a pin and setting a waveform with success and a message; reading and writing with a status. A pin
can be written only once it was configured.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from fleetplane.domains.boards.agent.buses.buses import Buses
from fleetplane.domains.boards.agent.config import ListenSection
from fleetplane.domains.boards.agent.gpio.chip import HIGH, LOW, LineDirection, LinePull
from fleetplane.domains.boards.agent.grpc.access import (
    LISTENER,
    NODE_AGENT,
    PI_AGENT,
    PLAIN_LISTENER,
    NodeDoor,
    access_table,
    plain,
    rows,
)
from fleetplane.domains.boards.agent.grpc.node_agent import NodeService, actor
from fleetplane.domains.boards.agent.membership import BoardIdentityFolder
from fleetplane.domains.boards.agent.pins.rules import PinCaller
from fleetplane.domains.boards.agent.state import BoardAgentState
from fleetplane.domains.boards.agent.wire import messages as wire_gpio
from fleetplane.domains.boards.agent.wire import messages as wire_messages
from fleetplane.domains.boards.agent.wire import metrics as wire_metrics
from fleetplane.gen.pi_agent import pi_agent_pb2 as pi
from fleetplane.kernel.access import Principal
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, SettingsError
from fleetplane.kernel.values.timestamps import timestamp
from fleetplane.rpc import (
    Authentication,
    Authenticator,
    CallContext,
    CallStatistics,
    FixedPrincipal,
    GrpcApp,
    Listener,
    ListenerSpec,
    MethodTable,
    RpcLimits,
    TlsFiles,
    open_listener,
)
from fleetplane.rpc.introspection import HealthBoard, add_reflection

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


GRACE_SECONDS: Final = 3.0
"""For running calls, when the agent stops; a command takes two seconds to end."""
CONNECTIONS: Final = 256
REQUEST_LIMIT_BYTES: Final = 1024 * 1024
ACTIVE_CALLS: Final = 256
ANONYMOUS: Final = Principal(name="anonymous", roles=frozenset())


def app_for(
    listener: str, node: BoardAgentState, buses: Buses, *, door: Authenticator, health: HealthBoard
) -> GrpcApp:
    authenticators: Mapping[Authentication, Authenticator] = {
        Authentication.ANONYMOUS: FixedPrincipal(ANONYMOUS),
        Authentication.CERTIFICATE: door,
        Authentication.LOCAL: plain,
    }
    app = GrpcApp(
        listener=listener,
        table=MethodTable(rows(listener)),
        access=access_table(),
        authenticators=authenticators,
        clock=node.clock,
        statistics=CallStatistics(),
        limits=RpcLimits(max_request_bytes=REQUEST_LIMIT_BYTES, active_calls=ACTIVE_CALLS),
    )
    if listener == LISTENER:
        app.add_service(NODE_AGENT, NodeService(node))
    app.add_service(PI_AGENT, PiAgentService(node, buses))
    health.add_to(app)
    add_reflection(app)
    app.seal()
    return app


def tls_files(folder: BoardIdentityFolder) -> TlsFiles:
    return TlsFiles(
        certificate=folder.certificate_file,
        key=folder.key_file,
        client_ca=folder.authority_file,
        client_certificate="required",
    )


@dataclass(slots=True, kw_only=True)
class Ports:
    """What is open."""

    tls: Listener | None
    plain: Listener | None
    folder: BoardIdentityFolder
    tls_app: GrpcApp | None = None
    door: NodeDoor | None = None

    @property
    def addresses(self) -> dict[str, list[str]]:
        return {one.name: one.addresses for one in (self.tls, self.plain) if one is not None}

    @property
    def agent_port(self) -> int:
        """Where a server reaches us; 0 if it cannot."""
        return int(self.tls.addresses[0].rpartition(":")[2]) if self.tls is not None else 0

    async def renew(self) -> None:
        """Present the certificate that is on disk now, and trust whom that says."""
        if self.tls is not None:
            await self.tls.renew(tls_files(self.folder))

    def turn_away_the_revoked(self) -> int:
        """End the running calls of those who would not be let in any more; how many there were."""
        if self.tls_app is None or self.door is None:
            return 0
        return self.tls_app.end_calls_where(self.door.turns_away)


@asynccontextmanager
async def open_ports(
    wanted: ListenSection,
    node: BoardAgentState,
    buses: Buses,
    folder: BoardIdentityFolder,
    *,
    joined: bool,
    door: NodeDoor,
) -> AsyncIterator[Ports]:
    health = HealthBoard()
    specs: list[ListenerSpec] = []
    apps: list[GrpcApp] = []
    if joined:
        app = app_for(LISTENER, node, buses, door=door, health=health)
        addresses = tuple(_with_port(address, wanted.port) for address in wanted.addresses)
        specs.append(
            ListenerSpec(
                name=LISTENER, addresses=addresses, app=app, tls=tls_files(folder), connections=CONNECTIONS
            )
        )
        apps.append(app)
    if wanted.plaintext:
        require_local(wanted)
        app = app_for(PLAIN_LISTENER, node, buses, door=door, health=health)
        specs.append(
            ListenerSpec(name=PLAIN_LISTENER, addresses=(wanted.plaintext,), app=app, connections=CONNECTIONS)
        )
        apps.append(app)
    async with _opened(specs) as listeners:
        by_name = {one.name: one for one in listeners}
        await health.serving()
        try:
            yield Ports(
                tls=by_name.get(LISTENER),
                plain=by_name.get(PLAIN_LISTENER),
                folder=folder,
                door=door,
                tls_app=apps[0] if joined else None,
            )
        finally:
            for one in listeners:
                one.stop_accepting()
            await health.draining()
            for app in apps:
                await app.drain(GRACE_SECONDS)


@asynccontextmanager
async def _opened(specs: list[ListenerSpec]) -> AsyncIterator[list[Listener]]:
    if not specs:
        yield []
        return
    async with (
        open_listener(specs[0], grace_seconds=GRACE_SECONDS) as first,
        _opened(specs[1:]) as others,
    ):
        yield [first, *others]


def require_local(wanted: ListenSection) -> None:
    """Refuse a plain-text listener beyond this machine, unless the node's owner allows it explicitly."""
    host = wanted.plaintext.rpartition(":")[0].strip("[]")
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local and not wanted.allow_remote_plaintext:
        raise SettingsError(
            f"listen.plaintext: anyone on other machines could use {wanted.plaintext}",
            field="listen.plaintext",
            hint="use 127.0.0.1, or set listen.allow_remote_plaintext = true",
        )


def _with_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address and not address.startswith("[") else f"{address}:{port}"
