"""What follows from what is wanted of a pin, who may write it, and what of it is sound. Pure.

    the device                                  the board is to
    disabled, being deleted, or its lease over  give the pin up, if it has it for us
    analog, SPI, I2C                            be left alone: those are no levels
    input                                       have it as an input, pulled as said
    output with a level, or a waveform          drive it
    output that nobody has written              be left alone; give it up if it was, or may be, driven before

A lease that has an end is a dead man's switch: what was written under it ends with it, however
that comes. The board is told about it with every write, so that it makes the pin safe by itself
when nobody renews the lease, this server included. One without an end is only a lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from fleetplane.domains.boards.agent.pins.rules import DUTY_PERCENT, FREQUENCY_HZ, HEADER, PROTECTED
from fleetplane.domains.boards.pins.kinds import (
    Device,
    DeviceState,
    DeviceType,
    Direction,
    GpioConfig,
    GpioSpec,
    GpioStatus,
    PinHold,
    Pull,
    status_of,
)
from fleetplane.kernel.errors import Conflict, FailedPrecondition, InvalidArgument, PermissionDenied
from fleetplane.kernel.values.times import NS

NAME_LIMIT: Final = 63
DESCRIPTION_LIMIT: Final = 255
HOLDER_LIMIT: Final = 256
LEASE_LIMIT_SECONDS: Final = 86_400.0
"""As long as a board lets one last."""
SAMPLE_RATE_LIMIT: Final = 1000
SAMPLE_SECONDS: Final = 1.0
"""Between kept readings at least, whatever the sample rate: faster ones can be streamed."""
CONFIG_LIMIT: Final = 2**31 - 1

DRIVEN: Final = frozenset({DeviceType.DIGITAL, DeviceType.PWM})
"""Types whose pins this server sets and reads."""


# What a board is to do.


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAlone:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUpPin:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    pull: Pull


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    level: int
    pull: Pull


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    frequency_hz: int
    duty_percent: int


Wish = LeaveAlone | GiveUpPin | Listen | Drive | Wave


@dataclass(frozen=True, slots=True, kw_only=True)
class PinSeen:
    """The configuration of a pin as its board reports it."""

    pin: int
    direction: Direction
    pull: Pull
    level: int


def wish(device: Device) -> Wish:
    spec, status = device.spec, status_of(device)
    nothing: Wish = GiveUpPin() if status.held or status.owed_lease_id or status.doubted else LeaveAlone()
    if status.owed_lease_id or not spec.enabled or spec.removing or spec.device_type not in DRIVEN:
        return nothing
    if spec.device_type is DeviceType.PWM:
        duty = spec.level if spec.level is not None else spec.config.duty_cycle or None
        if duty is None or not spec.config.frequency:
            return nothing
        return Wave(frequency_hz=spec.config.frequency, duty_percent=duty)
    if spec.direction is Direction.INPUT:
        return Listen(pull=spec.pull)
    return nothing if spec.level is None else Drive(level=spec.level, pull=spec.pull)


def is_met(wanted: Wish, device: Device, seen: PinSeen | None) -> bool:
    """Whether the board needs nothing done, by what it says of the pin."""
    current = status_of(device).applied_generation == device.generation
    match wanted:
        case LeaveAlone():
            return True
        case GiveUpPin():
            status = status_of(device)
            return seen is None and not status.owed_lease_id and not status.doubted
        case Listen(pull=pull):
            return seen is not None and seen.direction is Direction.INPUT and seen.pull is pull
        case Drive(level=level):
            return seen is not None and seen.direction is Direction.OUTPUT and seen.level == level and current
        case Wave():  # what a waveform is like cannot be seen, only that the pin is in use
            return seen is not None and seen.direction is Direction.OUTPUT and current


def settled(spec: GpioSpec, status: GpioStatus) -> GpioStatus:
    """With the one word that follows for the device's state."""
    if not spec.enabled:
        state = DeviceState.INACTIVE
    elif status.reason in ERRORS:
        state = DeviceState.ERROR
    else:
        state = DeviceState.ACTIVE
    return msgspec.structs.replace(status, state=state)


AWAY: Final = "BOARD_AWAY"
UNREACHABLE: Final = "BOARD_UNREACHABLE"
SILENT: Final = "BOARD_SILENT"
ERRORS: Final = frozenset(
    {
        "LINE_BUSY",
        "HARDWARE_MISSING",
        "HARDWARE_FAILED",
        "HARDWARE_UNSUPPORTED",
        "DEVICE_ACCESS_REFUSED",
        "PERMISSION_DENIED",
        "INVALID_ARGUMENT",
        "UNIMPLEMENTED",
        "BOARD_FAILED",
        "PIN_LEASED",
    }
)
"""Reasons that say something about the pin. That a board is away says nothing about its pins."""


# Writing.


def check_writable(device: Device, value: int, holder: str, *, now_ns: int) -> None:
    """Refuse a write that must not be, or cannot mean anything."""
    check_active(device)
    if device.spec.device_type is DeviceType.PWM:
        if value not in DUTY_PERCENT:
            raise InvalidArgument("value of a waveform is its duty cycle, 0 to 100", field="value")
        if not device.spec.config.frequency:
            raise FailedPrecondition("the waveform has no frequency yet", hint="set config.frequency")
    elif device.spec.direction is not Direction.OUTPUT:
        raise FailedPrecondition(f"device {device.name} is an input", details={"cause": "input"})
    elif value not in (0, 1):
        raise InvalidArgument("value must be 0 or 1", field="value")
    check_holder(device, holder, now_ns=now_ns)


def check_active(device: Device) -> None:
    if not device.spec.enabled:
        raise FailedPrecondition(f"device {device.name} is inactive", details={"cause": "inactive"})
    if device.spec.device_type not in DRIVEN:
        raise FailedPrecondition(
            f"device {device.name} is of type {device.spec.device_type}, which has no level to read or write",
            details={"cause": "type"},
        )


def check_holder(device: Device, holder: str, *, now_ns: int) -> None:
    lease = standing(status_of(device).lease, now_ns=now_ns)
    if lease is not None and lease.holder != holder:
        raise Conflict(
            f"device {device.name} is reserved by {lease.holder}",
            hint="wait until the reservation ends, or ask its holder",
            details={"cause": "leased", "holder": lease.holder},
        )


# Leases.


def standing(lease: PinHold | None, *, now_ns: int) -> PinHold | None:
    if lease is None or (lease.expires_at_ns is not None and lease.expires_at_ns <= now_ns):
        return None
    return lease


def seconds_left(lease: PinHold, *, now_ns: int) -> float | None:
    """None for one without an end."""
    return None if lease.expires_at_ns is None else max(0.0, (lease.expires_at_ns - now_ns) / NS)


def taken(
    lease: PinHold | None, holder: str, *, seconds: float | None, fresh_id: str, now_ns: int
) -> PinHold:
    """The lease once `holder` took or renewed it; whose it is was checked before."""
    _check_text("client_id", holder, HOLDER_LIMIT)
    if seconds is not None and not 0 < seconds <= LEASE_LIMIT_SECONDS:
        raise InvalidArgument(f"ttl must be more than 0 and at most {LEASE_LIMIT_SECONDS:g} s", field="ttl")
    until = None if seconds is None else now_ns + round(seconds * NS)
    before = standing(lease, now_ns=now_ns)
    if before is not None and (before.expires_at_ns is None) == (until is None):
        return msgspec.structs.replace(before, expires_at_ns=until)
    return PinHold(id=fresh_id, holder=holder, taken_at_ns=now_ns, expires_at_ns=until)


def undriven(spec: GpioSpec, status: GpioStatus) -> tuple[GpioSpec, GpioStatus]:
    """With nothing to be driven any more, and the board to be told if it knows of a lease."""
    owed = spec.lease_id or status.owed_lease_id
    return (
        msgspec.structs.replace(spec, level=None, lease_id=""),
        msgspec.structs.replace(status, owed_lease_id=owed, reason="", message=""),
    )


def lease_ended(spec: GpioSpec, status: GpioStatus, lease: PinHold) -> tuple[GpioSpec, GpioStatus]:
    """After a lease has ended, and with it what was written under it."""
    if spec.lease_id and spec.lease_id == lease.id:
        spec, status = undriven(spec, status)
    return spec, msgspec.structs.replace(status, lease=None)


# Descriptions.


def checked(spec: GpioSpec, *, unprotected: frozenset[int] = frozenset()) -> GpioSpec:
    """The spec, or the error that names its field."""
    spec = msgspec.structs.replace(spec, name=spec.name.strip())
    _check_text("name", spec.name, NAME_LIMIT)
    if len(spec.description) > DESCRIPTION_LIMIT:
        raise InvalidArgument(
            f"description is longer than {DESCRIPTION_LIMIT} characters", field="description"
        )
    if spec.pin not in HEADER:
        raise InvalidArgument(f"pin_number {spec.pin} is out of range: it is 0 to 27", field="pin_number")
    if spec.pin in PROTECTED and spec.pin not in unprotected:
        raise PermissionDenied(
            f"pin {spec.pin} is protected: it {PROTECTED[spec.pin]}",
            field="pin_number",
            details={"cause": "protected"},
        )
    _check_config(spec.config)
    if spec.device_type is DeviceType.PWM and spec.direction is not Direction.OUTPUT:
        raise InvalidArgument("a waveform needs direction output", field="direction")
    return spec


def _check_config(config: GpioConfig) -> None:
    for field in config.__struct_fields__:
        if not 0 <= getattr(config, field) <= CONFIG_LIMIT:
            raise InvalidArgument(f"config.{field} must not be negative", field=f"config.{field}")
    if config.frequency and config.frequency not in FREQUENCY_HZ:
        raise InvalidArgument("config.frequency must be 1 to 40000", field="config.frequency")
    if config.duty_cycle not in DUTY_PERCENT:
        raise InvalidArgument("config.duty_cycle must be 0 to 100", field="config.duty_cycle")
    if config.sample_rate > SAMPLE_RATE_LIMIT:
        raise InvalidArgument(
            f"config.sample_rate must be at most {SAMPLE_RATE_LIMIT}", field="config.sample_rate"
        )


def _check_text(field: str, text: str, limit: int) -> None:
    if not text or len(text) > limit or not text.isprintable():
        raise InvalidArgument(f"{field} must have 1 to {limit} printable characters", field=field)
