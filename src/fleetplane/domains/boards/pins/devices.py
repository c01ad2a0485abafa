"""The pins of boards, as records in the store: each change of one is one transaction.

Knows the store and the rules; knows no protobuf and no boards' agents. Whether a board does what is
written here is seen to by `gpio_controller`; what it answered comes back through `found`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from fleetplane.domains.boards.inventory.boards import SERVER
from fleetplane.domains.boards.inventory.numbers import Numbers
from fleetplane.domains.boards.kinds import BOARD, SCOPE
from fleetplane.domains.boards.pins import rules, turns
from fleetplane.domains.boards.pins.kinds import (
    GPIO_DEVICE,
    Device,
    GpioSpec,
    GpioStatus,
    PinHold,
    device_number,
    status_of,
)
from fleetplane.domains.boards.pins.turns import PinTurn, turn_key
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    AlreadyExists,
    FailedPrecondition,
    NotFound,
    PermissionDenied,
)
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import ABSENT, Draft, Store

LEASE_ID_BYTES = 16

Step = Callable[[GpioSpec, GpioStatus], tuple[GpioSpec, GpioStatus]]


class Devices:
    def __init__(self, store: Store, clock: Clock, *, unprotected: frozenset[int] = frozenset()) -> None:
        self._store = store
        self._clock = clock
        self._unprotected = unprotected
        self._numbers = Numbers(store, "gpio")
        self._by_board: tuple[Sequence[Device], dict[int, list[Device]]] = ((), {})
        self._with_lease: tuple[Sequence[Device], list[Device]] = ((), [])

    def __repr__(self) -> str:
        return f"<Devices {len(self._store.list(GPIO_DEVICE, SCOPE))}>"

    # Reading.

    def get(self, number: int) -> Device | None:
        """None as well for one that is being deleted."""
        found = self.kept(number)
        return found if found is not None and not found.spec.removing else None

    def kept(self, number: int) -> Device | None:
        """The device, also while it is being deleted."""
        return self._store.get(GPIO_DEVICE, SCOPE, str(number))

    def require(self, number: int, *, field: str = "id") -> Device:
        return _present(self.get(number), number, field)

    def all(self) -> list[Device]:
        """By number."""
        found = [device for device in self._store.list(GPIO_DEVICE, SCOPE) if not device.spec.removing]
        return sorted(found, key=device_number)

    def of_board(self, board: int) -> list[Device]:
        """By pin, those that are being deleted among them."""
        kept = self._store.list(GPIO_DEVICE, SCOPE)
        if self._by_board[0] is not kept:
            grouped: dict[int, list[Device]] = {}
            for device in sorted(kept, key=lambda one: one.spec.pin):
                grouped.setdefault(device.spec.board, []).append(device)
            self._by_board = (kept, grouped)
        return self._by_board[1].get(board, [])

    def with_lease(self) -> list[Device]:
        """Those with a reservation, also one whose time is over. Asked often, so kept until one changes."""
        kept = self._store.list(GPIO_DEVICE, SCOPE)
        if self._with_lease[0] is not kept:
            self._with_lease = (kept, [device for device in kept if status_of(device).lease is not None])
        return self._with_lease[1]

    def reserved(self) -> list[Device]:
        """Those that nobody but a holder may write now, by number."""
        now_ns = self._clock.now_ns()
        found = [one for one in self.with_lease() if rules.standing(status_of(one).lease, now_ns=now_ns)]
        return sorted(found, key=device_number)

    async def up_to_date(self) -> None:
        """Wait for what is being written, so that what is read next includes it."""
        await self._store.settled(GPIO_DEVICE)

    # Describing.

    async def create(self, spec: GpioSpec, *, actor: str) -> Device:
        spec = rules.checked(spec, unprotected=self._unprotected)
        number = await self._numbers.take()
        done = await self._store.transact(
            lambda draft: self.make(draft, number, spec),
            actor=actor,
            action="boards.gpio_create",
            touches=[_key(number), self._numbers.key],
        )
        return done.value

    def take_number(self, draft: Draft) -> int:
        """For a device that is about to be made in a draft; one that is not made leaves a gap."""
        return self._numbers.within(draft)

    def make(self, draft: Draft, number: int, spec: GpioSpec) -> Device:
        """The change that creates a device."""
        spec = rules.checked(spec, unprotected=self._unprotected)
        if draft.get(BOARD, SCOPE, str(spec.board)) is None:
            raise NotFound(f"board {spec.board} is not known", field="node_id")
        holder = draft.claimed_by(GPIO_DEVICE, SCOPE, "pin", _place(spec))
        if holder is not None:
            raise AlreadyExists(
                f"pin {spec.pin} of board {spec.board} is that of device {holder}",
                field="pin_number",
                details={"device": holder},
            )
        draft.claim(GPIO_DEVICE, SCOPE, "pin", _place(spec), str(number))
        self._numbers.record(draft, number)
        status = rules.settled(spec, GpioStatus())
        return draft.put(GPIO_DEVICE, SCOPE, str(number), spec=spec, status=status, expect=ABSENT)

    async def update(self, number: int, *, holder: str, actor: str, **changes: object) -> Device:
        """`changes` are fields of the spec; the board follows when it can.

        `holder` must have the reservation if there is one: another direction, or none, drives a pin no less
        than a level does. A level that was written means nothing once the direction or type is another.
        """
        done = await self._store.transact(
            lambda draft: self.redescribe(draft, number, holder=holder, **changes),
            actor=actor,
            action="boards.gpio_update",
            touches=[_key(number)],
        )
        return done.value

    def redescribe(self, draft: Draft, number: int, *, holder: str, **changes: object) -> Device:
        """The change that `update` makes."""

        def step(spec: GpioSpec, status: GpioStatus) -> tuple[GpioSpec, GpioStatus]:
            wanted = rules.checked(msgspec.structs.replace(spec, **changes), unprotected=self._unprotected)
            if (wanted.direction, wanted.device_type) != (spec.direction, spec.device_type):
                wanted, status = rules.undriven(wanted, status)
            return wanted, msgspec.structs.replace(status, reason="", message="")

        return change_device(draft, number, step, holder=holder)

    def drive(self, draft: Draft, number: int, level: int | None, *, holder: str) -> Device:
        """The change that says what a device is to drive; its board follows when it can. None: nothing."""
        device = _present(_visible(draft, number), number, "id")
        if device.spec.level == level:
            return device
        if level is not None:
            rules.check_writable(device, level, holder, now_ns=draft.now_ns)

        def step(spec: GpioSpec, status: GpioStatus) -> tuple[GpioSpec, GpioStatus]:
            if level is None:
                return rules.undriven(spec, status)
            return msgspec.structs.replace(spec, level=level, lease_id=""), status

        return change_device(draft, number, step, holder=holder)

    async def delete(self, number: int, *, holder: str, actor: str) -> Device:
        """Gone for everyone at once; its pin is free once its board has given it up.

        `holder` must have the reservation if there is one.
        """
        done = await self._store.transact(
            lambda draft: remove_device(draft, number, holder=holder),
            actor=actor,
            action="boards.gpio_delete",
            touches=[_key(number)],
        )
        return done.value

    async def forget(self, number: int, *, actor: str = SERVER) -> Device | None:
        """Delete the record of one whose pin is free; None if there is none.

        Whoever has the reservation has agreed already.
        """

        def change(draft: Draft) -> Device | None:
            device = draft.get(GPIO_DEVICE, SCOPE, str(number))
            if device is None:
                return None
            return _forget(draft, device)

        done = await self._store.transact(
            change, actor=actor, action="boards.gpio_delete", touches=[_key(number)]
        )
        return done.value

    # What boards did.

    async def written(
        self, turn: PinTurn, level: int, *, lease_id: str, at_ns: int, actor: str
    ) -> Device | None:
        """A board drives the level, which is from now on what it should drive. None if the device is gone.

        Ends the turn; raises `TurnLost` if another server has had one since.
        """

        def step(spec: GpioSpec, status: GpioStatus) -> tuple[GpioSpec, GpioStatus]:
            spec = msgspec.structs.replace(spec, level=level, lease_id=lease_id)
            return spec, _applied(status, value=float(level), at_ns=at_ns)

        number = device_number(turn.device)
        noted = await self._note(
            number, step, actor=actor, action="boards.gpio_write", applied=True, turn=turn, ends=True
        )
        turn.over = True
        return noted

    async def found(
        self,
        device: Device,
        step: Callable[[GpioStatus], GpioStatus],
        *,
        applied: bool = False,
        turn: PinTurn | None = None,
    ) -> Device | None:
        """What a board was found to do, or not. Nothing is written if that is nothing new.

        `applied` says that the board has what the device's spec was at its generation. Where several servers
        call boards, what was seen without a turn counts only if nobody has changed the device since.
        """

        def stepped(spec: GpioSpec, status: GpioStatus) -> tuple[GpioSpec, GpioStatus]:
            status = step(status)
            if applied:
                status = msgspec.structs.replace(status, applied_generation=device.generation, doubted=False)
            return spec, status

        return await self._note(
            device_number(device),
            stepped,
            actor=SERVER,
            action="boards.gpio_found",
            turn=turn,
            seen=device.revision if turn is None and self._store.shared else None,
        )

    async def doubted(self, turn: PinTurn) -> None:
        """Nobody knows what a board made of an order: have the controller look. Ends the turn."""

        await self._note(
            device_number(turn.device),
            lambda spec, status: (spec, turns.doubted(status)),
            actor=SERVER,
            action="boards.gpio_doubt",
            turn=turn,
            ends=True,
        )
        turn.over = True

    # Reservations.

    async def reserve(self, turn: PinTurn, holder: str, *, seconds: float | None, actor: str) -> Device:
        """Let nobody else write for so long; None for until it is given back. The same holder renews.

        Ends the turn; raises `TurnLost` if another server has had one since.
        """
        number = device_number(turn.device)
        fresh = self._clock.token_bytes(LEASE_ID_BYTES).hex()

        def change(draft: Draft) -> Device:
            turns.require(draft, turn)
            device = _present(_visible(draft, number), number, "id")
            rules.check_holder(device, holder, now_ns=draft.now_ns)
            turns.end(draft, turn)
            spec, status = device.spec, status_of(device)
            before = status.lease
            lease = rules.taken(before, holder, seconds=seconds, fresh_id=fresh, now_ns=draft.now_ns)
            if before is not None and before.id != lease.id:
                spec, status = rules.lease_ended(spec, status, before)
            return _put(draft, device, spec, msgspec.structs.replace(status, lease=lease))

        done = await self._store.transact(
            change, actor=actor, action="boards.gpio_reserve", touches=[_key(number), turn_key(number)]
        )
        turn.over = True
        return done.value

    async def release(self, number: int, holder: str, *, actor: str, anyones: bool = False) -> Device:
        """Give a reservation back before its time; `anyones` also that of somebody else."""

        def change(draft: Draft) -> Device:
            device = _present(_visible(draft, number), number, "id")
            lease = rules.standing(status_of(device).lease, now_ns=draft.now_ns)
            if lease is None:
                raise FailedPrecondition(
                    f"device {number} is not reserved", details={"cause": "not reserved"}
                )
            if lease.holder != holder and not anyones:
                raise PermissionDenied(
                    f"device {number} is reserved by {lease.holder}",
                    hint="its holder or an administrator gives it back",
                    details={"cause": "leased"},
                )
            return _end_lease(draft, device, lease)

        done = await self._store.transact(
            change, actor=actor, action="boards.gpio_release", touches=[_key(number)]
        )
        return done.value

    async def expire(self, numbers: Iterable[int], *, actor: str = SERVER) -> list[Device]:
        """End the reservations among these whose time is over; the devices that had one."""
        wanted = list(numbers)

        def change(draft: Draft) -> list[Device]:
            ended = []
            for number in wanted:
                device = draft.get(GPIO_DEVICE, SCOPE, str(number))
                lease = status_of(device).lease if device is not None else None
                if device is None or lease is None or rules.standing(lease, now_ns=draft.now_ns):
                    continue
                ended.append(_end_lease(draft, device, lease))
            return ended

        done = await self._store.transact(
            change, actor=actor, action="boards.gpio_expire", touches=[_key(number) for number in wanted]
        )
        return done.value

    async def cleanup(self, *, actor: str) -> list[Device]:
        """End every reservation whose time is over."""
        now_ns = self._clock.now_ns()
        over = [
            device_number(device)
            for device in self.with_lease()
            if rules.standing(status_of(device).lease, now_ns=now_ns) is None
        ]
        return await self.expire(over, actor=actor) if over else []

    # Writing.

    async def _note(
        self,
        number: int,
        step: Step,
        *,
        actor: str,
        action: str,
        applied: bool = False,
        turn: PinTurn | None = None,
        ends: bool = False,
        seen: int | None = None,
    ) -> Device | None:
        """`seen` is the revision that a device must still have; else nothing is written."""

        def change(draft: Draft) -> Device | None:
            if turn is not None:
                turns.require(draft, turn)
                if ends:
                    turns.end(draft, turn)
            device = draft.get(GPIO_DEVICE, SCOPE, str(number))
            if device is None or (seen is not None and device.revision != seen):
                return None
            made = _put(draft, device, *step(device.spec, status_of(device)))
            if not applied:
                return made
            status = msgspec.structs.replace(status_of(made), applied_generation=made.generation)
            return _put(draft, made, made.spec, status)

        touches = [_key(number), turn_key(number)] if ends else [_key(number)]
        done = await self._store.transact(change, actor=actor, action=action, touches=touches)
        return done.value


# The changes themselves, as functions of a draft.


def change_device(draft: Draft, number: int, step: Step, *, holder: str) -> Device:
    """Take a step with a device; `holder` must have the reservation if there is one."""
    device = _present(_visible(draft, number), number, "id")
    rules.check_holder(device, holder, now_ns=draft.now_ns)
    return _put(draft, device, *step(device.spec, status_of(device)))


def remove_device(draft: Draft, number: int, *, holder: str) -> Device:
    """Delete a device at once if its board does not have the pin, else as soon as it has given it up."""
    device = _present(_visible(draft, number), number, "id")
    rules.check_holder(device, holder, now_ns=draft.now_ns)
    # What a server is about to do at the board is not known yet: then the pin is given up in any case.
    if not status_of(device).held and not turns.is_taken(draft, number):
        return _forget(draft, device)

    def step(spec: GpioSpec, status: GpioStatus) -> tuple[GpioSpec, GpioStatus]:
        spec, status = rules.undriven(msgspec.structs.replace(spec, removing=True), status)
        return spec, msgspec.structs.replace(status, lease=None, held=True)

    return change_device(draft, number, step, holder=holder)


def _forget(draft: Draft, device: Device) -> Device:
    draft.release(GPIO_DEVICE, SCOPE, "pin", _place(device.spec), device.name)
    return draft.delete(GPIO_DEVICE, SCOPE, device.name)


def guard_boards(draft: Draft, board: int) -> None:
    """A board with pins in use is not forgotten."""
    using = [
        device.name
        for device in draft.list(GPIO_DEVICE, SCOPE)
        if device.spec.board == board and not device.spec.removing
    ]
    if using:
        raise FailedPrecondition(
            f"board {board} still has {len(using)} GPIO devices, such as device {using[0]}",
            hint="delete its GPIO devices first",
        )


def _applied(status: GpioStatus, *, value: float | None, at_ns: int) -> GpioStatus:
    return msgspec.structs.replace(
        status, held=True, value=value, value_at_ns=at_ns, reason="", message="", doubted=False
    )


def _end_lease(draft: Draft, device: Device, lease: PinHold) -> Device:
    return _put(draft, device, *rules.lease_ended(device.spec, status_of(device), lease))


def _put(draft: Draft, device: Device, spec: GpioSpec, status: GpioStatus) -> Device:
    return draft.put(GPIO_DEVICE, SCOPE, device.name, spec=spec, status=rules.settled(spec, status))


def _visible(draft: Draft, number: int) -> Device | None:
    device = draft.get(GPIO_DEVICE, SCOPE, str(number))
    return device if device is not None and not device.spec.removing else None


def _place(spec: GpioSpec) -> str:
    return f"{spec.board}/{spec.pin}"


def _key(number: int) -> Key:
    return GPIO_DEVICE.key(SCOPE, str(number))


def _present(device: Device | None, number: int, field: str) -> Device:
    if device is None:
        raise NotFound(f"GPIO device {number} is not known", field=field)
    return device
