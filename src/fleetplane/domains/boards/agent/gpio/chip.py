"""The interface of a GPIO chip, whichever driver implements it, and the errors of hardware.

Pins are numbered as the processor numbers them (BCM). A claim is exclusive, against other processes too. All
calls block, though never for long, and neither a chip nor its lines may be used by two threads at once.
`pins/rules.py` decides which pins may be used at all.

Every error carries in `details["cause"]` a short stable word that says why, because one status code
stands for several causes. `from_os` is the only place that reads errno.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from enum import StrEnum
from typing import ClassVar, Final, Protocol

from fleetplane.kernel.errors import (
    Conflict,
    FailedPrecondition,
    FleetplaneError,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)


class HardwareFault(FleetplaneError):
    """Mixed into the classes below: their cause is part of what they are."""

    cause: ClassVar[str] = "io"

    def __init__(self, message: str, *, hint: str | None = None, **details: str) -> None:
        super().__init__(message, hint=hint, details={"cause": self.cause, **details})


class ChipMissing(HardwareFault, Unavailable):
    """The chip or bus does not exist, or was removed."""

    reason = "HARDWARE_MISSING"
    cause = "missing"


class AccessRefused(HardwareFault, PermissionDenied):
    """The operating system does not let this process touch the device."""

    reason = "DEVICE_ACCESS_REFUSED"
    cause = "os"
    hint = "add the agent's user to the device's group (gpio, i2c, spi), or see the device's permissions"


class LineBusy(HardwareFault, FailedPrecondition):
    """Someone else on this machine holds the line."""

    reason = "LINE_BUSY"
    cause = "busy"
    hint = "see `gpioinfo` for who holds the line"


class LineIsInput(HardwareFault, FailedPrecondition):
    reason = "LINE_IS_INPUT"
    cause = "input"
    hint = "configure the pin as an output first"


class LineReleased(HardwareFault, FailedPrecondition):
    reason = "LINE_RELEASED"
    cause = "released"


class HardwareFailed(HardwareFault, Unavailable):
    """The device answered with an error that says nothing more."""

    reason = "HARDWARE_FAILED"


class NobodyAnswers(HardwareFault, Unavailable):
    """A bus is there, but no device at this address takes part."""

    reason = "NO_DEVICE_ANSWERS"
    cause = "no-answer"


class HardwareSilent(HardwareFault, Unavailable):
    """A call did not come back in time. It may still take effect."""

    reason = "HARDWARE_SILENT"
    cause = "timeout"


class HardwareOverloaded(HardwareFault, ResourceExhausted):
    """More calls wait for the hardware than we keep."""

    reason = "HARDWARE_OVERLOADED"
    cause = "concurrency"


class HardwareUnsupported(HardwareFault, Unimplemented):
    reason = "HARDWARE_UNSUPPORTED"
    cause = "unsupported"


class HardwareRefusal(HardwareFault, InvalidArgument):
    """The driver calls the request itself wrong."""

    reason = "HARDWARE_REFUSAL"
    cause = "invalid"


class LeasedByAnother(HardwareFault, Conflict):
    reason = "PIN_LEASED"
    cause = "leased"
    hint = "wait until the lease ends, or ask its holder"


class OlderOrder(HardwareFault, Conflict):
    """A newer order about the pin was carried out before this one came."""

    reason = "PIN_ORDER_OLD"
    cause = "older"
    hint = "read the pin, and write it again if that is still wanted"


_ENOTSUPP = 524
"""The kernel's own, which has no name outside it: some drivers let it escape."""

_BY_ERRNO: dict[int, type[HardwareFault]] = {
    errno.EBUSY: LineBusy,
    errno.EACCES: AccessRefused,
    errno.EPERM: AccessRefused,
    errno.ENOENT: ChipMissing,
    errno.ENODEV: ChipMissing,
    errno.ENXIO: NobodyAnswers,
    errno.EREMOTEIO: NobodyAnswers,
    errno.ETIMEDOUT: HardwareSilent,
    errno.EINVAL: HardwareRefusal,
    errno.EOPNOTSUPP: HardwareUnsupported,
    errno.ENOSYS: HardwareUnsupported,
    _ENOTSUPP: HardwareUnsupported,
}


def from_os(error: OSError, doing: str, **details: str) -> HardwareFault:
    """The fault that an operating-system error stands for."""
    kind = _BY_ERRNO.get(error.errno or 0, HardwareFailed)
    number = errno.errorcode.get(error.errno or 0, "unknown")
    words = error.strerror or str(error) or "no reason given"
    return kind(f"{doing}: {words}", errno=number, **details)


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
