"""Virtual time that advances on request, and reproducible randomness."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random

NANOSECONDS = 1_000_000_000
EPOCH_NS = 1_767_225_600 * NANOSECONDS
"""2026-01-01T00:00:00Z: where simulated time starts unless told otherwise."""
SETTLE_TURNS = 8
"""Turns of the event loop given to whoever just woke, so that it can act before time moves on."""


class VirtualClock:
    """A `Clock` for tests and simulations; the same seed gives the same run."""

    def __init__(self, *, seed: int = 0, start_ns: int = EPOCH_NS) -> None:
        self._start_ns = start_ns
        self._elapsed_ns = 0
        # Seeded on purpose: a run that cannot be repeated cannot be debugged.
        self._random = random.Random(seed)  # noqa: S311
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now_ns(self) -> int:
        return self._start_ns + self._elapsed_ns

    def monotonic(self) -> float:
        return self._elapsed_ns / NANOSECONDS

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        wake = asyncio.get_running_loop().create_future()
        heapq.heappush(
            self._sleepers, (self._elapsed_ns + round(seconds * NANOSECONDS), next(self._order), wake)
        )
        await wake

    def random(self) -> float:
        return self._random.random()

    def token_bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)

    async def advance(self, seconds: float) -> None:
        """Let `seconds` pass, waking each sleeper at its own moment and in order."""
        until = self._elapsed_ns + round(seconds * NANOSECONDS)
        await self._settle()
        while self._sleepers and self._sleepers[0][0] <= until:
            when, _, wake = heapq.heappop(self._sleepers)
            if wake.done():  # cancelled while asleep
                continue
            self._elapsed_ns = max(self._elapsed_ns, when)
            wake.set_result(None)
            await self._settle()
        self._elapsed_ns = until

    def stall(self, seconds: float) -> None:
        """Let `seconds` pass with nobody woken: the process was stopped, or its event loop held."""
        self._elapsed_ns += round(seconds * NANOSECONDS)

    def step(self, seconds: float) -> None:
        """Set the wall clock forward, or back if negative; the monotonic one does not notice."""
        self._start_ns += round(seconds * NANOSECONDS)

    async def _settle(self) -> None:
        for _ in range(SETTLE_TURNS):
            await asyncio.sleep(0)

    @property
    def sleepers(self) -> int:
        """How many are waiting for time to pass."""
        return sum(not wake.done() for _, _, wake in self._sleepers)

    def __repr__(self) -> str:
        return f"<VirtualClock +{self.monotonic():.3f}s sleepers={self.sleepers}>"
