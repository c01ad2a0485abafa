"""Time and randomness, injected everywhere so that a simulated day costs milliseconds."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from typing import Protocol


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
