"""File descriptors: how many connections fit beside everything else that a process keeps open.

Accepting one connection too many fails, and it fails for the whole listener; the database then
finds no descriptor for its log either. So connections are limited to what is sure to be there.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from fleetplane.kernel.errors import SettingsError

CONNECTIONS: Final = 10_000
"""Per listener that asks for no number; beyond it, connections wait in the kernel's backlog."""
RESERVED: Final = 128
"""For what is no connection: a server at rest has 40 open, the rest is for files and child processes."""
FEWEST: Final = 16
"""Connections per listener, whatever the limit: a server without any is of no use."""


def connections_of(wanted: Sequence[int]) -> list[int]:
    """What each listener gets, having raised the process's soft limit as far as needed.

    One that wants 0 shares what the others leave.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = sum(number or CONNECTIONS for number in wanted) + RESERVED
    if soft < needed:
        soft = min(needed, hard)
        with suppress(OSError, ValueError):  # a sandbox may forbid even what is permitted
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections_within(soft, wanted)


def connections_within(descriptors: int, wanted: Sequence[int]) -> list[int]:
    sharing = sum(number == 0 for number in wanted)
    left = descriptors - RESERVED - sum(wanted)
    if any(wanted) and left < FEWEST * sharing:
        raise SettingsError(
            f"listeners want {sum(wanted)} connections, and this process may have {descriptors} files open",
            hint="raise that limit (ulimit -Hn, LimitNOFILE=), or ask for fewer",
        )
    share = max(FEWEST, min(CONNECTIONS, left // sharing)) if sharing else 0
    return [number or share for number in wanted]
