"""Waveforms made by a thread that toggles lines.

Good for dimming a lamp, not for precision: each edge comes when the scheduler lets it, some tens of
microseconds late at best. Edges are computed from the start of the waveform, so
lateness never adds up. One thread serves all pins, so the cost stays that of one thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fleetplane.domains.boards.agent.gpio.chip import HIGH, LOW, GpioLine
from fleetplane.kernel.errors import FleetplaneError

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
