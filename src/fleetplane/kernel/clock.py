"""Time and randomness, injected everywhere so that a simulated day costs milliseconds.

How long to wait before trying again: exponential, capped, jittered. Pure.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Full jitter over the upper half: attempts spread out, and none comes at once.

    The n-th wait (from 0) lies between half and the whole of `first_seconds * 2**n`, but never
    above `ceiling_seconds`.
    """

    first_seconds: float = 0.5
    ceiling_seconds: float = 30.0

    def delay_seconds(self, attempt: int, *, jitter: float) -> float:
        """`jitter` is a number in [0, 1), from the clock."""
        doublings = min(attempt, 62)  # beyond that every ceiling is long reached
        whole = min(self.ceiling_seconds, self.first_seconds * 2.0**doublings)
        return whole * (0.5 + jitter / 2)


class Clock(Protocol):
    def now_ns(self) -> int:
        """Wall-clock time in nanoseconds since the Unix epoch; may jump."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def random(self) -> float:
        """A number in [0, 1), for jitter. Never for secrets."""
        ...

    def token_bytes(self, count: int) -> bytes:
        """Unpredictable bytes, for identifiers, nonces and keys."""
        ...


class SystemClock:
    """The machine's clock and the kernel's entropy."""

    def now_ns(self) -> int:
        return time.time_ns()

    # Asked several times in every call: the function itself, without one of ours around it.
    monotonic = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def random(self) -> float:
        return random.random()  # noqa: S311  # jitter, not a secret

    def token_bytes(self, count: int) -> bytes:
        return secrets.token_bytes(count)

    def __repr__(self) -> str:
        return "<SystemClock>"
