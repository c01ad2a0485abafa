"""Open streams of agents on this server, their queues of messages, and their metrics.

An agent has at most one open session per stream: a newer one wins, because the older is most
often a connection whose end nobody has noticed yet. Messages to an agent wait in a bounded
queue that one consumer, the stream's only writer, takes from. Sessions of revoked agents
are closed at once. Knows neither messages nor transports, and nothing of it is stored: a
restarted server has no sessions until the agents come back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.kernel.errors import InvalidArgument, ResourceExhausted
from fleetplane.kernel.identity.revocation import Revocations, Revoked

M = TypeVar("M")

SESSIONS_LIMIT = 65_536
"""Open at once; an idle one takes about half a kilobyte here and far more in its connection."""

ENDED = "ended"
"""The stream came to its end: the other side left, or the handler returned."""
SUPERSEDED = "superseded"
"""The same agent opened a newer one."""
REVOKED = "revoked"
STOPPING = "stopping"
"""The server is about to stop."""


class Session(Generic[M]):
    """One open stream. Iterate it for what is to be sent; it ends when the session is closed."""

    __slots__ = (
        "_closed",
        "_flushing",
        "_limit",
        "_queue",
        "_sessions",
        "_wait",
        "agent",
        "principal",
        "reason",
        "refused",
        "serial",
        "stream",
    )

    def __init__(
        self, sessions: Sessions, agent: str, stream: str, *, limit: int, principal: str, serial: int | None
    ) -> None:
        self.agent = agent
        self.stream = stream
        self.principal = principal
        """The name of who opened it, as the connection proved it."""
        self.serial = serial
        """Of the certificate it was opened with."""
        self.reason: str | None = None
        """Why it was closed; None while it is open."""
        self.refused = 0
        """Messages that found the queue full."""
        self._sessions = sessions
        self._limit = limit
        self._queue: deque[M] = deque()
        self._wait: asyncio.Future[None] | None = None
        self._closed: asyncio.Future[str] | None = None
        self._flushing = False

    def __repr__(self) -> str:
        state = "open" if self.reason is None else self.reason
        return f"<Session {self.agent} {self.stream} {state} queued={len(self._queue)}/{self._limit}>"

    @property
    def is_open(self) -> bool:
        return self.reason is None

    @property
    def superseded(self) -> bool:
        return self.reason == SUPERSEDED

    @property
    def flushing(self) -> bool:
        """Whether it was closed so that what is queued goes out first."""
        return self._flushing

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def closed(self) -> asyncio.Future[str]:
        """Done, with the reason, once the session is closed. Shared: wait for it, do not cancel it."""
        if self._closed is None:
            self._closed = asyncio.get_running_loop().create_future()
            if self.reason is not None:
                self._closed.set_result(self.reason)
        return self._closed

    # Sending.

    def offer(self, message: M) -> bool:
        """Queue a message; False if the session is closed or its queue is full."""
        if self.reason is not None:
            return False
        if len(self._queue) >= self._limit:
            self.refused += 1
            self._sessions.refused += 1
            return False
        self._queue.append(message)
        self._wake()
        return True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> M:
        if self._wait is not None:
            raise RuntimeError(f"{self!r} has a consumer already")
        while True:
            if self.reason is not None and not (self._flushing and self._queue):
                raise StopAsyncIteration
            if self._queue:
                return self._queue.popleft()
            self._wait = asyncio.get_running_loop().create_future()
            try:
                await self._wait
            finally:
                self._wait = None

    def _wake(self) -> None:
        if self._wait is not None and not self._wait.done():
            self._wait.set_result(None)

    # Ending.

    def close(self, reason: str = ENDED, *, flush: bool = False) -> None:
        """End it; the first reason stands. What is queued is dropped, unless `flush` lets it go out first."""
        if self.reason is not None:
            return
        self.reason = reason
        self._flushing = flush
        if not flush:
            self._queue.clear()
        self._sessions._forget(self)
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(reason)
        self._wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStatistics:
    open: int
    queued: int
    """Messages waiting in all of them."""
    opened: int
    """Since the start, as are the following."""
    superseded: int
    revoked: int
    refused: int
    """Messages that found a queue full."""


class Sessions:
    """All open sessions of this server."""

    def __init__(self, revocations: Revocations | None = None, *, limit: int = SESSIONS_LIMIT) -> None:
        self._open: dict[tuple[str, str], Session[Any]] = {}
        self._revocations = revocations
        self._limit = limit
        self._opened = 0
        self._superseded = 0
        self._revoked = 0
        self.refused = 0
        if revocations is not None:
            revocations.subscribe(self._on_revoked)

    def __repr__(self) -> str:
        return f"<Sessions open={len(self._open)}>"

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self, agent: str, stream: str, *, limit: int, principal: str = "", serial: int | None = None
    ) -> Session[M]:
        """A session for one of an agent's streams, closing the one it had. `limit` bounds its queue."""
        if limit <= 0:
            raise InvalidArgument("a session's queue must hold at least one message")
        # Again, although the caller was checked when it came: it may have been revoked since, and
        # whoever closes the sessions of the revoked could not have found this one.
        if self._revocations is not None:
            self._revocations.check(serial=serial, principal=principal)
        older = self._open.get((agent, stream))
        if older is not None:
            self._superseded += 1
            older.close(SUPERSEDED)
        elif len(self._open) >= self._limit:
            raise ResourceExhausted(f"{len(self._open)} sessions are open, the most there may be")
        session: Session[M] = Session(self, agent, stream, limit=limit, principal=principal, serial=serial)
        self._open[agent, stream] = session
        self._opened += 1
        return session

    def get(self, agent: str, stream: str) -> Session[Any] | None:
        return self._open.get((agent, stream))

    def __iter__(self) -> Iterator[Session[Any]]:
        return iter(tuple(self._open.values()))

    def close_where(self, predicate: Callable[[Session[Any]], bool], reason: str) -> int:
        """Close every session that fits; how many."""
        doomed = [session for session in self._open.values() if predicate(session)]
        for session in doomed:
            session.close(reason)
        return len(doomed)

    def close_all(self, reason: str = STOPPING, *, flush: bool = False) -> int:
        doomed = tuple(self._open.values())
        for session in doomed:
            session.close(reason, flush=flush)
        return len(doomed)

    def statistics(self) -> SessionStatistics:
        return SessionStatistics(
            open=len(self._open),
            queued=sum(session.queued for session in self._open.values()),
            opened=self._opened,
            superseded=self._superseded,
            revoked=self._revoked,
            refused=self.refused,
        )

    def _on_revoked(self, revoked: Revoked) -> None:
        self._revoked += self.close_where(
            lambda session: revoked.concerns(serial=session.serial, principal=session.principal), REVOKED
        )

    def _forget(self, session: Session[Any]) -> None:
        """A session that was superseded has lost its place already: only its own entry goes."""
        at = (session.agent, session.stream)
        if self._open.get(at) is session:
            del self._open[at]


PREFIX = "fleetplane_sessions_"


class SessionCollector(Collector):
    """One for all sessions that a domain holds; the label says which domain."""

    def __init__(self, sessions: Sessions, *, domain: str) -> None:
        self._sessions = sessions
        self._domain = domain

    @property
    def open(self) -> int:
        """How many are open now."""
        return len(self._sessions)

    def collect(self) -> Iterator[Metric]:
        numbers = self._sessions.statistics()
        gauges = (
            ("open", "Streams of agents open now", numbers.open),
            ("queued", "Messages waiting to be sent on them", numbers.queued),
        )
        counters = (
            ("opened", "Streams opened", numbers.opened),
            ("superseded", "Streams ended by a newer one of the same agent", numbers.superseded),
            ("revoked", "Streams ended because their caller was revoked", numbers.revoked),
            ("refused", "Messages that found a stream's queue full", numbers.refused),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["domain"])
            gauge.add_metric([self._domain], value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(PREFIX + name, text, labels=["domain"])
            counter.add_metric([self._domain], value)
            yield counter
