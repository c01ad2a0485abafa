"""Descriptions of pins: state, reading and audit entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fleetplane.domains.boards.agent.gpio.chip import LineDirection, LinePull
from fleetplane.domains.boards.agent.gpio.waveforms import PwmState
from fleetplane.domains.boards.agent.pins.rules import PinEvent, SafeState


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseState:
    """What others may know of a lease: not its id, which is what proves it."""

    holder: str
    seconds_left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PinState:
    pin: int
    direction: LineDirection
    pull: LinePull
    level: int | None
    """On the wire now; None when it could not be read."""
    updated_ns: int
    """When the pin was last configured, written or read, on the wall clock."""
    safe_state: SafeState
    pwm: PwmState | None = None
    lease: LeaseState | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLevel:
    pin: int
    level: int
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One outcome. Every call leaves at least one, refused or not."""

    event: PinEvent
    user: str
    pin: int
    at_ns: int
    message: str = ""
    """Why, when it went wrong."""
    details: Mapping[str, str] = field(default_factory=dict)


Audit = Callable[[AuditEntry], None]
