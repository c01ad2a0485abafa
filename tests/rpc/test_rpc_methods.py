"""The method table and the limits in its rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.kernel.errors import SettingsError
from fleetplane.rpc import Authentication, MethodRow, MethodTable, Rate
from fleetplane.rpc.methods import RateLimiter


def row(path: str = "/a.B/C", listener: str = "x") -> MethodRow:
    return MethodRow(path=path, listener=listener, authentication=Authentication.LOCAL, permission=None)


def test_two_rows_for_one_method_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"two rows for /a\.B/C"):
        MethodTable([row(), row()])


def test_the_same_method_may_be_on_two_listeners() -> None:
    table = MethodTable([row(), row(listener="y")])
    table.require_complete({"x": ["/a.B/C"], "y": ["/a.B/C"]})
    assert table.row("y", "/a.B/C") == row(listener="y")


def test_every_disagreement_is_named_at_once() -> None:
    table = MethodTable([row(), row("/a.B/Old")])
    with pytest.raises(SettingsError) as caught:
        table.require_complete({"x": ["/a.B/C", "/a.B/New"], "y": ["/a.B/C"]})
    assert str(caught.value) == (
        "the method table is incomplete: method /a.B/New on listener x has no row; "
        "method /a.B/C on listener y has no row; row /a.B/Old on listener x has no method"
    )


@pytest.mark.parametrize("path", ["", "/", "a.B/C", "/a.B", "/a.B/", "//C", "/a.B/C/D"])
def test_a_row_needs_a_method_path(path: str) -> None:
    with pytest.raises(SettingsError, match="not a method path"):
        row(path)


@pytest.mark.parametrize(("per_second", "burst"), [(0.0, 1), (-1.0, 1), (1.0, 0)])
def test_a_rate_that_lets_nobody_through_is_refused(per_second: float, burst: int) -> None:
    with pytest.raises(SettingsError):
        Rate(per_second=per_second, burst=burst)


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    limiter = RateLimiter(Rate(per_second=2.0, burst=3))
    assert [limiter.take("a", 0.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert limiter.take("a", 0.25) == 0.25
    assert limiter.take("a", 0.5) == 0.0
    assert limiter.take("a", 0.5) > 0.0


def test_callers_do_not_share_a_bucket_unless_told_to() -> None:
    each = RateLimiter(Rate(per_second=1.0, burst=1))
    together = RateLimiter(Rate(per_second=1.0, burst=1, per="method"))
    assert [each.take(caller, 0.0) for caller in "ab"] == [0.0, 0.0]
    assert [together.take(caller, 0.0) for caller in "ab"] == [0.0, 1.0]


def test_only_so_many_callers_are_remembered() -> None:
    limiter = RateLimiter(Rate(per_second=0.001, burst=1), callers_tracked=2)
    for caller in "abc":
        assert limiter.take(caller, 0.0) == 0.0
    assert limiter.forgotten == 1
    assert limiter.take("c", 0.0) > 0.0
    assert limiter.take("a", 0.0) == 0.0


@given(st.lists(st.floats(min_value=0, max_value=5), max_size=200), st.integers(1, 10), st.floats(0.1, 20))
def test_no_pace_gets_more_than_burst_and_rate(steps: list[float], burst: int, per_second: float) -> None:
    limiter, now, passed = RateLimiter(Rate(per_second=per_second, burst=burst)), 0.0, 0
    for step in steps:
        now += step
        passed += limiter.take("a", now) == 0.0
    assert passed <= burst + now * per_second + 1e-6
