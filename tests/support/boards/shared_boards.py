"""Boards that several servers call, in virtual time: calls take a while, and some arrive late or never."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from support.shared import virtual_loop
from support.shared.virtual_servers import VirtualServer, VirtualServers, until, virtual_servers

from fleetplane.domains.boards import fences
from fleetplane.domains.boards.access import OPERATOR
from fleetplane.domains.boards.agent.gpio.chip import LineDirection as AgentDirection
from fleetplane.domains.boards.agent.pins import rules as agent_rules
from fleetplane.domains.boards.agent.pins.rules import PinCaller
from fleetplane.domains.boards.agent.wire import messages as agent_wire
from fleetplane.domains.boards.calls.channels import CALL_SECONDS, FENCE_FIELD, CallOrigin
from fleetplane.domains.boards.calls.errors import BoardSilent, BoardUnreachable
from fleetplane.domains.boards.fences import Fence
from fleetplane.domains.boards.inventory.boards import Boards, Came
from fleetplane.domains.boards.kinds import KINDS, number_of
from fleetplane.domains.boards.pins.client import PinsOfNode
from fleetplane.domains.boards.pins.controller import GpioController
from fleetplane.domains.boards.pins.devices import Devices
from fleetplane.domains.boards.pins.driver import PinDriver
from fleetplane.domains.boards.pins.kinds import GPIO_DEVICE, Device, Direction, GpioSpec
from fleetplane.domains.boards.pins.turns import PIN_TURN, PinTurns
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.pi_agent import pi_agent_pb2 as pi_agent
from fleetplane.kernel.kinds import KERNEL_KINDS

PIN = 17
BOSS = CallOrigin(actor="boss", role=OPERATOR)


@dataclass
class Wire:
    """One pin of a board, with its agent's rules about orders of several servers."""

    refuses_older: bool = True
    level: int | None = None
    """Driven; None for an input, or nothing."""
    newest: Fence | None = None
    done: list[tuple[str, int | None]] = field(default_factory=list)
    """By whom, and what, in the order in which it was done."""
    refused: int = 0

    def carry_out(self, actor: str, request: Any, more: list[tuple[str, str]]) -> Any:
        if isinstance(request, pi_agent.ListConfiguredPinsRequest):
            return self._listed()
        order = agent_wire.order(request)
        said = dict(more).get(FENCE_FIELD)
        fence = fences.parsed(said, field=FENCE_FIELD) if said is not None else None
        caller = PinCaller(user=actor, fence=fence)
        refusal = agent_rules.order_refusal(self.newest, order.operation, order.pin, caller)
        if refusal is not None and self.refuses_older:
            self.refused += 1
            raise refusal.error
        if order.operation in agent_rules.CHANGING:
            self.newest = fence or self.newest
            drives = (
                order.operation is agent_rules.PinOperation.WRITE or order.direction is AgentDirection.OUTPUT
            )
            self.level = order.level if drives else None
            self.done.append((actor, self.level))
        return pb.GPIOResponse(
            success=True, pin=order.pin, state=pb.GPIORequest.HIGH if self.level else pb.GPIORequest.LOW
        )

    def _listed(self) -> Any:
        if self.level is None:
            return pi_agent.ListConfiguredPinsResponse()
        state = pi_agent.GPIOPinState(
            pin=PIN, direction=pi_agent.AGENT_GPIO_DIRECTION_OUTPUT, value=self.level
        )
        return pi_agent.ListConfiguredPinsResponse(pins=[state])


class Lines:
    """In the place of `NodeLinks`: the way of one server to the board."""

    def __init__(self, wire: Wire, chance: random.Random, server: VirtualServer) -> None:
        self.wire = wire
        self._chance = chance
        self._server = server
        self.late_seconds = 0.0
        """For the next call that changes something: when it arrives, although nobody waits any more."""
        self.slow_seconds = 0.2
        """At most, each way."""
        self.stalls = False
        self._late: set[asyncio.Task[None]] = set()

    def is_callable(self, _board: Any) -> bool:
        return True

    async def call(
        self,
        board: int,
        _method: Any,
        request: Any,
        _answer: Any,
        *,
        asked: CallOrigin,
        seconds: float = CALL_SECONDS,
        more: list[tuple[str, str]] | None = None,
    ) -> Any:
        if self._server.link.cut:
            raise BoardUnreachable("this server is gone")
        if self.stalls:
            await asyncio.sleep(seconds)
            raise BoardSilent(f"board {board}: no answer")
        changes = isinstance(request, pb.GPIORequest)
        late, self.late_seconds = (self.late_seconds, 0.0) if changes else (0.0, self.late_seconds)
        if late:
            self._late.add(asyncio.create_task(self._arrive(late, asked.actor, request, more or [])))
            await asyncio.sleep(seconds)
            raise BoardSilent(f"board {board}: no answer")
        await asyncio.sleep(self._chance.uniform(0.0, self.slow_seconds))
        said = self.wire.carry_out(asked.actor, request, more or [])
        await asyncio.sleep(self._chance.uniform(0.0, self.slow_seconds))
        return said

    async def _arrive(self, after: float, actor: str, request: Any, more: list[tuple[str, str]]) -> None:
        await asyncio.sleep(after)
        try:
            self.wire.carry_out(actor, request, more)
        except Exception:
            return


@dataclass
class Half:
    """What one server has of a board's pins."""

    server: VirtualServer
    boards: Boards
    devices: Devices
    driver: PinDriver
    controller: GpioController
    lines: Lines

    async def write(self, device: int, level: int, who: str = "boss") -> None:
        with self.server.store.writing_here():
            asked = CallOrigin(actor=who, role=OPERATOR)
            await self.driver.write(device, level, holder=who, asked=asked)

    async def reserve(self, device: int, who: str) -> None:
        with self.server.store.writing_here():
            await self.driver.reserve(device, who, seconds=None, asked=CallOrigin(actor=who, role=OPERATOR))

    def device(self, number: int) -> Device:
        return self.devices.require(number)


class PinsRig:
    """One board with one pin, and several servers."""

    def __init__(self, *, controls: bool, refuses_older: bool, seed: int) -> None:
        self.wire = Wire(refuses_older=refuses_older)
        self.halves: dict[str, Half] = {}
        self.servers: VirtualServers
        self.number = 0
        self._controls = controls
        self._chance = random.Random(seed)

    def _make(self, server: VirtualServer) -> Half:
        store, clock = server.store, server.store.clock
        boards, devices = Boards(store), Devices(store, clock)
        lines: Any = Lines(self.wire, self._chance, server)
        pins = PinsOfNode(lines, boards, clock)
        driver = PinDriver(devices, pins, PinTurns(store, clock), clock)
        controller = GpioController(
            store=store,
            clock=clock,
            boards=boards,
            devices=devices,
            pins=pins,
            links=lines,
            driver=driver,
        )
        made = Half(server, boards, devices, driver, controller, lines)
        self.halves[server.name] = made
        return made

    async def here(self, server: VirtualServer) -> None:
        self._make(server)
        await asyncio.Event().wait()

    async def active(self, server: VirtualServer) -> None:
        half = self._make(server)
        if self._controls:
            await half.controller.run()
        await asyncio.Event().wait()

    async def start(self, names: str = "abc") -> list[Half]:
        for name in names:
            await self.servers.start(name)
            await until(lambda name=name: name in self.halves)  # type: ignore[misc]
        first = self.halves[names[0]]
        came = Came(address="192.0.2.1", port=9091)
        board = number_of(await first.boards.create(BoardFacts(name="attic"), actor="test", came=came))
        spec = GpioSpec(name="lamp", board=board, pin=PIN, direction=Direction.OUTPUT)
        self.number = int((await first.devices.create(spec, actor="test")).name)
        await self.settled()
        return [self.halves[name] for name in names]

    async def settled(self) -> None:
        """Until every server that lives has what any of them has written."""
        living = [half for half in self.halves.values() if not half.server.link.cut]
        head = max(half.server.store.revision for half in living)
        await until(lambda: all(half.server.store.revision >= head for half in living))


def play(
    scene: Callable[[PinsRig], Awaitable[None]],
    *,
    controls: bool = False,
    refuses_older: bool = True,
    seed: int = 1,
) -> None:
    """Run a scene; `controls` lets the active server bring pins to what they should be."""

    async def run() -> None:
        rig = PinsRig(controls=controls, refuses_older=refuses_older, seed=seed)
        kinds = (*KERNEL_KINDS, *KINDS, GPIO_DEVICE, PIN_TURN)
        async with virtual_servers(kinds, here=rig.here, active=rig.active) as rig.servers:
            await scene(rig)

    virtual_loop.run(run())
