"""Seeing to it that the pins of boards are what they should be, whatever happened to the boards.

The key is a board: one question to it tells about all its pins, and only those that are not right
are touched. A board is looked at when it comes (started, restarted, heard again), when something
about its pins is wanted differently, and every few minutes, because pins also change without
anyone telling. Also ends reservations whose time is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from fleetplane.domains.boards.calls.channels import NodeLinks
from fleetplane.domains.boards.calls.errors import AWAY, BoardAway, reason_of
from fleetplane.domains.boards.inventory.boards import Boards
from fleetplane.domains.boards.inventory.boards import status_of as board_status
from fleetplane.domains.boards.kinds import (
    BOARD,
    SCOPE,
    Board,
    BoardSilence,
    BoardState,
    board_scope,
    number_of,
)
from fleetplane.domains.boards.pins import rules
from fleetplane.domains.boards.pins.client import PinsOfNode
from fleetplane.domains.boards.pins.devices import Devices
from fleetplane.domains.boards.pins.driver import CONTROLLER, PinDriver
from fleetplane.domains.boards.pins.kinds import GPIO_DEVICE, Device, device_number, status_of
from fleetplane.domains.boards.pins.rules import GiveUpPin, LeaveAlone, PinSeen
from fleetplane.fleet import freeze as freezing
from fleetplane.fleet.freeze import FROZEN, Freezes
from fleetplane.kernel.boundary import Boundary, contained
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError, ResourceExhausted
from fleetplane.kernel.reconcile import PassResult, Reason, Reconciler
from fleetplane.kernel.store import Store
from fleetplane.kernel.watch import EventType

log = structlog.get_logger(__name__)

CONCURRENCY: Final = 64
"""Boards asked at once; most of a pass is waiting for the board."""
EXPIRE_TICK_SECONDS: Final = 0.5
"""How late the end of a reservation is noticed at most; boards notice by themselves as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpioPolicy:
    look_seconds: float = 300.0
    """Between looks at a board of which nothing is known to have changed."""
    retry_seconds: float = 10.0
    """After something that may pass: a busy line, a chip that is missing, a board out of reach."""
    refused_seconds: float = 600.0
    """After something that only a change would help: a protected pin, a right that is missing."""

    def again_after(self, error: FleetplaneError) -> float:
        if error.retry_after_seconds is not None:
            return min(max(error.retry_after_seconds, 0.1), self.retry_seconds)
        return self.refused_seconds if reason_of(error) in _LASTING else self.retry_seconds


_LASTING: Final = frozenset(
    {
        "PERMISSION_DENIED",
        "INVALID_ARGUMENT",
        "UNIMPLEMENTED",
        "HARDWARE_UNSUPPORTED",
        "DEVICE_ACCESS_REFUSED",
        "BOARD_REFUSED",
    }
)


class PinFrozen(FailedPrecondition):
    """A freeze holds for the board."""

    reason = FROZEN


class GpioController:
    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        boards: Boards,
        devices: Devices,
        pins: PinsOfNode,
        links: NodeLinks,
        driver: PinDriver,
        policy: GpioPolicy | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._boards = boards
        self._devices = devices
        self._pins = pins
        self._links = links
        self._driver = driver
        self._policy = policy or GpioPolicy()
        self._freezes = Freezes(store, clock)
        self._gone: set[int] = set()
        """Boards that were silent, or had said goodbye, when they were last seen to change."""
        self.reconciler = Reconciler(
            "boards/gpio", self._look, clock=clock, store=store, concurrency=CONCURRENCY
        )

    def __repr__(self) -> str:
        return f"<GpioController {self.reconciler!r}>"

    # Life.

    def came(self, board: int) -> None:
        """An agent has registered: whatever its pins were, nothing is known of them now."""
        if self._devices.of_board(board):
            self._look_at(board)

    def _look_at(self, board: int) -> None:
        try:
            self.reconciler.enqueue(str(board))
        except ResourceExhausted as error:  # boards are looked at now and then in any case
            log.error("boards.gpio_not_looked_at", board=board, error=error.message)

    async def run(self) -> None:
        """Until cancelled."""
        async with Boundary() as tasks:
            tasks.keep("boards/gpio/reconcile", self.reconciler.run)
            tasks.keep("boards/gpio/devices", self._follow_devices)
            tasks.keep("boards/gpio/boards", self._follow_boards)
            tasks.keep("boards/gpio/doubts", self._follow_doubts)
            tasks.keep("boards/gpio/leases", self._end_leases)
            tasks.keep("boards/gpio/freezes", partial(self._freezes.follow, self._thaw))

    def _thaw(self, _scope: str) -> None:
        """A freeze was set or lifted: look at every board with pins."""
        for board in {device.spec.board for device in self._store.list(GPIO_DEVICE, SCOPE)}:
            self._look_at(board)

    async def _follow_devices(self) -> None:
        for board in {device.spec.board for device in self._store.list(GPIO_DEVICE, SCOPE)}:
            self._look_at(board)
        async with self._store.watch(GPIO_DEVICE, SCOPE) as watch:
            async for batch in watch:
                for event in batch.events:
                    if event.type is not EventType.DELETED and _wants(event.resource):
                        self._look_at(event.resource.spec.board)

    async def _follow_boards(self) -> None:
        async with self._store.watch(BOARD, SCOPE) as watch:
            async for batch in watch:
                for event in batch.events:
                    board = event.resource
                    with contained("boards/gpio/boards", about=board.name):
                        if event.type is EventType.DELETED:
                            await self._bury(number_of(board))
                        elif self._is_back(board):
                            self.came(number_of(board))

    async def _follow_doubts(self) -> None:
        while True:
            board = await self._driver.doubtful.get()
            self.came(board)

    def _is_back(self, board: Board) -> bool:
        number, status = number_of(board), board_status(board)
        gone = status.silence is not BoardSilence.NONE or status.reported is BoardState.MAINTENANCE
        was_gone = number in self._gone
        (self._gone.add if gone else self._gone.discard)(number)
        return was_gone and not gone

    async def _bury(self, board: int) -> None:
        """What still waited for the board to give pins up has nothing to wait for."""
        self._gone.discard(board)
        self.reconciler.forget(str(board))
        for device in self._devices.of_board(board):
            try:
                await self._devices.forget(device_number(device))
            except (
                FleetplaneError
            ) as error:  # harmless: nobody sees it, and its board's number is not used again
                log.warning("boards.chore_failed", error=error.message)

    async def _end_leases(self) -> None:
        while True:
            await self._clock.sleep(EXPIRE_TICK_SECONDS)
            now_ns = self._clock.now_ns()
            over = [
                device_number(device)
                for device in self._devices.with_lease()
                if rules.standing(status_of(device).lease, now_ns=now_ns) is None
            ]
            try:
                if over:
                    await self._devices.expire(over)
                await self._driver.sweep()
            except FleetplaneError as error:  # tried again at the next turn
                log.warning("boards.chore_failed", error=error.message)

    # Working.

    async def _look(self, name: str) -> PassResult:
        board, devices = self._boards.get(int(name)), self._devices.of_board(int(name))
        wanted = [device for device in devices if not isinstance(rules.wish(device), LeaveAlone)]
        if board is None or not wanted:
            return PassResult()
        if board_status(board).silence is BoardSilence.DEAD or not self._links.is_callable(board):
            return await self._nobody(wanted, BoardAway(f"board {name} is away"), again=None)
        try:
            seen = await self._pins.listed(int(name), asked=CONTROLLER)
            reasons, again = await self._see_to(wanted, seen)
        except AWAY as error:
            return await self._nobody(wanted, error, again=self._policy.retry_seconds)
        except FleetplaneError as error:
            return await self._nobody(wanted, error, again=self._policy.again_after(error))
        return PassResult(explanation=reasons, requeue_after_seconds=again)

    async def _see_to(
        self, wanted: Sequence[Device], seen: dict[int, PinSeen]
    ) -> tuple[tuple[Reason, ...], float]:
        reasons: list[Reason] = []
        again = self._policy.look_seconds
        if any(device.spec.config.sample_rate for device in wanted):
            again = min(again, rules.SAMPLE_SECONDS)
        freeze = self._freezes.holding("boards", board_scope(wanted[0].spec.board))
        held = None
        if freeze is not None:
            held = PinFrozen(freezing.message(freeze))
            again = self._freezes.seconds_left(freeze, at_most=again)
        for device in wanted:
            error = await self._driver.see_to(device_number(device), seen, held=held)
            if error is not None:
                reasons.append(_reason(device, error))
                if error is not held:
                    again = min(again, self._policy.again_after(error))
        return tuple(reasons), again

    async def _nobody(
        self, wanted: Iterable[Device], error: FleetplaneError, *, again: float | None
    ) -> PassResult:
        """Nothing can be done for now; the devices say so."""
        reasons = []
        for device in wanted:
            await self._driver.away(device, error)
            reasons.append(_reason(device, error))
        return PassResult(explanation=tuple(reasons), requeue_after_seconds=again)


def _wants(device: Device) -> bool:
    """Whether the board was not yet brought to this. What failed is tried again in its own time."""
    status, wanted = status_of(device), rules.wish(device)
    if isinstance(wanted, LeaveAlone) or status.reason:
        return False
    return isinstance(wanted, GiveUpPin) or status.applied_generation != device.generation


def _reason(device: Device, error: FleetplaneError) -> Reason:
    return Reason(code=reason_of(error), message=error.message, subject=f"device/{device.name}")
