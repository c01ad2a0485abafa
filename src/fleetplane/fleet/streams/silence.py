"""Noticing who has said nothing for too long, at the moment when that is so.

One liveness tracker with its clock. Sleeps until the next agent can expire, and wakes earlier only
if another one is heard that would expire sooner. The server's own gaps are nobody's silence: see
`kernel/stalls`. What follows from a silence is decided by whoever runs the watch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.liveness import (
    AgentId,
    Liveness,
    LivenessChanged,
    LivenessPolicy,
    LivenessTracker,
)
from fleetplane.kernel.stalls import StallDetector, Term

LEAST_SLEEP_SECONDS = 0.001
"""What rounding may leave between a moment of expiry and the tick that believes in it."""


class SilenceWatch:
    def __init__(self, clock: Clock, policy: LivenessPolicy, attention: StallDetector | None = None) -> None:
        self._clock = clock
        self._attention = attention or StallDetector(clock)
        self._policy = policy
        self._tracker = LivenessTracker(policy)
        self._earlier = asyncio.Event()
        self._wakes_at = -math.inf
        """When the watch looks next; minus infinity while it does not sleep."""

    def __repr__(self) -> str:
        return f"<SilenceWatch {self._tracker!r}>"

    @property
    def term(self) -> Term:
        """Since when this server has listened well enough to believe a silence."""
        return self._attention.term(self._policy.stale_after_seconds)

    def heard(self, agent: str, *, seconds_ago: float = 0.0) -> Sequence[LivenessChanged]:
        """Somebody spoke. Moments must not go back from one call to the next; see `LivenessTracker`."""
        now = self._clock.monotonic() - seconds_ago
        changes = tuple(self._tracker.heard_from(AgentId(agent), now=now))
        if changes and now + self._policy.stale_after_seconds < self._wakes_at:
            self._earlier.set()
        return changes

    def forget(self, agent: str) -> None:
        self._tracker.forget(AgentId(agent))

    def state(self, agent: str) -> Liveness | None:
        """None for those who were never heard, or are forgotten."""
        return self._tracker.state(AgentId(agent))

    def agents(self) -> Iterator[tuple[AgentId, Liveness]]:
        return self._tracker.agents()

    async def run(self, on_change: Callable[[LivenessChanged], None]) -> NoReturn:
        """Tell each silence as it becomes one, until cancelled."""
        while True:
            self._tracker.grant(self.term.since)
            for change in self._tracker.tick(now=self._clock.monotonic()):
                on_change(change)
            self._earlier.clear()
            self._wakes_at = self._tracker.next_expiry()
            try:
                await self._sleep(self._wakes_at - self._clock.monotonic())
            finally:
                self._wakes_at = -math.inf

    async def _sleep(self, seconds: float) -> None:
        if seconds == math.inf:
            await self._earlier.wait()
            return
        async with asyncio.TaskGroup() as tasks:
            timer = tasks.create_task(self._clock.sleep(max(seconds, LEAST_SLEEP_SECONDS)))
            earlier = tasks.create_task(self._earlier.wait())
            await asyncio.wait((timer, earlier), return_when=asyncio.FIRST_COMPLETED)
            timer.cancel()
            earlier.cancel()
