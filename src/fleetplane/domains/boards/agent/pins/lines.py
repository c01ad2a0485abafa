"""The claimed pins: claiming, driving, reading, making safe and releasing them, and their states.

Wires and records stay together: the record of a pin changes in the same call as the pin. Permissions are
checked by `PinBank`. Blocking, and for one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from fleetplane.domains.boards.agent.gpio.chip import (
    HIGH,
    LOW,
    Chip,
    ChipFactory,
    GpioLine,
    LineDirection,
    LinePull,
)
from fleetplane.domains.boards.agent.gpio.waveforms import PwmState, Waveforms
from fleetplane.domains.boards.agent.pins.rules import PinEvent, SafeState
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError


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


REOPEN_SECONDS: Final = 5.0
"""Between two looks for a chip that was not there."""


@dataclass(slots=True, kw_only=True)
class ConfiguredPin:
    """A pin that is configured. It has a line, unless the board's PWM block drives it."""

    direction: LineDirection
    pull: LinePull = LinePull.NONE
    line: GpioLine | None = None
    updated_ns: int = 0
    level: int = LOW
    """What was last driven; of an input, what was last read."""
    pwm: PwmState | None = None

    @property
    def is_output(self) -> bool:
        return self.direction is LineDirection.OUTPUT


class PinLines:
    def __init__(
        self, chip_factory: ChipFactory, clock: Clock, *, waveforms: Waveforms, consumer: str
    ) -> None:
        self._chip_factory = chip_factory
        self._clock = clock
        self._waveforms = waveforms
        self._consumer = consumer
        self._chip: Chip | None = None
        self._missing: FleetplaneError | None = None
        self._look_again_at = 0.0
        self.held: dict[int, ConfiguredPin] = {}
        self.changed_at: dict[int, float] = {}
        """By pin, when its output last changed; outlives the claim, or releasing would be a way around."""

    def __repr__(self) -> str:
        return f"<PinLines chip={self._chip} held={sorted(self.held)}>"

    @property
    def label(self) -> str:
        """The label of the open chip; empty while none is open. Safe to call from any thread."""
        chip = self._chip
        return chip.label if chip is not None else ""

    @property
    def missing(self) -> str:
        """Why there is no chip; empty while nobody looked, or there is one. May be asked by any thread."""
        missing = self._missing
        return missing.message if missing is not None else ""

    def open(self) -> Chip:
        """The chip, looked for again now and then if it was not there."""
        if self._chip is None:
            now = self._clock.monotonic()
            if self._missing is not None and now < self._look_again_at:
                raise self._missing
            try:
                self._chip = self._chip_factory()
                self._missing = None
            except FleetplaneError as error:
                self._missing, self._look_again_at = error, now + REOPEN_SECONDS
                raise
        return self._chip

    def take(self, pin: int, direction: LineDirection, pull: LinePull, level: int | None) -> ConfiguredPin:
        """The pin as a line, claimed if it was not ours; without a level an output keeps the one it shows."""
        if self._waveforms.in_hardware(pin):
            raise FailedPrecondition(
                f"pin {pin} is routed to the board's PWM block; as a line it would lose that route",
                details={"cause": "pwm-routed"},
                hint="use PWM, where a duty of 0 or 100 is a level",
            )
        held = self.held.get(pin)
        if held is None or held.line is None:
            line = self.open().claim(
                pin, direction=direction, pull=pull, level=level, consumer=self._consumer
            )
            held = self.held[pin] = ConfiguredPin(direction=direction, pull=pull, line=line)
            changed = level is not None
        else:
            self._waveforms.stop(pin)
            before, was_output = held.level, held.is_output
            held.line.reconfigure(direction=direction, pull=pull, level=level)
            held.direction, held.pull, held.pwm = direction, pull, None
            changed = level is not None and (not was_output or level != before)
        self.look(pin)
        if changed and held.is_output:
            self.changed_at[pin] = self._clock.monotonic()
        return held

    def drive(self, pin: int, level: int) -> ConfiguredPin:
        """The pin at this level, whatever it was; an input becomes an output."""
        held = self.held.get(pin)
        if self._waveforms.in_hardware(pin):
            self._waveforms.hold_level(pin, level)
            held = self.held.setdefault(pin, ConfiguredPin(direction=LineDirection.OUTPUT))
        elif held is None or held.line is None or not held.is_output:
            return self.take(pin, LineDirection.OUTPUT, held.pull if held else LinePull.NONE, level)
        else:
            self._waveforms.stop(pin)
            held.line.write(level)
        if level != held.level or held.pwm is not None:
            self.changed_at[pin] = self._clock.monotonic()
        held.level, held.pwm, held.updated_ns = level, None, self._clock.now_ns()
        return held

    def wave(self, pin: int, *, frequency_hz: int, duty_percent: int) -> ConfiguredPin:
        """A waveform on the pin: the block's where it is routed there, else a thread's."""
        held = self.held.get(pin)
        software = not self._waveforms.in_hardware(pin)
        if software:
            self._waveforms.require_fit(pin, frequency_hz)
            if held is None or not held.is_output:
                held = self.take(pin, LineDirection.OUTPUT, held.pull if held else LinePull.NONE, LOW)
        else:
            held = held or ConfiguredPin(direction=LineDirection.OUTPUT)
        pwm = PwmState(frequency_hz=frequency_hz, duty_percent=duty_percent, software=software)
        self._waveforms.start(pin, held.line, pwm)
        self.held[pin] = held
        held.pwm, held.updated_ns = pwm, self._clock.now_ns()
        self.changed_at[pin] = self._clock.monotonic()
        return held

    def look(self, pin: int) -> ConfiguredPin:
        """The pin with the level that it shows now."""
        held = self.held[pin]
        if held.pwm is not None:
            held.level = self._waveforms.level(pin, held.pwm)
        elif held.line is not None:
            held.level = held.line.read()
        held.updated_ns = self._clock.now_ns()
        return held

    def make_safe(self, pin: int, state: SafeState) -> None:
        """An input is safe as it is. A pin that is to become one is given up on the way."""
        held = self.held[pin]
        if state is SafeState.KEEP or not held.is_output:
            return
        if state is not SafeState.INPUT:
            self.drive(pin, HIGH if state is SafeState.HIGH else LOW)
            return
        if held.line is not None:
            self._waveforms.stop(pin)
            held.line.reconfigure(direction=LineDirection.INPUT, pull=held.pull)
        self.changed_at[pin] = self._clock.monotonic()
        self.give_up(pin)

    def give_up(self, pin: int) -> None:
        """Never raises: a line that cannot be given back is the kernel's already."""
        held = self.held.pop(pin, None)
        if held is None:
            return
        with suppress(FleetplaneError):
            self._waveforms.stop(pin)
        if held.line is not None:
            with suppress(FleetplaneError, OSError):
                held.line.release()

    def lose_chip(self, error: FleetplaneError) -> None:
        """The chip went away under us: what we held is gone, and the next call looks for it anew."""
        if self._chip is None:
            return
        chip, self._chip = self._chip, None
        self._missing, self._look_again_at = error, self._clock.monotonic()
        for pin in [pin for pin, held in self.held.items() if held.line is not None]:
            self.give_up(pin)
        with suppress(FleetplaneError, OSError):
            chip.close()

    def close(self) -> None:
        """Give everything up. Can be opened again."""
        for pin in list(self.held):
            self.give_up(pin)
        self._waveforms.close()
        if self._chip is not None:
            self._chip.close()
            self._chip = None
