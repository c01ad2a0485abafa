from __future__ import annotations

import math

import pytest

from fleetplane.kernel.liveness import AgentId, Liveness, LivenessPolicy, LivenessTracker

EDGE_1, EDGE_2 = AgentId("edge-1"), AgentId("edge-2")


def test_a_silent_agent_goes_stale_and_comes_back_at_the_next_heartbeat() -> None:
    tracker = LivenessTracker(LivenessPolicy())
    list(tracker.heard_from(EDGE_1, now=0.0))

    assert list(tracker.tick(now=89.9)) == []
    assert [change.after for change in tracker.tick(now=90.0)] == [Liveness.STALE]
    assert [change.after for change in tracker.heard_from(EDGE_1, now=91.0)] == [Liveness.ONLINE]


def test_a_long_silence_passes_through_stale_to_dead_in_one_tick() -> None:
    tracker = LivenessTracker(LivenessPolicy())
    list(tracker.heard_from(EDGE_1, now=0.0))

    assert [(change.before, change.after) for change in tracker.tick(now=1000.0)] == [
        (Liveness.ONLINE, Liveness.STALE),
        (Liveness.STALE, Liveness.DEAD),
    ]
    assert tracker.state(EDGE_1) is Liveness.DEAD


def test_a_heartbeat_renews_only_its_own_agent() -> None:
    tracker = LivenessTracker(LivenessPolicy())
    for agent in (EDGE_1, EDGE_2):
        list(tracker.heard_from(agent, now=0.0))
    list(tracker.heard_from(EDGE_1, now=60.0))

    assert [change.agent for change in tracker.tick(now=90.0)] == [EDGE_2]
    assert dict(tracker.agents()) == {EDGE_1: Liveness.ONLINE, EDGE_2: Liveness.STALE}


def test_the_next_expiry_is_the_earliest_moment_at_which_a_tick_changes_anything() -> None:
    tracker = LivenessTracker(LivenessPolicy())
    assert tracker.next_expiry() == math.inf
    list(tracker.heard_from(EDGE_1, now=10.0))

    assert tracker.next_expiry() == 100.0
    assert list(tracker.tick(now=99.999)) == []
    assert len(list(tracker.tick(now=100.0))) == 1
    assert tracker.next_expiry() == 310.0


def test_a_forgotten_agent_never_expires() -> None:
    tracker = LivenessTracker(LivenessPolicy())
    list(tracker.heard_from(EDGE_1, now=0.0))
    tracker.forget(EDGE_1)

    assert list(tracker.tick(now=1e9)) == []
    assert tracker.state(EDGE_1) is None


def test_a_policy_whose_stages_are_out_of_order_is_refused() -> None:
    with pytest.raises(ValueError, match="stale_after_seconds <= dead_after_seconds"):
        LivenessPolicy(stale_after_seconds=10, dead_after_seconds=5)
