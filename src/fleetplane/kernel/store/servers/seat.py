"""Which server is active: it runs what one runs for all. The others stand by; all follow the log.

The active one renews its seat every second. Who has not renewed for `LIFE_SECONDS`, by the database's
clock, may be replaced: another server that has seen everything takes over under a new term, and the
database refuses whatever the old one still sends. By its own clock the old one has stopped before.
A server that stands by renews, too, and may write as long as it does.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress

import structlog

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, Unavailable
from fleetplane.kernel.store.applier import Applier
from fleetplane.kernel.store.engine import GroupAuthor, Superseded
from fleetplane.kernel.store.servers.engine import SharedEngine
from fleetplane.kernel.store.servers.follower import Follower
from fleetplane.kernel.store.servers.time import DatabaseClock

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
    def __init__(
        self, engine: SharedEngine, applier: Applier, follower: Follower, clock: Clock | DatabaseClock
    ) -> None:
        self._engine = engine
        self._applier = applier
        self._follower = follower
        self._clock = clock
        self.author = GroupAuthor()
        self.holder = GroupAuthor()
        """Who has the seat, as of the last renewal."""
        self.heard = -math.inf
        """When the last renewal that was answered was sent."""
        self.has_stood_by = False
        """Whether another server was active while this one waited for its turn."""

    def __repr__(self) -> str:
        return f"<Seat {self.author}>"

    async def wait(self, server: str, boot: int) -> GroupAuthor:
        """Follow until this server is the active one."""
        self.author = mine = GroupAuthor(server, boot)
        begun = self._clock.monotonic()
        log.info("store.stands_by", server=server, boot=boot)
        while True:
            try:
                if await self._taken(mine):
                    return self.author
            except Superseded:
                raise
            except Unavailable as error:
                silent = round(self._clock.monotonic() - max(begun, self.heard), 1)
                log.warning("store.standby_waits", error=error.message, seconds=silent)
            await self._clock.sleep(LOOK_SECONDS)

    async def _taken(self, mine: GroupAuthor) -> bool:
        if not await self.renew():
            raise _superseded(mine, "another process of the same name has begun")
        await self._follower.catch_up()
        if self.holder[:2] == mine[:2]:
            self.author = self.holder  # the answer to an earlier attempt was lost
        else:
            outcome = await self._engine.take_over(self._applier.mark, mine, LIFE_SECONDS)
            if not outcome.written:
                self.has_stood_by = self.has_stood_by or self.holder.server not in ("", mine.server)
                return False
            self._applier.pass_over(outcome.mark)
            self.author = self.holder = outcome.author
        log.info("store.active", server=mine.server, boot=mine.boot, term=self.author.term)
        return True

    async def renew(self) -> bool:
        """Say that this server lives, and hear what time it is; False if it may not go on as what it was."""
        sent = self._clock.monotonic()
        renewal = await self._engine.renew(self.author, self._applier.mark.number)
        self.holder = renewal.holder
        if isinstance(self._clock, DatabaseClock):
            self._clock.note(renewal.now_ns, sent=sent)
        self.heard = max(self.heard, sent) if renewal.alive else -math.inf
        return renewal.alive

    async def keep(self) -> None:
        """Renew until this is no longer the active server; then raises."""
        while True:
            await self._clock.sleep(RENEW_SECONDS)
            try:
                alive = await self.renew()
            except Unavailable as error:
                log.warning("store.seat_not_renewed", error=error.message)
                continue
            if not alive:
                raise _superseded(
                    self.author, f"{self.holder.server} is active since term {self.holder.term}"
                )

    async def follow(self) -> None:
        """Apply what others write, for as long as this server is active."""
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            try:
                await self._follower.catch_up()
            except Unavailable as error:
                log.warning("store.not_followed", error=error.message)

    async def watch(self) -> None:
        """Raise once nobody can be sure any more that this is the active server."""
        looked = self._clock.monotonic()
        while True:
            if self._clock.monotonic() - looked > HELD_UP_SECONDS:
                await self._ask()
            looked = self._clock.monotonic()
            if (silent := looked - self.heard) > GIVE_UP_SECONDS:
                raise _superseded(self.author, f"its seat could not be renewed for {silent:.0f} seconds")
            await self._clock.sleep(LOOK_SECONDS)

    async def _ask(self) -> None:
        """After this process was held up (a busy machine, a pause): renew now, if nobody took over.

        It could not renew in time, but if the term is still its own, nobody else has led.
        """
        with suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(ASK_SECONDS):
                await self.renew()

    async def leave(self) -> None:
        """Say that this server ends; if that cannot be said, others learn it by its silence."""
        with suppress(FleetplaneError, TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._engine.leave(self.author)


def _superseded(author: GroupAuthor, why: str) -> Superseded:
    return Superseded(f"server {author.server} (boot {author.boot}, term {author.term}) stops: {why}")
