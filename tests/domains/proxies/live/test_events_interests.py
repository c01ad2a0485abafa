from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.domains.proxies.live.subscriptions import (
    EventLimits,
    Interests,
    check_filter,
    check_pattern,
    matches,
)
from fleetplane.kernel.errors import InvalidArgument

segments = st.from_regex(r"[a-z0-9_]{1,8}", fullmatch=True)
kinds = st.lists(segments, min_size=1, max_size=4).map(".".join)


@pytest.mark.parametrize(
    ("pattern", "kind", "expected"),
    [
        ("agent.*", "agent.connected", True),
        ("agent.*", "agents.connected", False),
        ("agent.*", "agent", False),
        ("*", "agent.connected", True),
        ("*", "agent", True),
        ("*.connected", "agent.connected", True),
        ("*.connected", "agent.deleted", False),
        ("agent.*", "agent.a.b", True),
        ("agent.*.b", "agent.a.b", True),
        ("agent.*.b", "agent.a.c", False),
        ("agent.connected", "agent.connected", True),
        ("agent.connected", "agent.connected.late", False),
        ("agent.*.*", "agent.connected", False),
    ],
)
def test_a_star_is_one_segment_and_at_the_end_one_or_more(pattern: str, kind: str, expected: bool) -> None:
    assert matches(pattern, kind) is expected


@given(kinds)
def test_a_type_matches_itself_and_everything_matches_a_star(kind: str) -> None:
    assert matches(kind, kind)
    assert matches("*", kind)
    assert matches(check_pattern(kind), kind)


@pytest.mark.parametrize(
    "wrong", ["", ".", "agent.", ".x", "a*", "Agent.x", "a..b", "a b", "**", 7, None, "x" * 200]
)
def test_what_is_no_pattern_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidArgument):
        check_pattern(wrong)


@pytest.mark.parametrize(
    "wrong", [[], "x", {"colour": "red"}, {"agent_id": 1}, {"agent_id": []}, {"agent_id": [1]}]
)
def test_what_is_no_filter_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidArgument):
        check_filter(wrong)


def test_the_keys_of_a_filter_are_joined_by_and_its_values_by_or() -> None:
    interests = Interests()
    interests.subscribe(["health.*"], {"workspace_id": ["w1", "w2"], "severity": "critical"})
    assert interests.wants("health.alert", {"workspace_id": "w2", "severity": "critical"})
    assert not interests.wants("health.alert", {"workspace_id": "w3", "severity": "critical"})
    assert not interests.wants("health.alert", {"workspace_id": "w1", "severity": "warning"})
    assert not interests.wants("health.alert", {"workspace_id": "w1"})


def test_the_first_subscription_replaces_everything_and_the_next_ones_add_to_it() -> None:
    interests = Interests()
    assert interests.wants("x.y", {})
    interests.subscribe(["agent.*"], None)
    assert not interests.wants("x.y", {})
    interests.subscribe(["x.*"], None)
    assert interests.wants("x.y", {})
    assert interests.wants("agent.connected", {})


def test_unsubscribing_ends_one_or_some_patterns_or_everything() -> None:
    interests = Interests()
    first = interests.subscribe(["a.*", "b.*"], None)
    interests.subscribe(["b.*"], None)
    interests.unsubscribe(first.id, None)
    assert (interests.wants("a.x", {}), interests.wants("b.x", {})) == (False, True)
    interests.unsubscribe(None, ["b.*"])
    assert not interests.wants("b.x", {})
    assert interests.subscriptions == ()
    interests.subscribe(["c.*"], None)
    interests.unsubscribe(None, None)
    assert not interests.wants("c.x", {})
    with pytest.raises(InvalidArgument):
        interests.unsubscribe(first.id, None)


def test_one_who_never_subscribed_and_unsubscribes_hears_nothing() -> None:
    interests = Interests()
    interests.unsubscribe(None, None)
    assert not interests.wants("agent.connected", {})


def test_patterns_and_subscriptions_are_bounded() -> None:
    interests = Interests()
    for _ in range(20):
        interests.subscribe(["*"], None)
    with pytest.raises(InvalidArgument):
        interests.subscribe(["*"], None)
    with pytest.raises(InvalidArgument):
        Interests().subscribe(["*"] * 51, None)


def test_the_bounds_are_the_operators() -> None:
    interests = Interests(EventLimits(patterns=2, subscriptions=1))
    with pytest.raises(InvalidArgument, match="at most 2 patterns in 1 subscriptions"):
        interests.subscribe(["a.b", "a.c", "a.d"], None)
    interests.subscribe(["a.b"], None)
    with pytest.raises(InvalidArgument):
        interests.subscribe(["a.c"], None)


def test_a_refused_subscription_changes_nothing() -> None:
    interests = Interests()
    with pytest.raises(InvalidArgument):
        interests.subscribe(["*"], {"colour": "red"})
    assert interests.wants("agent.connected", {}), "it still hears everything"
