from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values import durations

# The third column is what Go prints after parsing the first.
VECTORS = [
    ("0", 0.0, "0s"),
    ("30s", 30.0, "30s"),
    ("5m", 300.0, "5m0s"),
    ("504h", 1814400.0, "504h0m0s"),
    ("1h30m", 5400.0, "1h30m0s"),
    ("300ms", 0.3, "300ms"),
    ("1.5h", 5400.0, "1h30m0s"),
    (".5s", 0.5, "500ms"),
    ("1.s", 1.0, "1s"),
    ("1h1h", 7200.0, "2h0m0s"),
    ("-2m", -120.0, "-2m0s"),
    ("+1us", 1e-06, "1µs"),
    ("1µs", 1e-06, "1µs"),
    ("1μs", 1e-06, "1µs"),
    ("7ns", 7e-09, "7ns"),
    ("1m0.25s", 60.25, "1m0.25s"),
]


@pytest.mark.parametrize(("text", "seconds", "printed"), VECTORS)
def test_durations_mean_and_print_what_they_do_in_go(text: str, seconds: float, printed: str) -> None:
    assert durations.parse(text) == pytest.approx(seconds, rel=1e-12)
    assert durations.format(durations.parse(text)) == printed


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("21d", "write '504h'"),
        ("2 weeks", "write '336h'"),
        ("30", "lacks a unit"),
        ("", "write it like '30s'"),
        ("-", "write it like '30s'"),
        (".s", "write it like '30s'"),
        ("soon", "write it like '30s'"),
        ("1.5.5s", "lacks a unit"),
        ("5 s", "' s' in '5 s' is no unit"),
        ("1H", "'H' in '1H' is no unit"),
        ("1e3s", "'e' in '1e3s' is no unit"),
        ("2562048h", "longer than 292 years"),
        ("9" * 500 + "h", "too long"),
    ],
)
def test_what_is_no_duration_is_refused_with_advice(text: str, advice: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        durations.parse(text)

    assert advice in caught.value.message


@given(st.integers(min_value=-(2**50), max_value=2**50))
def test_every_duration_reads_back_as_it_was_printed(nanoseconds: int) -> None:
    printed = durations.format(nanoseconds / 1e9)

    assert durations.parse_nanoseconds(printed) == nanoseconds
