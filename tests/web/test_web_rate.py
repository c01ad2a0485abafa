"""The sliding window, under a clock that the test moves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetplane.web.rest.gateway import RestRate


def test_a_fresh_caller_has_the_whole_limit_and_not_one_more() -> None:
    limit = RestRate(3)
    answers = [limit.take("a", now=120.0) for _ in range(4)]

    assert [answer.allowed for answer in answers] == [True, True, True, False]
    assert [answer.remaining for answer in answers] == [2, 1, 0, 0]
    assert limit.refused == 1


def test_callers_do_not_share() -> None:
    limit = RestRate(1)
    assert limit.take("a", now=0.0).allowed
    assert limit.take("b", now=0.0).allowed


def test_the_end_of_a_minute_does_not_double_the_limit() -> None:
    limit = RestRate(60)
    for _ in range(60):
        assert limit.take("a", now=59.9).allowed
    assert not limit.take("a", now=60.1).allowed
    allowed = sum(limit.take("a", now=90.0).allowed for _ in range(60))
    assert allowed == 30, "half a minute has passed, half of the window is free"


@given(st.lists(st.floats(0, 0.5), min_size=1, max_size=400))
def test_who_waits_as_told_gets_in(steps: list[float]) -> None:
    limit, now = RestRate(20), 1000.0
    for step in steps:
        now += step
        answer = limit.take("a", now=now)
        if not answer.allowed:
            now += answer.reset_seconds + 1e-6
            assert limit.take("a", now=now).allowed


def test_only_so_many_callers_are_remembered() -> None:
    limit = RestRate(1, callers_limit=2)
    for caller in "abc":
        assert limit.take(caller, now=0.0).allowed
    assert limit.take("a", now=0.0).allowed, "a was forgotten"
    assert not limit.take("c", now=0.0).allowed
