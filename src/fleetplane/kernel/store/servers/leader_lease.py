"""The leader lease: which server is the leader, and how each server reads what is current.

The leader runs the work that only one server may do; the others follow. All of them write, and all follow the
log. The leader renews its lease every second. When a lease was not renewed for `LIFE_SECONDS`, by
the database's clock, another server that has read the whole log may take over under a new term, and
the database refuses later writes of the old leader, which has stopped by its own clock before. A follower
renews as well, and may write as long as it does.

`DatabaseClock` is one clock for all servers of a database: each answer of the database carries its time, and
between two answers the server's monotonic clock counts on. A server whose wall clock is an hour fast
would otherwise forget revocations an hour early.

`ReadIndex` makes reads current: it asks the database where the log ends and waits until memory is there,
so that a read sees everything that any server acknowledged before it began. Concurrent readers share one
query. A database that was cut off and replaced could still answer, so an answer counts only while
this server's last renewal, which is a commit, is recent.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress

import structlog

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, Unavailable
from fleetplane.kernel.store.engine import GroupAuthor, Superseded
from fleetplane.kernel.store.group import Applier
from fleetplane.kernel.store.servers.engine import SharedEngine
from fleetplane.kernel.store.servers.follower import Follower

NANOSECONDS = 1_000_000_000
KEEP_SECONDS = 60.0
"""How long an answer that came quickly is preferred to those that took longer."""


class DatabaseClock:
    """A `Clock` whose wall time is the database's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at = clock.monotonic()
        self._shown = clock.now_ns()
        """By the database, when this server's monotonic clock showed `_at`."""
        self._error_seconds = float("inf")
        self.monotonic = clock.monotonic
        self.sleep = clock.sleep
        self.random = clock.random
        self.token_bytes = clock.token_bytes

    def __repr__(self) -> str:
        return f"<DatabaseClock error={self._error_seconds:.3f}s>"

    def now_ns(self) -> int:
        return self._shown + round((self.monotonic() - self._at) * NANOSECONDS)

    def note(self, now_ns: int, *, sent: float) -> None:
        """The database showed this, some time after the question was sent and before now."""
        received = self.monotonic()
        error = (received - sent) / 2
        if error <= self._error_seconds or received - self._at > KEEP_SECONDS:
            self._at, self._shown, self._error_seconds = (sent + received) / 2, now_ns, error


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


class LeaderLease:
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


FRESH_SECONDS = 3.0
"""How old this server's last renewal may be: six looks."""


class ReadIndex:
    def __init__(
        self, engine: SharedEngine, applier: Applier, follower: Follower, seat: LeaderLease, clock: Clock
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
        return self.silent_seconds <= GIVE_UP_SECONDS

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
