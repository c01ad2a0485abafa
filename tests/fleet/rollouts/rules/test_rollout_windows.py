"""Windows: five fields, a time zone, a duration."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from fleetplane.fleet.rollouts.rules.policy import Window, opens_at_ns
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values.times import NS, spelled


def at(text: str) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * NS


def opens(cron: str, now: str, *, hours: float = 1.0, zone: str = "UTC") -> str:
    window = Window(cron=cron, duration_seconds=hours * 3600, time_zone=zone)
    window.check("windows[0]")
    found = opens_at_ns([window], at(now))
    assert found is not None
    return "open" if found == at(now) else spelled(found)


@pytest.mark.parametrize(
    ("cron", "now", "found"),
    [
        ("0 2 * * *", "2026-03-04T02:30:00", "open"),
        ("0 2 * * *", "2026-03-04T03:00:00", "2026-03-05T02:00:00Z"),
        ("*/15 9-10 * * mon-fri", "2026-03-07T09:30:00", "2026-03-09T09:00:00Z"),
        ("30 4 1,15 * *", "2026-03-02T00:00:00", "2026-03-15T04:30:00Z"),
        ("0 0 13 * fri", "2026-03-07T12:00:00", "2026-03-13T00:00:00Z"),
        ("0 0 29 2 *", "2026-03-07T12:00:00", "2028-02-29T00:00:00Z"),
        ("0 12 * jan sun", "2026-03-07T12:00:00", "2027-01-03T12:00:00Z"),
        ("0 12 * * 7", "2026-03-07T12:00:00", "2026-03-08T12:00:00Z"),
    ],
)
def test_when_a_window_opens(cron: str, now: str, found: str) -> None:
    assert opens(cron, now) == found


def test_a_window_that_began_yesterday_is_still_open() -> None:
    assert opens("0 22 * * *", "2026-03-05T03:59:00", hours=6.0) == "open"
    assert opens("0 22 * * *", "2026-03-05T04:00:00", hours=6.0) == "2026-03-05T22:00:00Z"


def test_an_hour_that_the_clock_skips_opens_nothing_and_one_that_it_repeats_opens_once() -> None:
    berlin = "Europe/Berlin"
    assert opens("30 2 * * *", "2026-03-28T12:00:00", zone=berlin) == "2026-03-30T00:30:00Z"
    assert opens("30 2 * * *", "2026-10-24T12:00:00", zone=berlin) == "2026-10-25T00:30:00Z"
    assert opens("30 2 * * *", "2026-10-25T01:40:00", zone=berlin) == "2026-10-26T01:30:00Z"


@pytest.mark.parametrize(
    ("cron", "seconds", "zone", "field"),
    [
        ("0 2 * *", 60, "UTC", "cron"),
        ("60 2 * * *", 60, "UTC", "cron"),
        ("0 5-2 * * *", 60, "UTC", "cron"),
        ("*/0 2 * * *", 60, "UTC", "cron"),
        ("0 2 30 2 *", 60, "UTC", "cron"),
        ("0 2 * * someday", 60, "UTC", "cron"),
        ("@daily", 60, "UTC", "cron"),
        ("0 2 * * *", 59, "UTC", "duration_seconds"),
        ("0 2 * * *", 60, "Mars/Olympus", "time_zone"),
        ("0 2 * * *", 60, "../../etc/passwd", "time_zone"),
        ("0 2 * * *", 60, "", "time_zone"),
    ],
)
def test_a_window_that_cannot_be_read_is_refused(cron: str, seconds: float, zone: str, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Window(cron=cron, duration_seconds=seconds, time_zone=zone).check("windows[0]")
    assert caught.value.field == f"windows[0].{field}"
