"""What a GPIO chip can be asked, whichever driver stands behind it.

Pins are numbered as the processor numbers them (BCM). A claim is exclusive, against other
processes too. All calls block, though never for long, and neither a chip nor its lines may be used
by two threads at once. Which pins may be touched at all is decided elsewhere, in `pin_rules`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final, Protocol

from fleetplane.kernel.errors import InvalidArgument

LOW: Final = 0
HIGH: Final = 1

CONSUMER_LIMIT: Final = 31
"""The kernel keeps 32 bytes for a consumer's name, the last of them a NUL."""


class LineDirection(StrEnum):
    INPUT = "input"
    OUTPUT = "output"


class LinePull(StrEnum):
    NONE = "none"
    UP = "up"
    DOWN = "down"


class GpioLine(Protocol):
    """One claimed line. After `release` every call but `release` raises LineReleased."""

    @property
    def pin(self) -> int: ...

    def read(self) -> int:
        """The level on the wire now, of an output too."""
        ...

    def write(self, level: int) -> None:
        """Drive the level; of an input, raises LineIsInput."""
        ...

    def reconfigure(self, *, direction: LineDirection, pull: LinePull, level: int | None = None) -> None:
        """Change what the line is without giving it up. `level` as for `Chip.claim`."""
        ...

    def release(self) -> None:
        """Give the line back; harmless when done already.

        What the wire does afterwards is the kernel's affair: some chips keep driving, some turn the
        line into an input. Whoever cares drives the safe level first.
        """
        ...


class Chip(Protocol):
    @property
    def label(self) -> str: ...

    @property
    def lines(self) -> int:
        """How many pins there are, counted from 0."""
        ...

    def claim(
        self, pin: int, *, direction: LineDirection, pull: LinePull, level: int | None = None, consumer: str
    ) -> GpioLine:
        """Take the line for ourselves, and drive `level` in the claim itself.

        An output never shows another level on its way to `level`. Without one it goes on showing
        what it shows now. Raises LineBusy when someone else holds the line.
        """
        ...

    def holder(self, pin: int) -> str | None:
        """The consumer name of the line, ours included; None when it is free."""
        ...

    def close(self) -> None:
        """Release every line and the chip; harmless when done already."""
        ...


ChipFactory = Callable[[], Chip]
"""Opens the chip, or raises ChipMissing or AccessRefused with a message for the operator."""


def require_pin(pin: int, lines: int) -> None:
    if not 0 <= pin < lines:
        raise InvalidArgument(
            f"there is no pin {pin}: the chip has pins 0 to {lines - 1}",
            field="pin",
            details={"cause": "range"},
        )


def require_level(level: int) -> None:
    if level not in (LOW, HIGH):
        raise InvalidArgument(f"a level is 0 or 1, not {level}", field="level", details={"cause": "range"})
