"""How long to wait before trying again: exponential, capped, jittered. Pure."""

from __future__ import annotations

from dataclasses import dataclass


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
