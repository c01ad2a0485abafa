"""Turns at a pin, where several servers call boards: one works on a device at a time.

A turn is a record in the store for as long as its server works on the device: taken before the board is told
anything, in the transaction that also decides whether it may be told, and ended with the transaction that
writes down what came of it. Others wait. Its revision goes along with every order (`fences.py`), so that a
board refuses what a server sends that has lost its turn meanwhile.

    5 s    after a turn was asked for, nothing more is begun under it
    5 s    a call to a board takes at most
    12 s   a turn lasts if its server does not end it: longer than both together

A turn that was not ended, or whose last call got no answer, leaves the device in doubt: an order may be on
its way that nobody has refused yet. Then the board is sent a newer one before anything is promised of it.

With one server alone, or on a database file, there are no turns, and nothing is written before the outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from fleetplane.domains.boards.fences import Fence
from fleetplane.domains.boards.kinds import SCOPE, BoardsSpec
from fleetplane.domains.boards.pins.kinds import (
    GPIO_DEVICE,
    Device,
    GpioStatus,
    device_number,
    status_of,
)
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Conflict, FleetplaneError, NotFound, Unavailable
from fleetplane.kernel.resources import Key, Kind, Nothing
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.store.engine import GroupAuthor
from fleetplane.kernel.unbroken import run_to_completion
from fleetplane.kernel.values.times import NS

BEGIN_SECONDS: Final = 5.0
TURN_SECONDS: Final = 12.0
WAIT_SECONDS: Final = 15.0
"""For another server to end its turn; one that died has lost it by then."""
LOOK_SECONDS: Final = 0.05
"""Between looks at memory, where the end of another server's turn is seen."""


class PinTurnSpec(BoardsSpec, frozen=True):
    server: str
    boot: int
    until_ns: int


PIN_TURN: Kind[PinTurnSpec, Nothing] = Kind("board-pin-turn", PinTurnSpec, Nothing)

Check = Callable[[Device, int], None]
"""Raises if a device may not be worked on, at a moment."""


class PinBusy(Unavailable):
    """Others are at the pin. Nothing was sent."""

    reason = "PIN_BUSY"


class TurnLost(Conflict):
    """Another server has worked on the pin meanwhile, and what it did counts."""

    reason = "PIN_ORDER_OLD"
    hint = "read the pin, and write it again if that is still wanted"


class HeldUp(Unavailable):
    """This server was stopped, or slow, between its decision and the call. Nothing was sent."""

    reason = "HELD_UP"


@dataclass(slots=True, kw_only=True)
class PinTurn:
    device: Device
    """As it was when the turn was taken."""
    fence: Fence | None = None
    """None where no other server is."""
    begin_by: float = float("inf")
    """On the monotonic clock: when nothing more may be begun."""
    over: bool = False

    def order(self, clock: Clock) -> Fence | None:
        """What to send along with an order that is about to be sent; raises if it is too late for one."""
        if clock.monotonic() > self.begin_by:
            raise HeldUp(
                f"this server was held up for more than {BEGIN_SECONDS:g} s; nothing was sent",
                retry_after_seconds=1.0,
            )
        return self.fence


class PinTurns:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def __repr__(self) -> str:
        return f"<PinTurns {self._store.count(PIN_TURN)}>"

    async def take(
        self, number: int, check: Check, *, wait_seconds: float = WAIT_SECONDS, removing: bool = False
    ) -> PinTurn:
        """Wait for a turn at a device. Turns of one server do not wait here for each other: the caller sees
        to that. `removing` also takes one that is being deleted."""
        if not self._store.shared:
            await self._store.settled(GPIO_DEVICE)
            device = _present(self._store.get(GPIO_DEVICE, SCOPE, str(number)), number, removing=removing)
            check(device, self._clock.now_ns())
            return PinTurn(device=device)
        give_up = self._clock.monotonic() + wait_seconds
        while True:
            turn = await self._try(number, check, removing=removing)
            if turn is not None:
                return turn
            while True:
                if self._clock.monotonic() >= give_up:
                    raise PinBusy(
                        f"another server is at the pin of device {number}; nothing was sent",
                        retry_after_seconds=1.0,
                    )
                await self._clock.sleep(LOOK_SECONDS)
                if not self._is_taken(number):
                    break

    async def _try(self, number: int, check: Check, *, removing: bool) -> PinTurn | None:
        begin_by = self._clock.monotonic() + BEGIN_SECONDS
        author = self._store.author

        def change(draft: Draft) -> tuple[Device, int] | None:
            device = _present(draft.get(GPIO_DEVICE, SCOPE, str(number)), number, removing=removing)
            check(device, draft.now_ns)
            held = draft.get(PIN_TURN, SCOPE, str(number))
            if held is not None and _is_anothers(held.spec, author, now_ns=draft.now_ns):
                return None
            if held is not None:  # whoever had it did not say what came of it
                device = _doubt(draft, device)
            until_ns = draft.now_ns + round(TURN_SECONDS * NS)
            spec = PinTurnSpec(server=author.server, boot=author.boot, until_ns=until_ns)
            return device, draft.put(PIN_TURN, SCOPE, str(number), spec=spec, renew=True).revision

        done = await self._store.transact(
            change,
            actor=f"system/{author.server}",
            action="boards.gpio_turn",
            touches=[turn_key(number), GPIO_DEVICE.key(SCOPE, str(number))],
        )
        if done.value is None:
            return None
        device, revision = done.value
        fence = Fence(lineage=self._store.lineage, revision=revision)
        return PinTurn(device=device, fence=fence, begin_by=begin_by)

    def _is_taken(self, number: int) -> bool:
        held = self._store.get(PIN_TURN, SCOPE, str(number))
        return held is not None and _is_anothers(held.spec, self._store.author, now_ns=self._clock.now_ns())

    async def sweep(self) -> None:
        """End turns that their servers did not end in time; the controller looks at their pins then."""
        now_ns = self._clock.now_ns()
        over = [one.name for one in self._store.list(PIN_TURN, SCOPE) if one.spec.until_ns <= now_ns]
        if not over:
            return

        def change(draft: Draft) -> None:
            for name in over:
                held = draft.get(PIN_TURN, SCOPE, name)
                if held is None or held.spec.until_ns > draft.now_ns:
                    continue
                draft.delete(PIN_TURN, SCOPE, name)
                device = draft.get(GPIO_DEVICE, SCOPE, name)
                if device is not None:
                    _doubt(draft, device)

        keys = [kind.key(SCOPE, name) for name in over for kind in (PIN_TURN, GPIO_DEVICE)]
        await self._store.transact(change, actor="system/boards", action="boards.gpio_turn_end", touches=keys)

    async def give_back(self, turn: PinTurn) -> None:
        """End a turn after which nothing was written down; what cannot be ended ends by itself."""
        if turn.fence is None or turn.over:
            return
        number = device_number(turn.device)
        try:
            await run_to_completion(self._give_back(turn, number))
        except FleetplaneError:  # its time runs out
            return

    async def _give_back(self, turn: PinTurn, number: int) -> None:
        await self._store.transact(
            lambda draft: end(draft, turn) if is_held(draft, turn) else None,
            actor=f"system/{self._store.author.server}",
            action="boards.gpio_turn_end",
            touches=[turn_key(number)],
        )


def turn_key(number: int) -> Key:
    return PIN_TURN.key(SCOPE, str(number))


# Parts of drafts.


def is_held(draft: Draft, turn: PinTurn) -> bool:
    """Whether a turn is still its server's."""
    if turn.fence is None:
        return True
    found = draft.get(PIN_TURN, SCOPE, turn.device.name)
    return found is not None and found.revision == turn.fence.revision


def require(draft: Draft, turn: PinTurn) -> None:
    if not is_held(draft, turn):
        raise TurnLost(f"another server has worked on device {turn.device.name} meanwhile")


def end(draft: Draft, turn: PinTurn) -> None:
    if turn.fence is not None:
        draft.delete(PIN_TURN, SCOPE, turn.device.name)


def doubted(status: GpioStatus) -> GpioStatus:
    """After an order of which nobody knows what came of it."""
    return msgspec.structs.replace(status, applied_generation=0, doubted=True, reason="", message="")


def _doubt(draft: Draft, device: Device) -> Device:
    return draft.put(GPIO_DEVICE, SCOPE, device.name, spec=device.spec, status=doubted(status_of(device)))


def is_taken(draft: Draft, number: int) -> bool:
    """Whether a server is at the device."""
    found = draft.get(PIN_TURN, SCOPE, str(number))
    return found is not None and found.spec.until_ns > draft.now_ns


def _is_anothers(spec: PinTurnSpec, author: GroupAuthor, *, now_ns: int) -> bool:
    """Whether to wait for it. One of this very process is left over: it does one thing at a time here."""
    return (spec.server, spec.boot) != (author.server, author.boot) and spec.until_ns > now_ns


def _present(device: Device | None, number: int, *, removing: bool) -> Device:
    if device is None or (device.spec.removing and not removing):
        raise NotFound(f"GPIO device {number} is not known", field="id")
    return device
