"""How often one caller may call.

A sliding window in two numbers per caller: what was counted in this minute and in the one
before, the latter by as much of it as still lies within the last sixty seconds. Exact for a
caller that comes fresh, never off by more than the unevenness of its previous minute. Pure:
takes the moment it should believe in.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

CALLERS_LIMIT = 50_000
"""Callers remembered; about 200 bytes each. The one heard from longest ago is forgotten first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """The answer to one request, and the headers' numbers."""

    allowed: bool
    limit: int
    remaining: int
    reset_seconds: float
    """Until the window has emptied enough for one more, or, while there is room, has emptied."""


@dataclass(slots=True)
class _Count:
    window: int
    current: int = 0
    previous: int = 0


class RestRate:
    def __init__(
        self, limit: int, *, window_seconds: float = 60.0, callers_limit: int = CALLERS_LIMIT
    ) -> None:
        self._limit = limit
        self._window = window_seconds
        self._callers_limit = callers_limit
        self._counts: OrderedDict[str, _Count] = OrderedDict()
        self.refused = 0

    def __repr__(self) -> str:
        return f"<RateLimit {self._limit}/{self._window:g}s callers={len(self._counts)}>"

    def take(self, caller: str, *, now: float) -> Allowance:
        """Count one request, unless it is one too many."""
        count = self._count(caller, now)
        elapsed = now - count.window * self._window
        used = count.current + count.previous * (1 - elapsed / self._window)
        if used + 1 > self._limit:
            self.refused += 1
            wait = self._wait(count, used, elapsed)
            return Allowance(allowed=False, limit=self._limit, remaining=0, reset_seconds=wait)
        count.current += 1
        remaining = max(0, math.floor(self._limit - used - 1))
        return Allowance(
            allowed=True, limit=self._limit, remaining=remaining, reset_seconds=self._window - elapsed
        )

    def _wait(self, count: _Count, used: float, elapsed: float) -> float:
        excess = used + 1 - self._limit
        if count.previous and excess <= count.previous * (1 - elapsed / self._window):
            return excess * self._window / count.previous
        # Then this window must end, and its own count drain far enough in the next.
        drained = max(0.0, (count.current + 1 - self._limit) / max(1, count.current))
        return self._window - elapsed + drained * self._window

    def _count(self, caller: str, now: float) -> _Count:
        window = math.floor(now / self._window)
        count = self._counts.pop(caller, None)
        if count is None:
            count = _Count(window)
        elif count.window != window:
            count.previous = count.current if count.window == window - 1 else 0
            count.current, count.window = 0, window
        self._counts[caller] = count
        if len(self._counts) > self._callers_limit:
            self._counts.popitem(last=False)
        return count
