"""Which pin may be touched, by whom, and how soon again. Pure.

The checks of a call run in one order, always: may this operation be used at all, is the pin
protected, restricted, outside the allow list, outside the header, are the figures of a waveform in
range; then whether a newer order came before, the lease, the dwell time. The first that objects is the
answer, so that a caller and the audit log always read the same reason. Nothing here knows a chip or a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from fleetplane.domains.boards.agent.gpio.chip import LeasedByAnother, OlderOrder
from fleetplane.domains.boards.fences import Fence
from fleetplane.kernel.errors import (
    FailedPrecondition,
    FleetplaneError,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    SettingsError,
)

HEADER: Final = range(28)
"""BCM 0 to 27: what the 40-pin header carries."""
PROTECTED: Final[Mapping[int, str]] = {
    0: "identifies the add-on board (ID_SD)",
    1: "identifies the add-on board (ID_SC)",
    2: "is the data line of I2C bus 1",
    3: "is the clock line of I2C bus 1",
    14: "is the serial console's TX",
    15: "is the serial console's RX",
}
FREQUENCY_HZ: Final = range(1, 40_001)
DUTY_PERCENT: Final = range(101)
LEASE_SECONDS: Final = 60.0
"""Of a lease whose taker says nothing: two missed heartbeats of 30 s."""
LEASE_LIMIT_SECONDS: Final = 86_400.0
LEASE_ID_LIMIT: Final = 128
DWELL_LIMIT_SECONDS: Final = 86_400.0


class PinOperation(StrEnum):
    READ = "read"
    WRITE = "write"
    CONFIGURE = "configure"
    PWM = "pwm"
    RELEASE = "release"
    LEASE = "lease"


CHANGING: Final = frozenset(PinOperation) - {PinOperation.READ}
"""What a lease keeps others from doing."""


class SafeState(StrEnum):
    """What a pin is to do when nobody answers for it any more."""

    INPUT = "input"
    LOW = "low"
    HIGH = "high"
    KEEP = "keep"


class PinEvent(StrEnum):
    """What the audit log calls things."""

    OPERATION_DENIED = "operation_denied"
    PROTECTED_DENIED = "critical_pin_access_denied"
    RESTRICTED = "restricted_pin_access"
    NOT_ALLOWED = "pin_not_allowed"
    GRANTED = "pin_access_granted"
    """A line became ours; said once for each claim."""
    CONFIGURED = "pin_configured"
    CONFIGURE_FAILED = "pin_configure_failed"
    READ = "pin_read"
    READ_FAILED = "pin_read_failed"
    WRITE = "pin_write"
    WRITE_FAILED = "pin_write_failed"
    WRITE_TO_INPUT = "write_to_input_pin"
    PWM = "pwm_configured"
    PWM_FAILED = "pwm_set_failed"
    RELEASED = "pin_released"
    RELEASE_FAILED = "pin_release_failed"
    LEASED = "lease_granted"
    LEASE_CONFLICT = "lease_conflict"
    OLDER_ORDER = "older_order_denied"
    LEASE_EXPIRED = "lease_expired"
    LEASE_ENDED = "lease_ended"
    DWELL_DENIED = "dwell_time_denied"
    SAFE_STATE = "safe_state_applied"
    SAFE_STATE_FAILED = "safe_state_failed"


FAILED: Final = {
    PinOperation.READ: PinEvent.READ_FAILED,
    PinOperation.WRITE: PinEvent.WRITE_FAILED,
    PinOperation.CONFIGURE: PinEvent.CONFIGURE_FAILED,
    PinOperation.PWM: PinEvent.PWM_FAILED,
    PinOperation.RELEASE: PinEvent.RELEASE_FAILED,
    PinOperation.LEASE: PinEvent.LEASE_CONFLICT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRule:
    """What holds for one pin besides whether it may be touched."""

    safe_state: SafeState = SafeState.INPUT
    """An input, because that is what every pin is between power-on and the first program: whatever
    hangs on it has to be safe with that already."""
    safe_on_loss: bool = False
    """Also when the control plane is out of reach, not only when a lease or the agent ends."""
    dwell_seconds: float = 0.0
    """The least time between two changes of an output; protects relays and what they switch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinPolicy:
    """Decided by the node's own configuration, never from afar."""

    operations: frozenset[PinOperation] = frozenset(PinOperation)
    unprotected: frozenset[int] = frozenset()
    """Protected pins that may be used all the same."""
    restricted: frozenset[int] = frozenset()
    allowed: frozenset[int] | None = None
    """None allows every pin of the header that nothing else refuses."""
    rules: Mapping[int, PinRule] = field(default_factory=dict)
    default_rule: PinRule = PinRule()

    def __post_init__(self) -> None:
        for name in ("unprotected", "restricted", "allowed", "rules"):
            for pin in getattr(self, name) or ():
                if pin not in HEADER:
                    raise SettingsError(f"{name}: there is no pin {pin}, pins are 0 to 27", field=name)
        for pin, rule in {-1: self.default_rule, **self.rules}.items():
            if not 0 <= rule.dwell_seconds <= DWELL_LIMIT_SECONDS:
                whose = "every pin" if pin < 0 else f"pin {pin}"
                raise SettingsError(f"the dwell time of {whose} is not within a day", field="dwell_seconds")

    def rule(self, pin: int) -> PinRule:
        return self.rules.get(pin, self.default_rule)


@dataclass(frozen=True, slots=True, kw_only=True)
class PinCaller:
    """Who asks, and under which lease."""

    user: str
    lease_id: str = ""
    """Taken, or extended, by every change made under it; empty asks for none."""
    lease_seconds: float = LEASE_SECONDS
    fence: Fence | None = None
    """Its place among the orders of several servers; None where nobody says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinLease:
    id: str
    holder: str
    expires_at: float
    """On the monotonic clock: a wall clock set right must not end a lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRefusal:
    event: PinEvent
    error: FleetplaneError


def pin_refusal(policy: PinPolicy, operation: PinOperation, pin: int) -> PinRefusal | None:
    """Whether this pin may be touched in this way at all."""
    if operation not in policy.operations:
        return _denied(
            PinEvent.OPERATION_DENIED, f"this node does not allow to {operation} pins", "operation"
        )
    if pin in PROTECTED and pin not in policy.unprotected:
        return _denied(PinEvent.PROTECTED_DENIED, f"pin {pin} is protected: it {PROTECTED[pin]}", "protected")
    if pin in policy.restricted:
        return _denied(PinEvent.RESTRICTED, f"pin {pin} is restricted on this node", "restricted")
    if policy.allowed is not None and pin not in policy.allowed:
        return _denied(PinEvent.NOT_ALLOWED, f"pin {pin} is not on this node's allow list", "not-allowed")
    if pin not in HEADER:
        return _out_of_range("pin", pin, HEADER, FAILED[operation])
    return None


def waveform_refusal(frequency_hz: int, duty_percent: int) -> PinRefusal | None:
    if frequency_hz not in FREQUENCY_HZ:
        return _out_of_range("frequency", frequency_hz, FREQUENCY_HZ, PinEvent.PWM_FAILED)
    if duty_percent not in DUTY_PERCENT:
        return _out_of_range("duty_cycle", duty_percent, DUTY_PERCENT, PinEvent.PWM_FAILED)
    return None


def order_refusal(
    newest: Fence | None, operation: PinOperation, pin: int, caller: PinCaller
) -> PinRefusal | None:
    """Of several servers, the order that was written down last counts, in whichever order they come."""
    if operation not in CHANGING or caller.fence is None or not caller.fence.is_older_than(newest):
        return None
    message = f"a newer order about pin {pin} was carried out before this one came"
    return PinRefusal(event=PinEvent.OLDER_ORDER, error=OlderOrder(message))


def lease_refusal(
    lease: PinLease | None, operation: PinOperation, pin: int, caller: PinCaller, *, now: float
) -> PinRefusal | None:
    """One writer: while a lease lasts, only calls that name it change the pin."""
    if caller.lease_id and len(caller.lease_id) > LEASE_ID_LIMIT:
        error = InvalidArgument(
            f"a lease's id has at most {LEASE_ID_LIMIT} characters",
            field="lease_id",
            details={"cause": "range"},
        )
        return PinRefusal(event=FAILED[operation], error=error)
    if not 0 < caller.lease_seconds <= LEASE_LIMIT_SECONDS:
        return _out_of_range("lease_seconds", caller.lease_seconds, None, FAILED[operation])
    if operation not in CHANGING or lease is None or lease.id == caller.lease_id or now >= lease.expires_at:
        return None
    left = lease.expires_at - now
    message = f"pin {pin} is leased by {lease.holder} for another {left:.1f} s"
    return PinRefusal(event=PinEvent.LEASE_CONFLICT, error=LeasedByAnother(message, holder=lease.holder))


def lease_after(lease: PinLease | None, caller: PinCaller, *, now: float) -> PinLease | None:
    """The lease once a change by `caller` went through. An extension never shortens."""
    if not caller.lease_id:
        return lease
    expires_at = now + caller.lease_seconds
    if lease is not None and lease.id == caller.lease_id:
        expires_at = max(expires_at, lease.expires_at)
    return PinLease(id=caller.lease_id, holder=caller.user, expires_at=expires_at)


def dwell_refusal(rule: PinRule, pin: int, *, changed_at: float | None, now: float) -> PinRefusal | None:
    """Whether the pin's last change is too recent for another."""
    if changed_at is None or now - changed_at >= rule.dwell_seconds:
        return None
    left = rule.dwell_seconds - (now - changed_at)
    return PinRefusal(
        event=PinEvent.DWELL_DENIED,
        error=ResourceExhausted(
            f"pin {pin} changes at most once in {rule.dwell_seconds:g} s; try again in {left:.3f} s",
            retry_after_seconds=left,
            details={"cause": "dwell"},
        ),
    )


def waveform_dwell_refusal(rule: PinRule, pin: int) -> PinRefusal | None:
    """A waveform is nothing but changes, so a pin with a dwell time cannot carry one."""
    if rule.dwell_seconds <= 0:
        return None
    message = f"pin {pin} changes at most once in {rule.dwell_seconds:g} s, so it carries no waveform"
    return PinRefusal(
        event=PinEvent.DWELL_DENIED, error=FailedPrecondition(message, details={"cause": "dwell"})
    )


def _denied(event: PinEvent, message: str, cause: str) -> PinRefusal:
    return PinRefusal(event=event, error=PermissionDenied(message, details={"cause": cause}))


def _out_of_range(name: str, value: float, span: range | None, event: PinEvent) -> PinRefusal:
    allowed = f"{span.start} to {span.stop - 1}" if span else f"more than 0, at most {LEASE_LIMIT_SECONDS:g}"
    error = InvalidArgument(
        f"{name} {value} is out of range: it is {allowed}", field=name, details={"cause": "range"}
    )
    return PinRefusal(event=event, error=error)
