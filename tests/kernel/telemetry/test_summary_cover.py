"""Which stretches answer a question: every second of it once, in rows that are as wide as may be."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fleetplane.kernel.telemetry.summaries import DAY, HOUR, WIDTHS, Folded, cover

NOW = 20_000 * DAY + 14 * HOUR + 37 * 60 + 11
FOLDED = {
    60: Folded(until=NOW - NOW % 60 - 60, oldest=NOW - NOW % HOUR - HOUR),
    HOUR: Folded(until=NOW - NOW % HOUR, oldest=NOW - NOW % DAY - 2 * DAY),
    DAY: Folded(),
}


def seconds(width: int, at: int) -> range:
    """What a row holds: all of its stretch, or up to where finer ones were folded into it."""
    finer = WIDTHS[WIDTHS.index(width) - 1] if width != WIDTHS[0] else 0
    return range(at, min(at + width, FOLDED[finer].until) if finer else at + width)


@given(
    st.integers(NOW - 34 * DAY, NOW - 1),
    st.integers(1, 31 * DAY),
    st.sampled_from([0, *WIDTHS]),
)
def test_every_minute_of_a_question_is_answered_once(start: int, length: int, step: int) -> None:
    stop = min(start + length, NOW)
    parts = cover(start, stop, FOLDED, step_seconds=step)
    held = [seconds(width, at) for width, first, last in parts for at in _rows(width, first, last)]
    told = [one for one in held if len(one)]
    assert all(one.stop == after.start for one, after in pairwise(told)), "no gap, no overlap"
    assert told[0].start <= start
    assert told[-1].stop >= min(stop, NOW - 120)
    for width, first, last in parts:
        for at in _rows(width, first, last):
            assert width == DAY or at >= FOLDED[width].oldest, "it is there"
            finer = WIDTHS[max(0, WIDTHS.index(width) - 1)]
            assert width <= max(step, WIDTHS[0]) or at < FOLDED[finer].oldest, "no wider than it must be"


def _rows(width: int, first: int, last: int) -> range:
    return range(-(-first // width) * width if first % width else first, last, width)


def test_a_month_is_read_in_days() -> None:
    parts = cover(NOW - 30 * DAY, NOW, FOLDED, step_seconds=DAY)
    rows = [(width, len(_rows(width, first, last))) for width, first, last in parts]
    assert rows == [(DAY, 31), (HOUR, 1), (60, 2)]


def test_nothing_folded_is_read_by_the_minute() -> None:
    nothing = {width: Folded() for width in WIDTHS}
    assert cover(NOW - DAY, NOW, nothing, step_seconds=DAY) == [(60, NOW - DAY - (NOW - DAY) % 60, NOW)]
