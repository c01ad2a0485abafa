"""Which server writes: one is active, the others stand by and follow.

The active one renews its seat every second. Who has not renewed for `LIFE_SECONDS`, by the database's
clock, may be replaced: another server that has seen everything takes over under a new term, and the
database refuses whatever the old one still sends. By its own clock the old one has stopped before.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress

import structlog

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, Unavailable
from fleetplane.kernel.store.applier import Applier
from fleetplane.kernel.store.engine import Author, Superseded
from fleetplane.kernel.store.servers.engine import SharedEngine
from fleetplane.kernel.store.servers.follower import Follower

log = structlog.get_logger(__name__)

RENEW_SECONDS = 1.0
LOOK_SECONDS = 0.5
"""Between two looks of one that stands by, and of the active one at its own renewal."""
LEAVE_SECONDS = 2.0
GIVE_UP_SECONDS = 5.0
"""The active server stops so long after the last renewal it sent that was answered."""
HELD_UP_SECONDS = 2.0
"""A look of the active server at its own renewal that comes so late: nothing else of it ran either."""
ASK_SECONDS = 2.0
LIFE_SECONDS = 6.0
"""Others may take over so long after the last renewal that arrived: later than the active one gives up, and
with a look, the reading of the rest and the call itself within the ten seconds that are promised."""


class Seat:
    def __init__(self, engine: SharedEngine, applier: Applier, follower: Follower, clock: Clock) -> None:
        self._engine = engine
        self._applier = applier
        self._follower = follower
        self._clock = clock
        self._renewed = 0.0
        """When the last renewal that was answered was sent."""
        self.author = Author()
        self.holder = Author()
        """Who wrote last, as of the last renewal."""
        self.heard = -math.inf
        """When the last renewal that was answered was sent, by one that stands by."""

    def __repr__(self) -> str:
        return f"<Seat {self.author}>"

    async def wait(self, server: str, boot: int) -> Author:
        """Follow until this server is the one that writes."""
        self.author = mine = Author(server, boot)
        heard = self._clock.monotonic()
        log.info("store.stands_by", server=server, boot=boot)
        while True:
            sent = self._clock.monotonic()
            try:
                if await self._taken(mine):
                    self._renewed = sent
                    return self.author
                heard = sent
            except Superseded:
                raise
            except Unavailable as error:
                silent = round(self._clock.monotonic() - heard, 1)
                log.warning("store.standby_waits", error=error.message, seconds=silent)
            await self._clock.sleep(LOOK_SECONDS)

    async def _taken(self, mine: Author) -> bool:
        sent = self._clock.monotonic()
        renewal = await self._engine.renew(mine, self._applier.mark.number)
        if not renewal.alive:
            raise _superseded(mine, "another process of the same name has begun")
        self.holder, self.heard = renewal.holder, sent
        async with self._follower.caught_up():  # readers catch up too, and would meet what is written here
            if (holder := self._follower.author) is not None and holder[:2] == mine[:2]:
                self.author = holder  # the answer to an earlier attempt was lost
            else:
                outcome = await self._engine.take_over(self._applier.mark, mine, LIFE_SECONDS)
                if not outcome.written:
                    return False
                self._applier.pass_over(outcome.mark)
                self.author = outcome.author
            self._follower.ended = True
        log.info("store.active", server=mine.server, boot=mine.boot, term=self.author.term)
        return True

    async def keep(self) -> None:
        """Renew until this is no longer the server that writes; then raises."""
        while True:
            await self._clock.sleep(RENEW_SECONDS)
            sent = self._clock.monotonic()
            try:
                renewal = await self._engine.renew(self.author, self._applier.mark.number)
            except Unavailable as error:
                log.warning("store.seat_not_renewed", error=error.message)
                continue
            if not renewal.alive:
                raise _superseded(
                    self.author, f"{renewal.holder.server} is active since term {renewal.holder.term}"
                )
            self._renewed = sent

    async def watch(self) -> None:
        """Raise once nobody can be sure any more that this is the server that writes."""
        looked = self._clock.monotonic()
        while True:
            if self._clock.monotonic() - looked > HELD_UP_SECONDS:
                await self._ask()
            looked = self._clock.monotonic()
            if (silent := looked - self._renewed) > GIVE_UP_SECONDS:
                raise _superseded(self.author, f"its seat could not be renewed for {silent:.0f} seconds")
            await self._clock.sleep(LOOK_SECONDS)

    async def _ask(self) -> None:
        """After this process was held up (a busy machine, a pause): renew now, if nobody took over.

        It could not renew in time, but if the term is still its own, nothing was written by others.
        """
        sent = self._clock.monotonic()
        with suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(ASK_SECONDS):
                renewal = await self._engine.renew(self.author, self._applier.mark.number)
            if renewal.alive:
                self._renewed = max(self._renewed, sent)

    async def leave(self) -> None:
        """Say that this server ends; if that cannot be said, others learn it by its silence."""
        with suppress(FleetplaneError, TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._engine.leave(self.author)


def _superseded(author: Author, why: str) -> Superseded:
    return Superseded(f"server {author.server} (boot {author.boot}, term {author.term}) stops: {why}")
