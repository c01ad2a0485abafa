"""`NodeAgent`: what a node does for those who may ask."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Final

from fleetplane.domains.boards.access import ADMIN
from fleetplane.domains.boards.agent.commands import commands
from fleetplane.domains.boards.agent.grpc.access import (
    DRIVE,
    RELAYED,
    access_table,
    fence,
    lease_seconds,
    on_behalf_of,
)
from fleetplane.domains.boards.agent.grpc.once import OnceByMethod
from fleetplane.domains.boards.agent.pins import rules as pin_rules
from fleetplane.domains.boards.agent.pins.orders import PinOrders
from fleetplane.domains.boards.agent.pins.rules import PinCaller, PinOperation
from fleetplane.domains.boards.agent.state import BoardAgentState
from fleetplane.domains.boards.agent.wire import messages as wire_messages
from fleetplane.domains.boards.agent.wire import metrics as wire_metrics
from fleetplane.domains.boards.agent.wire import pins as wire_gpio
from fleetplane.domains.boards.agent.wire.pins import PinOrder
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.values.timestamps import timestamp
from fleetplane.rpc import CallContext

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
