"""File descriptors: how many connections fit beside everything else that a process keeps open.

Accepting one connection too many fails, and it fails for the whole listener; the database then
finds no descriptor for its log either. So connections are limited to what is sure to be there.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import Final

CONNECTIONS: Final = 10_000
"""Per listener; beyond it, connections wait in the kernel's backlog."""
RESERVED: Final = 128
"""For what is no connection: a server at rest has 40 open, the rest is for files and child processes."""
FEWEST: Final = 16
"""Connections per listener, whatever the limit: a server without any is of no use."""


def connections_per_listener(listeners: int) -> int:
    """The share of each of so many listeners, having raised the process's soft limit as far as needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS * listeners + RESERVED
    if soft < wanted:
        soft = min(wanted, hard)
        with suppress(OSError, ValueError):  # a sandbox may forbid even what is permitted
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections_within(soft, listeners)


def connections_within(descriptors: int, listeners: int) -> int:
    return max(FEWEST, min(CONNECTIONS, (descriptors - RESERVED) // listeners))
