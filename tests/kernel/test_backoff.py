from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetplane.kernel.clock import Backoff


def test_waits_double_and_stop_at_the_ceiling() -> None:
    backoff = Backoff(first_seconds=1.0, ceiling_seconds=5.0)
    assert [backoff.delay_seconds(attempt, jitter=1.0) for attempt in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]


@given(st.integers(0, 10**9), st.floats(0, 1, exclude_max=True))
def test_no_wait_is_zero_or_above_the_ceiling(attempt: int, jitter: float) -> None:
    assert 0.25 <= Backoff().delay_seconds(attempt, jitter=jitter) <= 30.0
