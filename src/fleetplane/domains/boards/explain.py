"""Why a board is not ready, and why a pin is not what it should be.

Both controllers have boards for keys; what is about one pin is told by its subject.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from fleetplane.domains.boards.inventory.boards import Boards, status_of
from fleetplane.domains.boards.inventory.liveness import BoardController
from fleetplane.domains.boards.kinds import NUMBER_LIMIT, Board, BoardState, board_scope
from fleetplane.domains.boards.pins import rules
from fleetplane.domains.boards.pins.controller import GpioController
from fleetplane.domains.boards.pins.devices import Devices
from fleetplane.domains.boards.pins.kinds import Device, Direction
from fleetplane.domains.boards.pins.kinds import status_of as pin_status
from fleetplane.domains.boards.rest.common import BoardCaller, BoardGate
from fleetplane.fleet.explain import from_pass, from_record, placed
from fleetplane.kernel.access import Permission
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.reconcile import Reason
from fleetplane.kernel.reconcile.explanation import Finding
from fleetplane.web.rest.routes import Headers

SETTLED = frozenset({BoardState.READY, BoardState.DISCOVERED})
FAILING = "False"


class BoardReaders:
    """Admits callers that may read boards, by the same roles as on every other listener."""

    def __init__(self, gate: BoardGate) -> None:
        self._gate = gate

    def authenticate(self, headers: Headers) -> BoardCaller:
        return self._gate.authenticate(headers)

    def within(self, caller: BoardCaller, permission: Permission, asked: str) -> str:
        found = self._gate.admit(caller, permission, {})
        return asked or found

    def may(self, caller: BoardCaller, permission: Permission, _scope: str) -> bool:
        return self._gate.may(caller, permission)


class BoardExplainer:
    def __init__(self, boards: Boards, controller: BoardController, clock: Clock) -> None:
        self._boards = boards
        self._controller = controller
        self._clock = clock

    def locate(self, within: str, name: str) -> str:
        board = self._find(name)
        return placed("board", name, None if board is None else board_scope(int(board.name)), within)

    def _find(self, name: str) -> Board | None:
        number = _number(name)
        return self._boards.get(number) if number is not None else None

    def explain(self, _scope: str, name: str) -> Sequence[Finding]:
        board = self._find(name)
        if board is None:
            return ()
        passed = from_pass(self._controller.reconciler.name, self._controller.reconciler.explain(board.name))
        return (*from_record(self._clock, board.name, tuple(_board_reasons(board))), *passed)


def _board_reasons(board: Board) -> Iterator[Reason]:
    status = status_of(board)
    if status.registered_at_ns is None:
        yield Reason(code="NEVER_REGISTERED", message="no agent has registered for it yet")
    if status.state not in SETTLED:
        said = status.reported.value if status.reported is not None else "nothing"
        yield Reason(
            code=status.state.value.upper(),
            message=f"it is {status.state.value}: declared {status.declared.value}, the board says {said}, "
            f"silence {status.silence.value}",
        )
    for condition in board.conditions:
        if condition.status == FAILING:
            words = f"{condition.type}: {condition.message or condition.reason or 'not in order'}"
            yield Reason(code="CONDITION", message=words, subject=f"condition/{condition.type}")


class PinExplainer:
    def __init__(self, devices: Devices, controller: GpioController, clock: Clock) -> None:
        self._devices = devices
        self._controller = controller
        self._clock = clock

    def locate(self, within: str, name: str) -> str:
        device = self._find(name)
        return placed("pin", name, None if device is None else board_scope(device.spec.board), within)

    def _find(self, name: str) -> Device | None:
        number = _number(name)
        return self._devices.kept(number) if number is not None else None

    def explain(self, _scope: str, name: str) -> Sequence[Finding]:
        device = self._find(name)
        if device is None:
            return ()
        reconciler = self._controller.reconciler
        found = reconciler.explain(str(device.spec.board))
        if found is not None:  # of the whole board: the other pins' reasons are no answer here
            own = tuple(one for one in found.reasons if one.subject == f"device/{device.name}")
            found = msgspec.structs.replace(found, reasons=own)
        record = tuple(_pin_reasons(device))
        return (*from_record(self._clock, device.name, record), *from_pass(reconciler.name, found))


def _pin_reasons(device: Device) -> Iterator[Reason]:
    spec, status = device.spec, pin_status(device)
    if status.reason:
        yield Reason(code=status.reason, message=status.message)
    if spec.removing:
        yield Reason(code="REMOVING", message="it is deleted once its board has given the pin up")
    elif not spec.enabled:
        yield Reason(code="DISABLED", message="operators disabled it, so its pin is given up")
    elif spec.device_type not in rules.DRIVEN:
        yield Reason(
            code="NOT_DRIVEN", message=f"a pin of type {spec.device_type.value} is neither set nor read here"
        )
    elif spec.direction is Direction.OUTPUT and spec.level is None:
        yield Reason(code="NOT_WRITTEN", message="it is an output to which nobody has written a level")
    elif status.applied_generation != device.generation and not status.reason:
        yield Reason(code="NOT_APPLIED", message="its board was not yet brought to the last change")
    if status.lease is not None:
        yield Reason(code="RESERVED", message=f"only {status.lease.holder} may write it")


def _number(name: str) -> int | None:
    if not (name.isascii() and name.isdecimal()) or len(name) > 10 or not 1 <= int(name) <= NUMBER_LIMIT:
        return None
    return int(name)
