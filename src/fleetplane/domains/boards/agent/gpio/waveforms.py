"""Waveforms on pins: the board's PWM block where a pin is routed to it, a thread elsewhere.

The thread is good for dimming a lamp, not for precision: each edge comes when the scheduler lets it, some
tens of microseconds late at best. Edges are computed from the start of the waveform, so lateness never adds
up. One thread serves all pins.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fleetplane.domains.boards.agent.gpio.chip import HIGH, LOW, GpioLine, HardwareOverloaded
from fleetplane.domains.boards.agent.gpio.sysfs_pwm import HardwarePwm
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError

SOFTWARE_LIMIT_HZ: Final = 1000
"""Two edges a millisecond: beyond it the thread's lateness is a large part of every cycle."""
SOFTWARE_PINS_LIMIT: Final = 8
JOIN_SECONDS: Final = 2.0
_HAIR: Final = 1e-4
"""Of a cycle. An edge computed in floating point may lie to the wrong side of itself: on a machine that
has been up for three years, by 15 ns, which is a sixth of this at 1000 Hz."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waveform:
    frequency_hz: int
    duty_percent: int
    start: float

    def at(self, now: float) -> tuple[int, float]:
        """The level at this moment, and until when it lasts."""
        if self.duty_percent in (0, 100):
            return (HIGH if self.duty_percent else LOW), math.inf
        cycles = (now - self.start) * self.frequency_hz
        whole = math.floor(cycles + _HAIR)
        share = self.duty_percent / 100
        if cycles - whole < share - _HAIR:
            return HIGH, self.start + (whole + share) / self.frequency_hz
        return LOW, self.start + (whole + 1) / self.frequency_hz


@dataclass(slots=True, kw_only=True)
class _Job:
    line: GpioLine
    waveform: Waveform
    level: int | None = None
    until: float = 0.0
    error: FleetplaneError | None = None


class SoftwarePwm:
    """While a waveform runs, its line belongs to this object; `stop` gives it back."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._changed = threading.Condition()
        """Guards the jobs, and every touch of their lines: after `stop` the thread has let go."""
        self._jobs: dict[int, _Job] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<SoftwarePwm pins={sorted(self._jobs)}>"

    def start(self, line: GpioLine, *, frequency_hz: int, duty_percent: int) -> None:
        """Begin, or change, the waveform of a line. The first level is on the wire on return."""
        with self._changed:
            waveform = Waveform(frequency_hz=frequency_hz, duty_percent=duty_percent, start=self._monotonic())
            job = _Job(line=line, waveform=waveform)
            self._advance(job)
            if job.error is not None:
                raise job.error
            self._jobs[line.pin] = job
            self._ensure_thread()
            self._changed.notify()

    def stop(self, pin: int) -> None:
        """End a waveform, at whatever level it shows; harmless when there is none."""
        with self._changed:
            self._jobs.pop(pin, None)

    def level(self, pin: int) -> int:
        """What the waveform shows now. Raises what broke it, if something did."""
        with self._changed:
            job = self._jobs[pin]
            if job.error is not None:
                raise job.error
            return job.level or LOW

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="software-pwm", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                now = self._monotonic()
                for job in self._jobs.values():
                    if job.until <= now:
                        self._advance(job)
                soonest = min((job.until for job in self._jobs.values()), default=math.inf)
                self._changed.wait(None if soonest == math.inf else max(0.0, soonest - self._monotonic()))

    def _advance(self, job: _Job) -> None:
        level, job.until = job.waveform.at(self._monotonic())
        if level == job.level:
            return
        try:
            job.line.write(level)
            job.level = level
        except FleetplaneError as error:
            job.error, job.until = error, math.inf  # kept, so that the next look at the pin tells of it


LEVEL_HZ: Final = 1000
"""Of a block that only holds a level; any frequency would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PwmState:
    frequency_hz: int
    duty_percent: int
    software: bool
    """Made by a thread, so its edges are only about where they should be."""


class Waveforms:
    def __init__(self, hardware: HardwarePwm | None = None) -> None:
        self._hardware = hardware
        self._software: SoftwarePwm | None = None
        self._software_pins: set[int] = set()

    def __repr__(self) -> str:
        return f"<Waveforms hardware={self._hardware} software={sorted(self._software_pins)}>"

    def in_hardware(self, pin: int) -> bool:
        return self._hardware is not None and self._hardware.offers(pin)

    def require_fit(self, pin: int, frequency_hz: int) -> None:
        """Whether a thread could make this waveform."""
        if frequency_hz > SOFTWARE_LIMIT_HZ:
            raise FailedPrecondition(
                f"pin {pin} is not routed to a PWM block, and software reaches {SOFTWARE_LIMIT_HZ} Hz, "
                f"not {frequency_hz} Hz",
                details={"cause": "software-limit"},
                hint="use a pin that the board's PWM overlay routes (12, 13, 18, 19), or a lower frequency",
            )
        if pin not in self._software_pins and len(self._software_pins) >= SOFTWARE_PINS_LIMIT:
            raise HardwareOverloaded(
                f"{SOFTWARE_PINS_LIMIT} pins carry software waveforms already", hint="stop one of them"
            )

    def start(self, pin: int, line: GpioLine | None, pwm: PwmState) -> None:
        """Begin, or change, a waveform; of software, on a line that is an output."""
        if line is None:
            assert self._hardware is not None
            self._hardware.start(pin, frequency_hz=pwm.frequency_hz, duty_percent=pwm.duty_percent)
            return
        if self._software is None:
            self._software = SoftwarePwm()
        self._software.start(line, frequency_hz=pwm.frequency_hz, duty_percent=pwm.duty_percent)
        self._software_pins.add(pin)

    def hold_level(self, pin: int, level: int) -> None:
        """Hold a level on a pin that the PWM block drives: a duty cycle of 0 or 100 percent."""
        assert self._hardware is not None
        self._hardware.start(pin, frequency_hz=LEVEL_HZ, duty_percent=100 if level else 0)

    def stop(self, pin: int) -> None:
        """Harmless when there is none."""
        if pin in self._software_pins and self._software is not None:
            self._software_pins.discard(pin)
            self._software.stop(pin)
        elif self._hardware is not None:
            self._hardware.stop(pin)

    def level(self, pin: int, pwm: PwmState) -> int:
        """What the wire shows now; of the block, which cannot be asked, whether it shows anything."""
        if pin in self._software_pins and self._software is not None:
            return self._software.level(pin)
        return HIGH if pwm.duty_percent else LOW

    def close(self) -> None:
        self._software_pins.clear()
        if self._software is not None:
            self._software.close()
            self._software = None
        if self._hardware is not None:
            self._hardware.close()
