"""Reading on any of several servers what is true now, not what was true when it last looked.

Whoever reads asks the database first where the log ends, and waits until memory has got there: what was
acknowledged before the read began, on whichever server, is seen by it. Those who ask at the same time share
one question. A database that was cut off and replaced could still be asked; so its answer counts only while
this server's own renewal, which is a commit, is recent.
"""

from __future__ import annotations

import asyncio

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Unavailable
from fleetplane.kernel.store.applier import Applier
from fleetplane.kernel.store.servers import seat as seats
from fleetplane.kernel.store.servers.engine import SharedEngine
from fleetplane.kernel.store.servers.follower import Follower
from fleetplane.kernel.store.servers.seat import Seat

FRESH_SECONDS = 3.0
"""How old this server's last renewal may be: six looks."""


class ReadIndex:
    def __init__(
        self, engine: SharedEngine, applier: Applier, follower: Follower, seat: Seat, clock: Clock
    ) -> None:
        self._engine = engine
        self._applier = applier
        self._follower = follower
        self._seat = seat
        self._clock = clock
        self._asked = 0
        self._answered = 0
        """The last question that was asked before the last look began."""
        self._looking: asyncio.Task[None] | None = None
        """One look at a time, so that the next serves all who wait. It is nobody's own: a caller that leaves
        in the middle of a question would take the connection with it."""
        self.looks = 0

    def __repr__(self) -> str:
        return f"<ReadIndex asked={self._asked} looks={self.looks}>"

    @property
    def silent_seconds(self) -> float:
        """Since the last renewal of this server that was answered was sent."""
        return self._clock.monotonic() - self._seat.heard

    @property
    def holds_seat(self) -> bool:
        """Whether, if this server is the active one, nobody can have taken over yet."""
        return self.silent_seconds <= seats.GIVE_UP_SECONDS

    async def confirm(self) -> None:
        """Return once memory has everything that was committed before this was asked."""
        self._asked += 1
        mine = self._asked
        try:
            async with asyncio.timeout(FRESH_SECONDS):
                while self._answered < mine:
                    if (
                        self._looking is None or self._looking.done()
                    ):  # which its callback says a moment later
                        self._looking = asyncio.create_task(self._look(), name="read-index")
                        self._looking.add_done_callback(self._looked)
                    await asyncio.shield(self._looking)
        except TimeoutError:
            raise Unavailable(
                f"the database did not say within {FRESH_SECONDS:.0f} seconds where the log ends",
                hint="ask another server",
            ) from None
        if self.silent_seconds > FRESH_SECONDS:
            raise Unavailable(
                f"this server could not renew its seat for {self.silent_seconds:.0f} seconds: what it knows"
                " may be out of date",
                hint="ask another server",
            )

    async def _look(self) -> None:
        self.looks += 1
        covered = self._asked
        async with asyncio.timeout(FRESH_SECONDS):
            head = await self._engine.mark()
            if head.number != self._applier.mark.number:
                await self._follower.catch_up()
        self._answered = covered

    def _looked(self, task: asyncio.Task[None]) -> None:
        if self._looking is task:
            self._looking = None
        if not task.cancelled():
            task.exception()  # whoever waited was told; nobody may be left
