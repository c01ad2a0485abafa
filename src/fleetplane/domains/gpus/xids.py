"""What an XID means for a GPU's health.

An XID is the number a driver reports with an error. This module holds the numbers that say
nothing about the hardware, the numbers that are known to be grave, a short text for each known
number, and the one decision made from them. It knows nothing of NVML or of the device API.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum

from fleetplane.kernel.errors import InvalidArgument

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Caused by the program that ran on the GPU, not by the GPU: never a reason to distrust it."""

CRITICAL_XIDS = frozenset({48, 63, 64, 74, 79, 94, 95, 119, 120})
"""Known to need a reset, a reboot or a new part. Used to name a severity, not to decide."""

DESCRIPTIONS = {
    8: "GPU not accessible",
    13: "Graphics Engine Exception",
    31: "GPU memory page fault",
    32: "Invalid or corrupted push buffer stream",
    38: "Driver firmware error",
    43: "GPU stopped processing",
    45: "Preemptive cleanup",
    48: "Double Bit ECC Error",
    56: "Display engine error",
    57: "Error programming video memory interface",
    62: "Internal micro-controller halt (non-fatal)",
    63: "Row remapping failure",
    64: "Uncontained ECC error",
    68: "Video processor exception",
    69: "Graphics engine accessor error",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    94: "Contained ECC error",
    95: "Uncontained ECC error",
    109: "Context Switch Timeout",
    119: "GSP error",
    120: "GSP firmware error",
}

LARGEST_XID = 2**32 - 1


class Severity(StrEnum):
    IGNORED = "ignored"
    WARNING = "warning"
    CRITICAL = "critical"


def describe(xid: int) -> str:
    return DESCRIPTIONS.get(xid, "Unknown XID")


def severity(xid: int, ignored: frozenset[int] = APPLICATION_XIDS) -> Severity:
    if xid in ignored:
        return Severity.IGNORED
    return Severity.CRITICAL if xid in CRITICAL_XIDS else Severity.WARNING


def condemns(xid: int, ignored: frozenset[int] = APPLICATION_XIDS) -> bool:
    """Whether a GPU that reported this XID stops being ready.

    Everything that is not known to be harmless counts, numbers we have never heard of too: a
    workload moved away for nothing costs less than one left on a broken GPU.
    """
    return severity(xid, ignored) is not Severity.IGNORED


def ignored_xids(additional: Iterable[int] = ()) -> frozenset[int]:
    """The numbers to ignore: the application's own, and what the operator adds."""
    return APPLICATION_XIDS | frozenset(additional)


def parse_xids(text: str) -> frozenset[int]:
    """Read numbers separated by commas or blanks; surplus separators are harmless."""
    numbers = set()
    for token in re.split(r"[,\s]+", text.strip(", \t\n")):
        if not token:
            continue
        if not (token.isascii() and token.isdigit() and int(token) <= LARGEST_XID):
            raise InvalidArgument(
                f"{token!r} is not an XID", field="ignored-xids", hint="give numbers such as 13,31,43"
            )
        numbers.add(int(token))
    return frozenset(numbers)
