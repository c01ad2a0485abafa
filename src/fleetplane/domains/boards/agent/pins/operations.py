"""Every call about pins from its first check to its audit entry.

Plain blocking code for one thread, so that no caller who gives up half-way can leave a call half
done. It decides by `pin_rules`, acts through `PinLines`, and remembers leases. Time comes from the
clock; who waits for it is `Pins`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from fleetplane.domains.boards.agent.gpio.chip import (
    ChipMissing,
    LineDirection,
    LineIsInput,
    LinePull,
    require_level,
)
from fleetplane.domains.boards.agent.pins import rules as pin_rules
from fleetplane.domains.boards.agent.pins.lines import (
    Audit,
    AuditEntry,
    ConfiguredPin,
    LeaseState,
    PinLines,
    PinState,
    SeenLevel,
)
from fleetplane.domains.boards.agent.pins.rules import (
    PinCaller,
    PinEvent,
    PinLease,
    PinOperation,
    PinPolicy,
    PinRefusal,
)
from fleetplane.domains.boards.fences import Fence
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError, InvalidArgument

AGENT: Final = "agent"
"""The actor of automatic changes in the audit log: safe states, expiries."""


class PinBank:
    def __init__(self, lines: PinLines, policy: PinPolicy, clock: Clock, *, audit: Audit) -> None:
        self._lines = lines
        self._policy = policy
        self._clock = clock
        self._audit = audit
        self._leases: dict[int, PinLease] = {}
        self._newest: dict[int, Fence] = {}
        """Of each pin, the newest order that was carried out, or begun: also once the pin is given up."""

    def __repr__(self) -> str:
        return f"<PinBank {self._lines} leased={sorted(self._leases)}>"

    def configure(
        self, pin: int, *, direction: LineDirection, pull: LinePull, level: int | None, caller: PinCaller
    ) -> PinState:
        with self._outcome(PinOperation.CONFIGURE, pin, caller):
            if level is not None:
                require_level(level)
                if direction is LineDirection.OUTPUT:
                    self._mind_dwell(pin, level)
            held = self._lines.take(pin, direction, pull, level)
            self._extend(pin, caller)
        self._say(PinEvent.CONFIGURED, pin, caller.user, direction=direction, pull=pull)
        return self._state(pin, held)

    def read(self, pin: int, *, caller: PinCaller, claim: bool) -> SeenLevel:
        with self._outcome(PinOperation.READ, pin, caller):
            if claim and pin not in self._lines.held:
                self._lines.take(pin, LineDirection.INPUT, LinePull.NONE, None)
            self._configured(pin)
            held = self._lines.look(pin)
        self._say(PinEvent.READ, pin, caller.user, level=str(held.level))
        return SeenLevel(pin=pin, level=held.level, at_ns=held.updated_ns)

    def write(self, pin: int, level: int, *, caller: PinCaller, claim: bool) -> SeenLevel:
        with self._outcome(PinOperation.WRITE, pin, caller):
            require_level(level)
            if not (claim and pin not in self._lines.held) and not self._configured(pin).is_output:
                raise LineIsInput(f"pin {pin} is an input")
            self._mind_dwell(pin, level)
            held = self._lines.drive(pin, level)
            self._extend(pin, caller)
        self._say(PinEvent.WRITE, pin, caller.user, level=str(level))
        return SeenLevel(pin=pin, level=level, at_ns=held.updated_ns)

    def pwm(self, pin: int, *, frequency_hz: int, duty_percent: int, caller: PinCaller) -> PinState:
        with self._outcome(PinOperation.PWM, pin, caller):
            _object(pin_rules.waveform_refusal(frequency_hz, duty_percent))
            _object(pin_rules.waveform_dwell_refusal(self._policy.rule(pin), pin))
            held = self._lines.wave(pin, frequency_hz=frequency_hz, duty_percent=duty_percent)
            self._extend(pin, caller)
        made = "software" if held.pwm and held.pwm.software else "hardware"
        figures = {"frequency": str(frequency_hz), "duty_cycle": str(duty_percent), "made_by": made}
        self._say(PinEvent.PWM, pin, caller.user, **figures)
        return self._state(pin, held)

    def release(self, pin: int, *, caller: PinCaller) -> None:
        """Make the pin safe and give it up, with its lease; harmless when it was not ours."""
        with self._outcome(PinOperation.RELEASE, pin, caller):
            self._make_safe(pin, "released", give_up=True)
            self._leases.pop(pin, None)
        self._say(PinEvent.RELEASED, pin, caller.user)

    def lease(self, pin: int, *, caller: PinCaller) -> LeaseState:
        """Take, or extend, the lease that the caller names."""
        with self._outcome(PinOperation.LEASE, pin, caller):
            if not caller.lease_id:
                raise InvalidArgument("a lease needs an id", field="lease_id", details={"cause": "lease"})
            self._extend(pin, caller)
        return self._lease_state(self._leases[pin])

    def end_lease(self, pin: int, *, caller: PinCaller) -> None:
        """Give the lease back before its time: the pin is made safe as if it had run out."""
        with self._outcome(PinOperation.LEASE, pin, caller):
            ended = self._leases.pop(pin, None)
        if ended is not None:
            self._say(PinEvent.LEASE_ENDED, pin, caller.user)
            self._make_safe(pin, "lease ended")

    def rehearse(self, operation: PinOperation, pin: int, *, caller: PinCaller) -> None:
        """Raise as the operation would by policy or lease; touch nothing."""
        with self._outcome(operation, pin, caller, is_done=False):
            pass

    def states(self) -> tuple[PinState, ...]:
        """Every configured pin. One that cannot be read says so, and does not hide the others."""
        self.expire()
        missing: ChipMissing | None = None
        states: list[PinState] = []
        for pin, held in sorted(self._lines.held.items()):
            try:
                states.append(self._state(pin, self._lines.look(pin)))
            except FleetplaneError as error:
                states.append(self._state(pin, held, error=error.message))
                missing = error if isinstance(error, ChipMissing) else missing
        if missing is not None:
            self._lines.lose_chip(missing)
        return tuple(states)

    def expire(self) -> None:
        """Make safe every pin whose lease has run out."""
        now = self._clock.monotonic()
        for pin, lease in sorted(self._leases.items()):
            if now >= lease.expires_at:
                del self._leases[pin]
                self._say(PinEvent.LEASE_EXPIRED, pin, AGENT, holder=lease.holder)
                self._make_safe(pin, "lease expired")

    def next_expiry(self) -> float | None:
        return min((lease.expires_at for lease in self._leases.values()), default=None)

    def lose_control(self) -> None:
        """The server is lost: make pins safe that are configured so, and end their leases."""
        for pin in sorted(self._lines.held):
            if self._policy.rule(pin).safe_on_loss:
                self._leases.pop(pin, None)
                self._make_safe(pin, "control plane lost")

    def close(self) -> None:
        """Every pin safe and given up, the chip closed. Can be used again."""
        for pin in sorted(self._lines.held):
            self._make_safe(pin, "agent stopped", give_up=True)
        self._leases.clear()
        self._lines.close()

    @contextmanager
    def _outcome(
        self, operation: PinOperation, pin: int, caller: PinCaller, *, is_done: bool = True
    ) -> Iterator[None]:
        """The checks that every call goes through first, and the audit entry of one that fails."""
        ours = pin in self._lines.held
        failed = pin_rules.FAILED[operation]
        try:
            _object(pin_rules.pin_refusal(self._policy, operation, pin))
            self.expire()
            _object(pin_rules.order_refusal(self._newest.get(pin), operation, pin, caller))
            now, lease = self._clock.monotonic(), self._leases.get(pin)
            _object(pin_rules.lease_refusal(lease, operation, pin, caller, now=now))
            if is_done and caller.fence is not None and operation in pin_rules.CHANGING:
                self._newest[pin] = caller.fence
            yield
        except _Objection as objection:
            self._say_failed(objection.refusal.event, pin, caller, objection.refusal.error)
            raise objection.refusal.error from None
        except LineIsInput as error:
            self._say_failed(PinEvent.WRITE_TO_INPUT, pin, caller, error)
            raise
        except ChipMissing as error:
            self._say_failed(failed, pin, caller, error)
            self._lines.lose_chip(error)
            raise
        except FleetplaneError as error:
            self._say_failed(failed, pin, caller, error)
            raise
        finally:
            if not ours and pin in self._lines.held:
                self._say(PinEvent.GRANTED, pin, caller.user)

    def _make_safe(self, pin: int, why: str, *, give_up: bool = False) -> None:
        """Never raises: one pin that fails must not keep the next from being made safe."""
        if pin not in self._lines.held:
            return
        state = self._policy.rule(pin).safe_state
        try:
            self._lines.make_safe(pin, state)
            self._say(PinEvent.SAFE_STATE, pin, AGENT, state=state, why=why)
        except FleetplaneError as error:
            self._say(PinEvent.SAFE_STATE_FAILED, pin, AGENT, message=error.message, state=state, why=why)
        if give_up:
            self._lines.give_up(pin)

    def _configured(self, pin: int) -> ConfiguredPin:
        held = self._lines.held.get(pin)
        if held is None:
            raise FailedPrecondition(
                f"pin {pin} is not configured",
                details={"cause": "unconfigured"},
                hint="configure it as an input or an output first",
            )
        return held

    def _mind_dwell(self, pin: int, level: int) -> None:
        held = self._lines.held.get(pin)
        if held is not None and held.is_output and held.pwm is None and held.level == level:
            return
        rule, now = self._policy.rule(pin), self._clock.monotonic()
        _object(pin_rules.dwell_refusal(rule, pin, changed_at=self._lines.changed_at.get(pin), now=now))

    def _extend(self, pin: int, caller: PinCaller) -> None:
        before = self._leases.get(pin)
        lease = pin_rules.lease_after(before, caller, now=self._clock.monotonic())
        if lease is None:
            return
        self._leases[pin] = lease
        if before is None or before.id != lease.id:
            self._say(PinEvent.LEASED, pin, caller.user, seconds=f"{caller.lease_seconds:g}")

    def _state(self, pin: int, held: ConfiguredPin, *, error: str = "") -> PinState:
        lease = self._leases.get(pin)
        return PinState(
            pin=pin,
            direction=held.direction,
            pull=held.pull,
            level=None if error else held.level,
            updated_ns=held.updated_ns,
            safe_state=self._policy.rule(pin).safe_state,
            pwm=held.pwm,
            lease=self._lease_state(lease) if lease else None,
            error=error,
        )

    def _lease_state(self, lease: PinLease) -> LeaseState:
        left = max(0.0, lease.expires_at - self._clock.monotonic())
        return LeaseState(holder=lease.holder, seconds_left=left)

    def _say_failed(self, event: PinEvent, pin: int, caller: PinCaller, error: FleetplaneError) -> None:
        cause = error.details.get("cause", error.reason)
        self._say(event, pin, caller.user, message=error.message, cause=cause)

    def _say(self, event: PinEvent, pin: int, user: str, *, message: str = "", **details: str) -> None:
        now_ns = self._clock.now_ns()
        self._audit(
            AuditEntry(event=event, user=user, pin=pin, at_ns=now_ns, message=message, details=details)
        )


class _Objection(Exception):
    """A rule's refusal on its way to the audit log."""

    def __init__(self, refusal: PinRefusal) -> None:
        super().__init__(refusal.error.message)
        self.refusal = refusal


def _object(refusal: PinRefusal | None) -> None:
    if refusal is not None:
        raise _Objection(refusal)
