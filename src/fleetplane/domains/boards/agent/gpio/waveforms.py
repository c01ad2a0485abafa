"""Waveforms on pins: the board's PWM block where a pin is routed to it, a thread elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fleetplane.domains.boards.agent.gpio.chip import HIGH, LOW, GpioLine
from fleetplane.domains.boards.agent.gpio.errors import HardwareOverloaded
from fleetplane.domains.boards.agent.gpio.software_pwm import (
    SOFTWARE_LIMIT_HZ,
    SOFTWARE_PINS_LIMIT,
    SoftwarePwm,
)
from fleetplane.domains.boards.agent.gpio.sysfs_pwm import HardwarePwm
from fleetplane.kernel.errors import FailedPrecondition

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
