"""The database's clock, as a server knows it: one clock for all who share a database.

Every answer of the database says what time it is there. Between two answers this server's monotonic clock
counts on. What its own wall clock shows does not matter: a server whose clock is an hour fast would
otherwise forget revocations an hour early.
"""

from __future__ import annotations

from fleetplane.kernel.clock import Clock

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
