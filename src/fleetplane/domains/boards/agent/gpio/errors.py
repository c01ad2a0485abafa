"""Errors of hardware, as classes of the one error tree.

Every error carries in `details["cause"]` a short stable word that says why, because one status code
stands for several causes. `from_os` is the only place that reads errno.
"""

from __future__ import annotations

import errno
from typing import ClassVar

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
