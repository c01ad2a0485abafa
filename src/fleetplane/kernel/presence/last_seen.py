"""When each agent of a channel was last heard, by any server.

Agents that report by single calls are heard by every server in part, so no server may judge their silence
from its own memory. Each server records in memory whom it hears, and writes that every few seconds in one
statement, beside the log and without its lock; silence is judged from the rows of all. On a database
file there is one server, and its memory is all there is.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Mapping
from typing import Any, NoReturn, TypeVar

import structlog

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, Unavailable
from fleetplane.kernel.resources import check_text
from fleetplane.kernel.store import Store
from fleetplane.kernel.store.servers.engine import SharedEngine

T = TypeVar("T")

ASK_SECONDS = 3.0
"""For an answer of the database: as long as a dead connection is believed in."""


async def answered(asking: Coroutine[Any, Any, T]) -> T:
    """What the database answers; raises `Unavailable` if it does not.

    Whoever is cancelled does not wait for a database that cannot be reached, as ending its call would: a
    server that ends its watches, or takes the seat, must not be kept from it.
    """
    task = asyncio.create_task(asking, name="presence-asks")
    task.add_done_callback(_ended)
    try:
        async with asyncio.timeout(ASK_SECONDS):
            return await asyncio.shield(task)
    except TimeoutError:
        raise Unavailable(
            f"the database did not answer within {ASK_SECONDS:.0f} seconds", hint="try again"
        ) from None
    finally:
        task.cancel()


def _ended(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # whoever waited was told


log = structlog.get_logger(__name__)

WRITE_SECONDS = 5.0
"""Between two statements of one server. 10,000 agents are at most 2,000 rows a second."""
STATEMENT_ROWS = 10_000
LATE_SECONDS = 2.5
"""A beat that comes so late: this server, or the database, was held up."""
KEEP_SECONDS = 7 * 24 * 3600.0
"""How long it is remembered when somebody was heard that is not heard any more."""
SWEEP_SECONDS = 3600.0
CHANNEL_LIMIT_BYTES = 64
AGENT_LIMIT_BYTES = 1024


class LastSeen:
    def __init__(self, store: Store, clock: Clock, *, channel: str) -> None:
        check_text("channel", channel, CHANNEL_LIMIT_BYTES)
        self._engine = store.shared_engine
        self._clock = clock
        self._channel = channel
        self._at: dict[str, float] = {}
        """When each was heard here, on the monotonic clock: since the last statement, or at all on a file."""
        self._since = clock.monotonic() if self._engine is None else math.inf
        """Since when this server hears, writes and reads without a gap; infinity if it does not."""
        self._looked: float | None = None
        """The last beat, while it runs."""
        self._swept = clock.monotonic()

    def __repr__(self) -> str:
        return f"<Heard {self._channel} noted={len(self._at)}>"

    def note(self, agent: str) -> None:
        """The agent was heard now."""
        check_text("agent", agent, AGENT_LIMIT_BYTES)  # one that could not be stored would fail the others
        self._at[agent] = self._clock.monotonic()

    async def read(self) -> Mapping[str, float]:
        """How many seconds ago each agent was heard, by any server; nobody who was never heard.

        Raises `Unavailable` if the database cannot be asked. Silence that follows from it may be believed
        only if `is_settled` says so.
        """
        found: dict[str, float] = {}
        if self._engine is not None:
            try:
                found.update(await answered(self._engine.heard(self._channel)))
            except FleetplaneError:
                self._since = math.inf
                raise
        now = self._clock.monotonic()
        for agent, at in self._at.items():
            found[agent] = min(now - at, found.get(agent, math.inf))
        return found

    def is_settled(self, term_seconds: float) -> bool:
        """Whether an agent that was not heard for so long is silent: False during the first such term after
        this server began to judge, after it was held up, and after an outage of the database."""
        self._note_gap()
        return self._clock.monotonic() - self._since >= term_seconds

    def begin_to_judge(self) -> None:
        """From now on this server declares silence; what it knows from before counts for nobody's."""
        self._since = max(self._since, self._clock.monotonic())

    async def forget(self, agent: str) -> None:
        """Take away what is known of an agent that was removed."""
        self._at.pop(agent, None)
        if self._engine is not None:
            await answered(self._engine.forget_heard(self._channel, [agent]))

    async def run_here(self) -> NoReturn:
        """Write down whom this server hears, until cancelled. On every server."""
        self._looked = self._clock.monotonic()
        try:
            while True:
                if self._engine is not None:
                    await self._beat(self._engine)
                self._note_gap()
                self._looked = self._clock.monotonic()
                await self._clock.sleep(WRITE_SECONDS)
        finally:
            self._looked = None

    async def _beat(self, engine: SharedEngine) -> None:
        try:
            await self.write()
            if self._clock.monotonic() - self._swept >= SWEEP_SECONDS:
                await engine.trim_heard(self._channel, KEEP_SECONDS)
                self._swept = self._clock.monotonic()
        except FleetplaneError as error:  # nothing is lost: those who were noted stay noted
            log.warning("heard.not_written", channel=self._channel, error=error.message)
            self._since = math.inf
            return
        if self._since == math.inf:
            self._since = self._clock.monotonic()

    def _note_gap(self) -> None:
        """Begin a new term if the beat is late; without a beat there are no gaps."""
        now = self._clock.monotonic()
        if self._looked is not None and now - self._looked > WRITE_SECONDS + LATE_SECONDS:
            log.warning("heard.held_up", channel=self._channel, seconds=round(now - self._looked, 1))
            self._since, self._looked = max(self._since, now), now

    async def write(self) -> None:
        """Write down everybody who was heard since the last time.

        If that is nobody, the database is asked all the same: an outage must be noticed.
        """
        if self._engine is None:
            return
        noted, self._at = self._at, {}
        names = sorted(noted)  # in one order on all servers, so that none waits for another in a circle
        parts = [names[at : at + STATEMENT_ROWS] for at in range(0, len(names), STATEMENT_ROWS)] or [[]]
        try:
            for part in parts:
                now = self._clock.monotonic()
                await answered(
                    self._engine.hear(self._channel, {agent: now - noted[agent] for agent in part})
                )
                for agent in part:
                    del noted[agent]
        finally:
            self._at = {**noted, **self._at}
