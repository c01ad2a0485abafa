"""`NodeAgent`: the calls that a node answers, pin orders among them.

A call with a request id is carried out once. A repeated call gets the first one's outcome, and waits for it
if it is still running. A refused call may be repeated. A call that was cut short is not started again, unless
it is idempotent.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from fleetplane.domains.boards.access import ADMIN
from fleetplane.domains.boards.agent.commands import commands
from fleetplane.domains.boards.agent.gpio.chip import LineDirection, LinePull
from fleetplane.domains.boards.agent.grpc.access import (
    DRIVE,
    RELAYED,
    access_table,
    fence,
    lease_seconds,
    on_behalf_of,
)
from fleetplane.domains.boards.agent.pins import rules as pin_rules
from fleetplane.domains.boards.agent.pins.lines import PinState
from fleetplane.domains.boards.agent.pins.pins import Pins
from fleetplane.domains.boards.agent.pins.rules import PinCaller, PinOperation
from fleetplane.domains.boards.agent.state import BoardAgentState
from fleetplane.domains.boards.agent.wire import messages as wire_gpio
from fleetplane.domains.boards.agent.wire import messages as wire_messages
from fleetplane.domains.boards.agent.wire import metrics as wire_metrics
from fleetplane.domains.boards.agent.wire.messages import PinOrder
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Conflict, FailedPrecondition, FleetplaneError, InvalidArgument
from fleetplane.kernel.values.timestamps import timestamp
from fleetplane.rpc import CallContext

REMEMBERED: Final = 1024
REMEMBERED_BYTES: Final = 8 * 1024 * 1024
KEEP_SECONDS: Final = 600.0
ID_LIMIT: Final = 128

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class _Act(Generic[T]):
    request: bytes
    outcome: asyncio.Future[T]
    ends_at: float
    size: int


class OnceByMethod(Generic[T]):
    """One per method. `size_of` says what remembering an outcome costs."""

    def __init__(
        self, clock: Clock, *, repeatable: bool, size_of: Callable[[T], int] = lambda _: 256
    ) -> None:
        self._clock = clock
        self._repeatable = repeatable
        self._size_of = size_of
        self._acts: OrderedDict[tuple[str, str], _Act[T]] = OrderedDict()
        self._held_bytes = 0

    def __repr__(self) -> str:
        return f"<Once {len(self._acts)} acts, {self._held_bytes} bytes>"

    async def do(self, caller: str, request_id: str, request: bytes, act: Callable[[], Awaitable[T]]) -> T:
        """`request` is what must be the same when the id is."""
        if not request_id:
            return await act()
        if len(request_id) > ID_LIMIT:
            raise InvalidArgument(f"request_id has at most {ID_LIMIT} characters", field="request_id")
        self._forget_old()
        key = (caller, request_id)
        known = self._acts.get(key)
        if known is not None:
            if known.request != request:
                raise InvalidArgument("request_id was used for another request", field="request_id")
            return await asyncio.shield(known.outcome)
        return await self._begin(key, request, act)

    async def _begin(self, key: tuple[str, str], request: bytes, act: Callable[[], Awaitable[T]]) -> T:
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        outcome.add_done_callback(_seen)
        entry = self._acts[key] = _Act(
            request=request,
            outcome=outcome,
            ends_at=self._clock.monotonic() + KEEP_SECONDS,
            size=len(request),
        )
        self._held_bytes += entry.size
        try:
            done = await act()
        except FleetplaneError as error:
            outcome.set_exception(error)
            self._drop(key)
            raise
        except BaseException:
            outcome.set_exception(
                Conflict("this was begun before, and cut short", details={"cause": "cut-short"}, hint="")
            )
            if self._repeatable:
                self._drop(key)
            raise
        outcome.set_result(done)
        size = self._size_of(done)
        entry.size += size
        self._held_bytes += size
        self._make_room()
        return done

    def _forget_old(self) -> None:
        now = self._clock.monotonic()
        while self._acts:
            key, entry = next(iter(self._acts.items()))
            if now < entry.ends_at or not entry.outcome.done():
                return
            self._drop(key)

    def _make_room(self) -> None:
        done = [key for key, entry in self._acts.items() if entry.outcome.done()]
        for key in done:
            if len(self._acts) <= REMEMBERED and self._held_bytes <= REMEMBERED_BYTES:
                return
            self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        self._held_bytes -= self._acts.pop(key).size


def _seen(outcome: asyncio.Future[T]) -> None:
    """An outcome that nobody waits for is no news to the loop."""
    if not outcome.cancelled():
        outcome.exception()


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


ACTOR_SEPARATOR: Final = " for "
"""Separates the server from the user it acts for, where one name holds both."""


class NodeService:
    def __init__(self, node: BoardAgentState) -> None:
        self._node = node
        self._clock: Clock = node.clock
        self._access = access_table()
        self._pins = PinOrders(node.pins, node.clock)
        self._orders: OnceByMethod[pb.GPIOResponse] = OnceByMethod(node.clock, repeatable=True)
        self._runs: OnceByMethod[pb.CommandResponse] = OnceByMethod(
            node.clock, repeatable=False, size_of=lambda response: len(response.stdout) + len(response.stderr)
        )

    def __repr__(self) -> str:
        return f"<NodeService {self._node!r}>"

    async def GetSystemMetrics(self, _request: pb.Empty, _context: CallContext) -> pb.SystemMetrics:
        return wire_metrics.flat(await self._node.sampler.first())

    async def HealthCheck(self, _request: pb.Empty, _context: CallContext) -> pb.HealthStatus:
        node = self._node
        return wire_messages.health_status(
            node.health(),
            now_ns=self._clock.now_ns(),
            version=node.version,
            uptime_seconds=node.uptime_seconds,
            gpio_available=node.pins.available,
            capabilities=node.capabilities,
            node_id=str(node.node_id or ""),
        )

    async def ControlGPIO(self, request: pb.GPIORequest, context: CallContext) -> pb.GPIOResponse:
        order = wire_gpio.order(request)
        may_drive = self._access.allows(context.principal, DRIVE)
        if order.operation is not PinOperation.READ:
            self._access.check(context.principal, DRIVE)
        caller = PinCaller(
            user=actor(context),
            lease_id=request.lease_id,
            lease_seconds=lease_seconds(context),
            fence=fence(context),
        )
        if request.dry_run:
            return await self._rehearse(order, caller)
        return await self._orders.do(
            context.principal.name,
            request.request_id,
            request.SerializeToString(deterministic=True),
            lambda: self._pins.carry_out(order, caller, may_claim=may_drive),
        )

    async def _rehearse(self, order: PinOrder, caller: PinCaller) -> pb.GPIOResponse:
        if order.operation is PinOperation.PWM or order.frequency_hz:
            refusal = pin_rules.waveform_refusal(order.frequency_hz, order.duty_percent)
            if refusal is not None:
                raise refusal.error
        await self._node.pins.rehearse(order.operation, order.pin, caller=caller)
        return pb.GPIOResponse(
            success=True,
            message=f"would {order.operation} pin {order.pin}",
            pin=order.pin,
            timestamp=timestamp(self._clock.now_ns()),
            reason="DRY_RUN",
        )

    async def ExecuteCommand(self, request: pb.CommandRequest, context: CallContext) -> pb.CommandResponse:
        asked, roles = wire_messages.asked(request), context.principal.roles
        caller = commands.CommandCaller(
            user=context.principal.name,
            peer=context.peer(),
            on_behalf_of=on_behalf_of(context),
            is_admin=ADMIN in roles and RELAYED not in roles,
            is_admin_by_hearsay=ADMIN in roles and RELAYED in roles,
        )

        async def run() -> pb.CommandResponse:
            outcome = await self._node.commands.execute(asked, caller, request_id=request.request_id)
            return wire_messages.command_response(outcome)

        return await self._runs.do(
            caller.user, request.request_id, request.SerializeToString(deterministic=True), run
        )

    async def StreamLogs(self, request: pb.LogFilter, _context: CallContext) -> AsyncIterator[pb.LogEntry]:
        query = wire_messages.log_query(request)
        async with aclosing(self._node.logs.stream(query)) as entries:
            async for entry in entries:
                yield wire_messages.log_entry(entry)


def actor(context: CallContext) -> str:
    behind = on_behalf_of(context)
    return f"{context.principal.name}{ACTOR_SEPARATOR}{behind}" if behind else context.principal.name
