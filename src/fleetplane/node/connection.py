"""Sessions with the server, one after another, for as long as the agent lives.

Owns the rule when waits begin anew: after a session that was *established and* lasted. A connection attempt
that hangs for a while before it fails is not a good session, and a server that accepts and drops every
session at once is not tried without pause. How long to wait is the protocol's: a `Waits`. A session lends
its connection and credentials to the upgrader and the reporter of metrics (`Follow`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from fleetplane.kernel.clock import Backoff, Clock
from fleetplane.node.link import ServerRefused, causes
from fleetplane.node.tasks import unless

Metadata = Callable[[], Sequence[tuple[str, str]]]
Follow = Callable[[grpc.aio.Channel, Metadata], Coroutine[None, None, None]]
"""Check in, or report, over a connection for as long as it lasts."""


async def no_check_in(channel: grpc.aio.Channel, metadata: Metadata) -> None:
    """For agents that were started without the launcher: they are upgraded as they were installed."""
    del channel, metadata


def no_metadata() -> Sequence[tuple[str, str]]:
    """Where the connection itself says who calls."""
    return ()


def together(*follows: Follow) -> Follow:
    """Several at once over the same connection."""

    async def follow(channel: grpc.aio.Channel, metadata: Metadata) -> None:
        async with asyncio.TaskGroup() as tasks:
            for one in follows:
                tasks.create_task(one(channel, metadata))

    return follow


SPREAD_SECONDS = 2.0
"""Over which agents come back that lost the same server: thousands at once would find the others busy with
opening streams, and each time that such a stream is given up, with opening it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryWait:
    seconds: float
    failures: int
    """How many sessions in a row count as failed now."""


class Waits(Protocol):
    def after(self, why: Exception, failures: int, *, jitter: float) -> RetryWait:
        """How long to wait after a session that ended this way. Pure.

        `failures` is how many in a row failed before it, 0 where it was a good one itself; `jitter` is a
        number in [0, 1).
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionRetries:
    """Exponential waits; with `refused`, others after an answer that will hardly change."""

    backoff: Backoff
    refused: Backoff | None = None
    spread_seconds: float = 0.0
    """How much longer the wait after a good session may be, so that not all come back at once."""

    def after(self, why: Exception, failures: int, *, jitter: float) -> RetryWait:
        chosen = self.refused if self.refused is not None and isinstance(why, ServerRefused) else self.backoff
        spread = self.spread_seconds if failures == 0 else 0.0
        seconds = chosen.delay_seconds(failures, jitter=jitter) + spread * jitter
        return RetryWait(seconds=seconds, failures=failures + 1)


class ConnectionAttempt:
    """One session, as the loop sees it."""

    def __init__(self, clock: Clock, *, failures: int = 0, after: Exception | None = None) -> None:
        self._clock = clock
        self._established_at: float | None = None
        self.failures = failures
        """Sessions that failed in a row before this one."""
        self.after = after
        """Why the one before it ended; None if it was the first, or ended as it should."""

    def __repr__(self) -> str:
        return f"<Attempt failures={self.failures} established={self._established_at is not None}>"

    def established(self) -> None:
        """The server has accepted the session. To be called by it; only the first time counts."""
        if self._established_at is None:
            self._established_at = self._clock.monotonic()

    def lasted(self, seconds: float) -> bool:
        """Whether the session was established, and that long ago."""
        return self._established_at is not None and (
            self._clock.monotonic() - self._established_at >= seconds
        )


class KeepConnected:
    def __init__(
        self,
        *,
        endings: tuple[type[Exception], ...],
        waits: Waits,
        lost: Callable[[Exception, float], None],
        clock: Clock,
        steady_seconds: float = 0.0,
        leaving: asyncio.Event | None = None,
    ) -> None:
        """`endings` are the errors after which the loop reconnects; `lost` gets the error and the wait.

        A session that was established and stood for `steady_seconds` was a good one. `leaving` ends the loop,
        and a wait at once.
        """
        self._endings = endings
        self._waits = waits
        self._lost = lost
        self._clock = clock
        self._steady_seconds = steady_seconds
        self._leaving = leaving or asyncio.Event()

    def __repr__(self) -> str:
        return f"<KeepConnected {self._waits!r} leaving={self._leaving.is_set()}>"

    async def run(self, serve: Callable[[ConnectionAttempt], Awaitable[None]]) -> None:
        """Run until asked to leave, or for ever. After a `serve` that returns, the next follows at once."""
        failures, after = 0, None
        while not self._leaving.is_set():
            attempt = ConnectionAttempt(self._clock, failures=failures, after=after)
            after = await self._ended(serve, attempt)
            if after is None:
                failures = 0
                continue
            if attempt.lasted(self._steady_seconds):
                failures = 0
            wait = self._waits.after(after, failures, jitter=self._clock.random())
            failures = wait.failures
            self._lost(after, wait.seconds)
            await unless(self._leaving, self._clock.sleep(wait.seconds))

    async def _ended(
        self, serve: Callable[[ConnectionAttempt], Awaitable[None]], attempt: ConnectionAttempt
    ) -> Exception | None:
        """Why the session ended. Several tasks may have seen it: the first to tell counts."""
        found: list[Exception] = []
        try:
            await serve(attempt)
        except* self._endings as group:
            found += [one for one in causes(group) if isinstance(one, Exception)]
        if (task := asyncio.current_task()) is not None and task.cancelling():
            # A task group that is ending by an error of its own takes no note of being cancelled.
            raise asyncio.CancelledError
        return found[0] if found else None
