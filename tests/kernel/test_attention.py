"""The server's own gaps are nobody's silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fleetplane.kernel.liveness import AgentId, Liveness, LivenessPolicy, LivenessTracker
from fleetplane.kernel.stalls import BEAT_SECONDS, SETTLING_SECONDS, Gap, StallDetector, Term
from fleetplane.sim.clock import NANOSECONDS, VirtualClock

TERM_SECONDS = 30.0


def gap(lost_seconds: float, ended_at: float) -> Gap:
    return Gap(lost_seconds=lost_seconds, ended_at=ended_at, ended_at_ns=round(ended_at * 1e9))


@asynccontextmanager
async def beating(clock: VirtualClock) -> AsyncIterator[StallDetector]:
    attention = StallDetector(clock)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(attention.run())
        await clock.advance(1)
        yield attention
        running.cancel()


def test_a_short_gap_changes_nothing_and_a_long_one_starts_a_new_term() -> None:
    term = Term(TERM_SECONDS)
    term.note(gap(7.0, 100.0))
    assert term.fair(90.0) == 90.0
    term.note(gap(8.0, 200.0))
    assert term.fair(90.0) == 200.0
    assert term.fair(201.0) == 201.0


def test_many_short_gaps_within_a_term_count_as_a_long_one() -> None:
    term = Term(TERM_SECONDS)
    for at in (100.0, 105.0, 110.0):
        term.note(gap(2.0, at))
    assert term.fair(90.0) == 90.0
    term.note(gap(2.0, 115.0))
    assert term.fair(90.0) == 115.0


def test_short_gaps_far_apart_never_add_up() -> None:
    term = Term(TERM_SECONDS)
    for at in range(0, 10_000, 20):
        term.note(gap(2.0, float(at)))
    assert term.fair(5.0) == 5.0


def test_a_moment_from_before_the_clock_went_back_is_not_believed() -> None:
    term = Term(TERM_SECONDS, [gap(3600.0, 1000.0)])
    now_ns = round(1001.0 * 1e9)
    assert term.fair_ns(round(4500 * 1e9), now_ns=now_ns) == round(1000.0 * 1e9)
    assert term.fair_ns(now_ns, now_ns=now_ns) == now_ns


def test_a_silence_that_is_never_believed_keeps_no_gaps() -> None:
    term = Term(float("inf"), [gap(5.0, float(at)) for at in range(100)])
    assert term.fair(1.0) == 1.0
    assert "lost=0.0" in repr(term)


async def test_time_that_passes_while_the_server_listens_is_no_gap() -> None:
    clock = VirtualClock()
    async with beating(clock) as attention:
        await clock.advance(600)
        assert (attention.gaps, attention.term(TERM_SECONDS).since_ns) == (0, 0)


async def test_a_stall_is_noticed_by_whoever_decides_before_the_beat_does() -> None:
    clock = VirtualClock()
    async with beating(clock) as attention:
        clock.stall(60)
        assert attention.term(TERM_SECONDS).since == clock.monotonic()  # the beat has not run yet
        assert attention.gaps == 1
        await clock.advance(1)
        assert attention.gaps == 1


async def test_a_clock_that_jumps_either_way_is_a_gap() -> None:
    for seconds in (3600.0, -3600.0):
        clock = VirtualClock()
        async with beating(clock) as attention:
            heard_at_ns = clock.now_ns()
            clock.step(seconds)
            term = attention.term(TERM_SECONDS)
            assert term.since == clock.monotonic()
            assert term.fair_ns(heard_at_ns, now_ns=clock.now_ns()) == clock.now_ns()


async def test_a_term_that_is_first_asked_for_after_a_gap_knows_of_it() -> None:
    clock = VirtualClock()
    async with beating(clock) as attention:
        clock.stall(60)
        await clock.advance(2)
        assert clock.monotonic() - attention.term(77.0).since <= 2 + BEAT_SECONDS


async def test_answers_are_waited_for_a_little_after_a_gap() -> None:
    clock = VirtualClock()
    async with beating(clock) as attention:
        assert attention.settled
        clock.stall(60)
        assert not attention.settled
        await clock.advance(SETTLING_SECONDS + 0.1)
        assert attention.settled


async def test_without_a_beat_there_are_no_gaps() -> None:
    clock = VirtualClock()
    attention = StallDetector(clock)
    clock.stall(10**6)
    assert attention.term(TERM_SECONDS).since_ns == 0
    assert attention.settled


def test_everyone_has_a_fresh_term_after_a_gap_and_falls_silent_at_its_end() -> None:
    tracker = LivenessTracker(LivenessPolicy(stale_after_seconds=30, dead_after_seconds=100))
    early, late = AgentId("early"), AgentId("late")
    list(tracker.heard_from(early, now=0.0))
    list(tracker.heard_from(late, now=9.0))
    assert [change.agent for change in tracker.tick(now=30.0)] == [early]

    tracker.grant(90.0)  # the server was away until then
    assert tracker.next_expiry() == 120.0
    assert list(tracker.tick(now=119.9)) == []
    assert [(change.agent, change.after) for change in tracker.tick(now=120.0)] == [(late, Liveness.STALE)]
    assert list(tracker.tick(now=189.9)) == []
    assert {change.agent for change in tracker.tick(now=190.0)} == {early, late}


async def test_virtual_time_can_be_stalled_and_stepped() -> None:
    clock = VirtualClock()
    before, wall = clock.monotonic(), clock.now_ns()
    clock.step(-5)
    assert (clock.monotonic(), clock.now_ns()) == (before, wall - 5 * NANOSECONDS)
    clock.stall(7)
    assert (clock.monotonic(), clock.now_ns()) == (before + 7, wall + 2 * NANOSECONDS)
