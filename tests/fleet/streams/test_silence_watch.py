"""Silence is noticed at its moment, by a watch that sleeps until then."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fleetplane.fleet.streams.silence import SilenceWatch
from fleetplane.kernel.liveness import Liveness, LivenessChanged, LivenessPolicy
from fleetplane.kernel.stalls import StallDetector
from fleetplane.sim.clock import VirtualClock

TWO_STAGES = LivenessPolicy(stale_after_seconds=90, dead_after_seconds=300)


class Watching:
    def __init__(self, policy: LivenessPolicy = TWO_STAGES) -> None:
        self.clock = VirtualClock()
        self.attention = StallDetector(self.clock)
        self.watch = SilenceWatch(self.clock, policy, self.attention)
        self.told: list[tuple[float, str, Liveness]] = []

    def tell(self, change: LivenessChanged) -> None:
        self.told.append((round(self.clock.monotonic(), 1), change.agent, change.after))

    @asynccontextmanager
    async def running(self, *, beat: bool = False) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(self.watch.run(self.tell))]
            if beat:
                started.append(tasks.create_task(self.attention.run()))
            await self.clock.advance(0)
            yield
            for task in started:
                task.cancel()


async def test_both_stages_are_told_at_their_moments() -> None:
    here = Watching()
    async with here.running():
        here.watch.heard("a")
        await here.clock.advance(1000)
    assert here.told == [(90.0, "a", Liveness.STALE), (300.0, "a", Liveness.DEAD)]


async def test_the_watch_sleeps_until_somebody_can_expire() -> None:
    here = Watching()
    async with here.running():
        assert here.clock.sleepers == 0, "with nobody to watch it waits for somebody to be heard"
        here.watch.heard("a")
        await here.clock.advance(0)
        assert here.clock.sleepers == 1
        before = here.watch._wakes_at
        await here.clock.advance(60)
        assert here.watch._wakes_at == before == 90.0, "it did not wake in between"


async def test_somebody_heard_while_the_watch_sleeps_for_another_expires_in_time() -> None:
    """Its next moment is the second stage of `a`, which is later than the first of `b`."""
    here = Watching()
    async with here.running():
        here.watch.heard("a")
        await here.clock.advance(100)
        here.watch.heard("b")
        await here.clock.advance(95)
    assert here.told == [(90.0, "a", Liveness.STALE), (190.0, "b", Liveness.STALE)]


async def test_without_a_second_stage_nobody_is_declared_dead_and_returns_are_told() -> None:
    here = Watching(LivenessPolicy(stale_after_seconds=10, dead_after_seconds=math.inf))
    async with here.running():
        here.watch.heard("a")
        await here.clock.advance(1e6)
        assert [change.before for change in here.watch.heard("a")] == [Liveness.STALE]
        await here.clock.advance(11)
        here.watch.forget("a")
        await here.clock.advance(1e6)
    assert [at for at, _, _ in here.told] == [10.0, 1_000_010.0]


async def test_the_servers_own_gap_is_nobodys_silence() -> None:
    here = Watching()
    async with here.running(beat=True):
        here.watch.heard("a")
        await here.clock.advance(10)
        here.clock.stall(200)
        await here.clock.advance(80)
        assert here.told == [], "the gap ended less than a term ago"
        await here.clock.advance(20)
    ((at, agent, state),) = here.told
    assert (agent, state) == ("a", Liveness.STALE)
    assert 300.0 <= at <= 300.5, "a whole term after the gap, which the next beat notices"


async def test_moments_that_do_not_add_up_exactly_do_not_keep_the_watch_spinning() -> None:
    here = Watching(LivenessPolicy(stale_after_seconds=0.3, dead_after_seconds=math.inf))
    async with here.running(), asyncio.timeout(60):
        for tenth in range(50):
            here.watch.heard(f"agent-{tenth}")
            await here.clock.advance(0.1)
        await here.clock.advance(1)
    assert len(here.told) == 50
