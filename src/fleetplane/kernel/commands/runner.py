"""Seeing to a ledger's deadlines, as time passes."""

from __future__ import annotations

from functools import partial

import structlog

from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands.ledger import Commands
from fleetplane.kernel.errors import Unavailable
from fleetplane.kernel.stalls import StallDetector

log = structlog.get_logger(__name__)

LONGEST_NAP_SECONDS = 1.0
"""A new deadline is noticed this late at most; deadlines are counted in seconds."""
SWEEP_SECONDS = 3600.0


async def run(commands: Commands, clock: Clock, attention: StallDetector | None = None) -> None:
    """Both parts of a ledger, for a server that is active from the beginning; until cancelled."""
    async with Boundary() as tasks:
        tasks.keep("commands/here", commands.run_here)
        tasks.keep("commands/deadlines", partial(keep_deadlines, commands, clock, attention))


async def keep_deadlines(commands: Commands, clock: Clock, attention: StallDetector | None = None) -> None:
    """Until cancelled. Nothing times out right after a gap of the server's own; see `attention`.

    Of several servers, the one that has the seat runs this beside `Commands.run_here`, which all run.
    """
    attention = attention or StallDetector(clock)
    swept = clock.monotonic()
    while True:
        due = commands.due_in_seconds()
        ahead = LONGEST_NAP_SECONDS if due is None else max(0.0, due)
        await clock.sleep(min(ahead, LONGEST_NAP_SECONDS))
        if not attention.settled:
            await clock.sleep(LONGEST_NAP_SECONDS)
            continue
        sweeps = clock.monotonic() - swept >= SWEEP_SECONDS
        try:
            await commands.expire()
            if sweeps:
                swept = clock.monotonic()
                await commands.sweep()
        except Unavailable as error:  # a shared database may be away for a while, and nothing is forgotten
            if not commands.shared:
                raise
            log.warning("commands.deadlines_not_kept", error=error.message)
            await clock.sleep(LONGEST_NAP_SECONDS)
