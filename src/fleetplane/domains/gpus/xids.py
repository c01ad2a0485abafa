"""What an XID means for a GPU's health.

An XID is the number a driver reports with an error. This module holds the numbers that say
nothing about the hardware, the numbers that are known to be grave, a short text for each known
number, what NVIDIA's catalogue says to do about each, and the decisions made from them. It knows
nothing of NVML or of the device API.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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

ACTIONS: Mapping[str, frozenset[int]] = {
    "IGNORE": frozenset(
        {14, 37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 152, 153, 157, 160, 161}
    ),
    "RESTART_APP": frozenset(
        {8, 11, 13, 25, 31, 32, 39, 40, 41, 60, *range(68, 73), 75, 76, 77, 80, *range(82, 87), 88, 89, 94}
        | {*range(96, 106), *range(126, 136), 139}
    ),
    "UPDATE_SWFW": frozenset({78}),
    "CHECK_UVM": frozenset({159}),
    "CHECK_MECHANICALS": frozenset({54}),
    "CONTACT_SUPPORT": frozenset(),
    "WORKFLOW_XID_45": frozenset({45}),
    "WORKFLOW_NVLINK_ERR": frozenset({74}),
    "WORKFLOW_NVLINK5_ERR": frozenset(range(144, 151)),
    "WORKFLOW_XID_48": frozenset({48}),
    "RESET_GPU": frozenset({46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158}),
    "RESTART_VM": frozenset({151}),
    "RESTART_BM": frozenset({79}),
}
"""The immediate action of NVIDIA's XID catalogue for Ampere and newer, in its words, the mildest first. What
it leaves out or calls unused is for `CONTACT_SUPPORT`; 154 says in its text alone what others call for."""

FALLEN_OFF_THE_BUS = 79
RECOVERY_ACTION_CHANGED = 154

LARGEST_XID = 2**32 - 1


class XidSeverity(StrEnum):
    IGNORED = "ignored"
    WARNING = "warning"
    CRITICAL = "critical"


def describe(xid: int) -> str:
    return DESCRIPTIONS.get(xid, "Unknown XID")


def severity(xid: int, ignored: frozenset[int] = APPLICATION_XIDS) -> XidSeverity:
    if xid in ignored:
        return XidSeverity.IGNORED
    return XidSeverity.CRITICAL if xid in CRITICAL_XIDS else XidSeverity.WARNING


def condemns(xid: int, ignored: frozenset[int] = APPLICATION_XIDS) -> bool:
    """Whether a GPU that reported this XID stops being ready.

    Everything that is not known to be harmless counts, numbers we have never heard of too: a
    workload moved away for nothing costs less than one left on a broken GPU.
    """
    return severity(xid, ignored) is not XidSeverity.IGNORED


def action(xid: int) -> str:
    """What to do about an XID; empty if it is only said in words of the driver's log."""
    if xid == RECOVERY_ACTION_CHANGED:
        return ""
    return next((name for name, numbers in ACTIONS.items() if xid in numbers), "CONTACT_SUPPORT")


def graver(one: str, other: str) -> str:
    """The action that takes more, of two."""
    order = ["", *ACTIONS]
    return max(one, other, key=lambda name: order.index(name) if name in order else -1)


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
