"""What a server does once in a while: forget what has ended by itself.

Nothing here changes what anyone may do. A redemption whose token is long over, a revocation of
a certificate that has run out and a freeze that has expired are refused, or ignored, all the
same; they only take room, and show in lists where they do not belong.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import structlog

from fleetplane.kernel import freeze
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Backoff, Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.identity import enrolment
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.store import Store

log = structlog.get_logger(__name__)

FIRST_SECONDS = 60.0
"""After the start: agents that come back go first. Not an hour: some servers never live that long."""
INTERVAL_SECONDS = 3600.0
RETRY = Backoff(first_seconds=30.0, ceiling_seconds=INTERVAL_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chore:
    name: str
    sweep: Callable[[], Awaitable[int]]
    """Does it, and says how many things it removed."""


def chores(store: Store, clock: Clock) -> Sequence[Chore]:
    """Everything that the kernel leaves to be swept."""
    revocations = Revocations(store, clock)
    return (
        Chore(name="redemptions", sweep=lambda: enrolment.sweep(store, clock)),
        Chore(name="revocations", sweep=revocations.sweep),
        Chore(name="freezes", sweep=lambda: freeze.sweep(store, clock.now_ns())),
    )


async def keep_house(chores: Sequence[Chore], clock: Clock) -> None:
    """Every chore every hour, until cancelled; one that fails holds up none of the others."""
    async with Boundary() as tasks:
        for chore in chores:
            tasks.keep(f"housekeeping/{chore.name}", partial(_repeat, chore, clock))


async def _repeat(chore: Chore, clock: Clock) -> NoReturn:
    failures = 0
    await clock.sleep(FIRST_SECONDS)
    while True:
        wait = INTERVAL_SECONDS
        try:
            removed = await chore.sweep()
        except Exception as error:
            wait = RETRY.delay_seconds(failures, jitter=clock.random())
            failures += 1
            log.warning(
                "housekeeping.failed",
                chore=chore.name,
                error=str(error),
                retry_seconds=round(wait, 1),
                # An error that we do not know how to explain is a defect: its place is wanted.
                exc_info=None if isinstance(error, FleetplaneError) else error,
            )
        else:
            failures = 0
            if removed:
                log.info("housekeeping.swept", chore=chore.name, removed=removed)
        await clock.sleep(wait)
