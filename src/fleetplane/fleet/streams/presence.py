"""Which agents have an open stream, and the state kept with each stream. In memory only.

An agent has at most one current stream; a newer one supersedes the older. What is stored in a `Live`
is gone when its stream ends. Domains subclass `Live` and add what they know of an agent. A handler's work
ends as soon as its session is closed: by a revocation, a newer stream or shutdown.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fleetplane.kernel.errors import Conflict, FleetplaneError, Unauthenticated
from fleetplane.kernel.sessions import REVOKED, Session


@asynccontextmanager
async def until_closed(session: Session[Any]) -> AsyncIterator[None]:
    """Leave the block, cleanly, as soon as the session is closed, whatever it is waiting for.

    A block that came to its own end has returned or raised; what follows the block is then reached
    only if the session was closed first.
    """
    limit = asyncio.timeout(None)

    def end(_closed: asyncio.Future[str]) -> None:
        limit.reschedule(asyncio.get_running_loop().time())

    try:
        async with limit:
            session.closed.add_done_callback(end)
            try:
                yield
            finally:
                session.closed.remove_done_callback(end)
    except TimeoutError:
        if not limit.expired():
            raise


def closed_error(session: Session[Any]) -> FleetplaneError:
    """What to tell the caller of a stream whose session was closed, where that is an error."""
    if session.reason == REVOKED:
        return Unauthenticated("the certificate was revoked", details={"cause": "revoked"})
    return Conflict(f"the stream was ended: {session.reason}")


Out = TypeVar("Out")
F = TypeVar("F", bound="Flight")
L = TypeVar("L", bound="Live[Any, Any]")


@dataclass(slots=True, kw_only=True)
class Flight:
    """A command that an agent has."""

    sent_at_ns: int
    over_at_ns: int
    """Its deadline and some grace: after that the agent is taken to be done with it, whatever it says."""
    recalled: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Live(Generic[Out, F]):
    """One stream of one agent."""

    agent: str
    session: Session[Out]
    since_ns: int
    heard_ns: int
    """When its last verified message arrived."""
    place: int = 0
    """The number of its session among all servers (`kernel/presence`); 0 on a database file."""
    moved: bool = False
    """Its agent has a newer session, here or elsewhere: nothing is written about the agent for this one."""
    departing: asyncio.Future[bool] | None = None
    """There once the stream has ended; whether the agent had no newer session then."""
    flights: dict[str, F] = field(default_factory=dict)
    """By the command's id, as the ledger writes it."""
    settling: asyncio.Future[None] | None = None
    """There once the stream has ended; done when what it took with it is dealt with."""

    @property
    def is_over(self) -> bool:
        return self.settling is not None and self.settling.done()


class Presences(Generic[L]):
    """All agents that have a stream open, or had one a moment ago."""

    def __init__(self, *, lingering: bool = False) -> None:
        """`lingering`: who has gone is remembered until `forget`, for the next stream to inherit from."""
        self._lingering = lingering
        self._live: dict[str, L] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._live)}>"

    def __len__(self) -> int:
        """How many streams are open."""
        return sum(live.session.is_open for live in self._live.values())

    def __iter__(self) -> Iterator[L]:
        return iter(tuple(self._live.values()))

    def get(self, agent: str) -> L | None:
        """Only while its stream is open."""
        live = self._live.get(agent)
        return live if live is not None and live.session.is_open else None

    def current(self, agent: str) -> L | None:
        """The stream that has the agent's place, also while it ends, and after that if it lingers."""
        return self._live.get(agent)

    def came(self, live: L) -> None:
        older = self._live.get(live.agent)
        assert older is None or older.is_over, "the older stream must be settled first"
        self._live[live.agent] = live

    def gone(self, live: L) -> bool:
        """A stream has ended; False if it had lost its place already."""
        if self._live.get(live.agent) is not live:
            return False
        if not self._lingering:
            del self._live[live.agent]
        return True

    def forget(self, agent: str) -> None:
        self._live.pop(agent, None)
