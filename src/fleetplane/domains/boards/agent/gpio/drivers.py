"""Selects the driver of the GPIO chip, and implements the simulated one for development and tests.

Drivers are loaded on demand: a simulated board needs no library, and a missing library makes the pins
unavailable but does not stop the agent.

The simulated chip keeps the contract of the real one and passes the same tests. It is deterministic and
independent of time: a line shows what its owner drives, else what the outside drives, else its pull, else
low. `drive`, `occupy`, `fail` and `unplug` let a test play the outside world.
"""

from __future__ import annotations

import errno
import importlib
import os
import threading
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from fleetplane.domains.boards.agent.gpio.chip import (
    CONSUMER_LIMIT,
    HIGH,
    LOW,
    Chip,
    ChipFactory,
    ChipMissing,
    GpioLine,
    LineBusy,
    LineDirection,
    LineIsInput,
    LinePull,
    LineReleased,
    from_os,
    require_level,
    require_pin,
)

LABEL: Final = "simulated"
HEADER_PINS: Final = 28
"""BCM 0 to 27: what the 40-pin header carries."""
HISTORY_LIMIT: Final = 4096
"""Levels remembered per wire: two seconds of the fastest waveform that software makes."""


@dataclass(slots=True, kw_only=True)
class Wire:
    """The simulated state of one pin, independent of who has requested it."""

    consumer: str | None = None
    direction: LineDirection = LineDirection.INPUT
    pull: LinePull = LinePull.NONE
    driven: int = LOW
    """By the owner, while the line is an output."""
    outside: int | None = None
    """By the world outside; None leaves the wire floating."""
    history: deque[int] = field(default_factory=lambda: deque(maxlen=HISTORY_LIMIT))
    """Every level that the wire has shown, so that a test can look for glitches."""

    def level(self) -> int:
        if self.direction is LineDirection.OUTPUT:
            return self.driven
        if self.outside is not None:
            return self.outside
        return HIGH if self.pull is LinePull.UP else LOW

    def settle(self) -> None:
        level = self.level()
        if not self.history or self.history[-1] != level:
            self.history.append(level)


class SimulatedChip:
    """Opened once, like a device: closing it releases everything, and its wires outlive it."""

    def __init__(self, board: SimulatedBoard, *, label: str = LABEL) -> None:
        self._board = board
        self._label = label
        self._claimed: dict[int, SimulatedLine] = {}
        self._open = True
        self._board.must_answer("opening the chip")

    def __repr__(self) -> str:
        return f"<SimulatedChip {self._label} claimed={sorted(self._claimed)}>"

    @property
    def board(self) -> SimulatedBoard:
        return self._board

    @property
    def label(self) -> str:
        return self._label

    @property
    def lines(self) -> int:
        return len(self._board.wires)

    def claim(
        self, pin: int, *, direction: LineDirection, pull: LinePull, level: int | None = None, consumer: str
    ) -> GpioLine:
        self._must_be_open()
        with self._board.lock:
            wire = self._board.wire(pin, f"claiming pin {pin}")
            if wire.consumer is not None:
                raise LineBusy(f"pin {pin} is held by {wire.consumer!r}", consumer=wire.consumer)
            _set(wire, direction, pull, level)
            wire.consumer = consumer[:CONSUMER_LIMIT]
            line = self._claimed[pin] = SimulatedLine(self, pin)
            return line

    def holder(self, pin: int) -> str | None:
        self._must_be_open()
        with self._board.lock:
            return self._board.wire(pin, f"asking who holds pin {pin}").consumer

    def close(self) -> None:
        self._open = False
        for line in list(self._claimed.values()):
            line.release()

    def forget(self, pin: int) -> None:
        self._claimed.pop(pin, None)

    def _must_be_open(self) -> None:
        if not self._open:
            raise LineReleased("the chip is closed")


class SimulatedLine:
    def __init__(self, chip: SimulatedChip, pin: int) -> None:
        self._chip = chip
        self._pin = pin
        self._held = True

    def __repr__(self) -> str:
        return f"<SimulatedLine {self._pin} {'held' if self._held else 'released'}>"

    @property
    def pin(self) -> int:
        return self._pin

    def read(self) -> int:
        with self._chip.board.lock:
            return self._wire("reading").level()

    def write(self, level: int) -> None:
        require_level(level)
        with self._chip.board.lock:
            wire = self._wire("writing")
            if wire.direction is not LineDirection.OUTPUT:
                raise LineIsInput(f"pin {self._pin} is an input")
            wire.driven = level
            wire.settle()

    def reconfigure(self, *, direction: LineDirection, pull: LinePull, level: int | None = None) -> None:
        with self._chip.board.lock:
            _set(self._wire("reconfiguring"), direction, pull, level)

    def release(self) -> None:
        if not self._held:
            return
        self._held = False
        self._chip.forget(self._pin)
        with self._chip.board.lock:
            wire = self._chip.board.wires[self._pin]
            wire.consumer = None
            wire.direction = LineDirection.INPUT  # as the boards' own chips do
            wire.settle()

    def _wire(self, doing: str) -> Wire:
        if not self._held:
            raise LineReleased(f"pin {self._pin} was released")
        return self._chip.board.wire(self._pin, f"{doing} pin {self._pin}")


class SimulatedBoard:
    """The copper: wires that stay as they are while chips are opened and closed on them."""

    def __init__(self, lines: int = HEADER_PINS) -> None:
        self.wires = [Wire() for _ in range(lines)]
        self.lock = threading.Lock()
        """A test plays the outside from its own thread."""
        self._present = True
        self._failures: dict[int, int] = {}

    def __repr__(self) -> str:
        held = {pin: wire.consumer for pin, wire in enumerate(self.wires) if wire.consumer}
        return f"<SimulatedBoard lines={len(self.wires)} held={held}>"

    def open(self) -> SimulatedChip:
        """A chip factory."""
        return SimulatedChip(self)

    def drive(self, pin: int, level: int | None) -> None:
        """Drive the wire from outside, or release it."""
        with self.lock:
            self.wires[pin].outside = level
            self.wires[pin].settle()

    def occupy(self, pin: int, consumer: str | None) -> None:
        """Someone else takes the line, or gives it back."""
        with self.lock:
            self.wires[pin].consumer = consumer

    def fail(self, pin: int, number: int | None = errno.EIO) -> None:
        """Every call for the pin ends in this errno, until told None."""
        if number is None:
            self._failures.pop(pin, None)
        else:
            self._failures[pin] = number

    def unplug(self) -> None:
        """The chip goes away, and its owners with it."""
        with self.lock:
            self._present = False
            for wire in self.wires:
                wire.consumer, wire.direction = None, LineDirection.INPUT
                wire.settle()

    def plug(self) -> None:
        self._present = True

    def wire(self, pin: int, doing: str) -> Wire:
        require_pin(pin, len(self.wires))
        self.must_answer(doing)
        if (number := self._failures.get(pin)) is not None:
            raise from_os(OSError(number, os.strerror(number)), doing)
        return self.wires[pin]

    def must_answer(self, doing: str) -> None:
        if not self._present:
            raise from_os(OSError(errno.ENODEV, os.strerror(errno.ENODEV)), doing)


def _set(wire: Wire, direction: LineDirection, pull: LinePull, level: int | None) -> None:
    if level is not None:
        require_level(level)
    wire.driven = wire.level() if level is None else level
    wire.direction, wire.pull = direction, pull
    wire.settle()


LIBRARY = "gpiod"


class GpioDriver(StrEnum):
    GPIOD = "gpiod"
    SIMULATED = "simulated"


def chip_factory(driver: GpioDriver) -> ChipFactory:
    """A simulated board keeps its wires as long as its factory lives, as copper would."""
    match driver:
        case GpioDriver.GPIOD:
            return open_gpiod
        case GpioDriver.SIMULATED:
            return SimulatedBoard().open


def open_gpiod() -> Chip:
    try:
        importlib.import_module(LIBRARY)
    except ImportError as error:
        raise ChipMissing(
            f"the Python package {LIBRARY} cannot be loaded: {error}", hint="pip install 'gpiod>=2.0.2'"
        ) from error
    from fleetplane.domains.boards.agent.gpio.gpiod_chip import open_header_chip

    return open_header_chip()
