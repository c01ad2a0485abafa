"""What telemetry promises: nothing waits for it, what it took it can tell, and it stays within its bounds."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from support.shared.telemetry_place import (
    DAY,
    NOW,
    SECOND,
    TelemetryPlace,
    asked,
    bodies,
    line,
    point,
)

from fleetplane.kernel.errors import InvalidArgument, Unavailable
from fleetplane.kernel.telemetry import Telemetry
from fleetplane.kernel.telemetry.telemetry import TelemetryCollector
from fleetplane.sim.clock import VirtualClock


async def growth(telemetry: Telemetry, start: float, stop: float) -> dict[str, float]:
    await telemetry.flush()
    from_ns, to_ns = NOW + round(start * SECOND), NOW + round(stop * SECOND)
    return dict(await telemetry.growth("org/a", "load", from_ns=from_ns, to_ns=to_ns))


# Numbers.


async def test_buckets_hold_what_all_sources_said_in_each_stretch(telemetry_place: TelemetryPlace) -> None:
    async with telemetry_place.opened() as telemetry:
        said = [point(1, at=0), point(3, at=9), point(5, at=10), point(7, at=5, source="two")]
        assert telemetry.offer(points=[*said, point(99, at=1, scope="org/b"), point(99, at=60)])
        await telemetry.flush()
        found = await telemetry.buckets(
            "org/a", "load", from_ns=NOW, to_ns=NOW + 60 * SECOND, width_ns=10 * SECOND
        )
        assert [(one.at_ns - NOW) // SECOND for one in found] == [0, 10]
        assert [(one.count, one.total, one.lowest, one.highest) for one in found] == [
            (3, 11, 1, 7),
            (1, 5, 5, 5),
        ]
        assert found[0].average == pytest.approx(11 / 3)
        only = await telemetry.buckets(
            "org/a", "load", from_ns=NOW, to_ns=NOW + DAY, width_ns=DAY, sources=["two"]
        )
        assert [one.total for one in only] == [7]


async def test_a_counters_growth_is_counted_over_restarts(telemetry_place: TelemetryPlace) -> None:
    async with telemetry_place.opened() as telemetry:
        for at, value in enumerate((100, 110, 5, 25, 1)):
            telemetry.offer(points=[point(value, at=at, counter=True)])
        assert await growth(telemetry, 0, 60) == {"one": 10 + 5 + 20 + 1}
        assert await growth(telemetry, 2, 4) == {"one": 5 + 20}, "the point before the stretch counts"
        assert await growth(telemetry, 5, 60) == {}


async def test_a_counter_goes_on_where_it_stood_when_the_file_is_opened_again(
    telemetry_place: TelemetryPlace,
) -> None:
    async with telemetry_place.opened() as telemetry:
        telemetry.offer(points=[point(50, at=0, counter=True), point(10, at=1, counter=True)])
    async with telemetry_place.opened() as telemetry:
        telemetry.offer(points=[point(30, at=2, counter=True), point(4, at=3, counter=True)])
        assert await growth(telemetry, 0, 60) == {"one": 10 + 20 + 4}


async def test_counters_that_are_sent_again_are_counted_once(telemetry_place: TelemetryPlace) -> None:
    async with telemetry_place.opened() as telemetry:
        batch = [point(1, at=0, counter=True), point(9, at=1, counter=True)]
        telemetry.offer(points=batch)
        telemetry.offer(points=batch)
        assert await growth(telemetry, 0, 60) == {"one": 8}
        assert (telemetry.statistics().written, telemetry.statistics().ignored) == (2, 2)


async def test_the_latest_points_come_newest_first_and_by_source(telemetry_place: TelemetryPlace) -> None:
    async with telemetry_place.opened() as telemetry:
        telemetry.offer(points=[point(at, at=at) for at in range(5)] + [point(7, at=-100, source="two")])
        await telemetry.flush()
        found = await telemetry.latest("org/a", "load", from_ns=NOW - SECOND, to_ns=NOW + 4 * SECOND, count=2)
        assert {source: [one.value for one in rows] for source, rows in found.items()} == {"one": [3, 2]}


async def test_too_many_buckets_are_refused(telemetry_place: TelemetryPlace) -> None:
    async with telemetry_place.opened() as telemetry:
        with pytest.raises(InvalidArgument):
            await telemetry.buckets("org/a", "load", from_ns=0, to_ns=NOW, width_ns=SECOND)


# Lines.


async def test_lines_are_found_by_each_of_their_fields(telemetry_place: TelemetryPlace) -> None:
    async with telemetry_place.opened() as telemetry:
        telemetry.offer(
            lines=[
                line(1, at=1, code=200, subject="a.test", action="GET"),
                line(2, at=2, code=404, subject="b.test", action="GET"),
                line(3, at=3, code=503, subject="a.test", action="POST", source="two"),
                line(4, at=4, scope="org/b"),
                line(5, at=5, stream="error"),
            ]
        )
        assert await bodies(telemetry) == [3, 2, 1]
        assert await bodies(telemetry, code_low=400, code_high=499) == [2]
        assert await bodies(telemetry, subject="a.test") == [3, 1]
        assert await bodies(telemetry, action="POST") == [3]
        assert await bodies(telemetry, source="one", subject="a.test") == [1]
        assert await bodies(telemetry, from_ns=NOW + SECOND, to_ns=NOW + 3 * SECOND) == [2, 1]
        assert await bodies(telemetry, scope="org/b") == [4]
        assert await bodies(telemetry, scope="org/c") == []
        assert await bodies(telemetry, to_ns=1 << 80) == [3, 2, 1]


async def test_pages_meet_without_gap_or_overlap_while_lines_are_added(
    telemetry_place: TelemetryPlace,
) -> None:
    async with telemetry_place.opened() as telemetry:
        telemetry.offer(lines=[line(number, at=number // 3) for number in range(25)])
        await telemetry.flush()
        seen: list[int] = []
        cursor = ""
        while True:
            page = await telemetry.lines(asked(limit=4, cursor=cursor))
            seen += [int(found.body) for found in page.lines]
            telemetry.offer(lines=[line(100 + len(seen), at=500)])
            await telemetry.flush()
            if not (cursor := page.cursor):
                break
        assert sorted(seen) == list(range(25))
        assert page.total > 25, "the total is of all matches"


@pytest.mark.parametrize("cursor", ["x", "1", "1.", "9" * 19 + ".1", "1." + "9" * 19, "1.-2"])
async def test_a_cursor_of_nobodys_is_refused(telemetry_place: TelemetryPlace, cursor: str) -> None:
    async with telemetry_place.opened() as telemetry:
        with pytest.raises(InvalidArgument) as caught:
            await telemetry.lines(asked(cursor=cursor))
        assert caught.value.field == "cursor"


async def test_a_line_that_is_sent_again_is_kept_once(telemetry_place: TelemetryPlace) -> None:
    async with telemetry_place.opened() as telemetry:
        telemetry.offer(lines=[line(1), line(2)])
        telemetry.offer(lines=[line(1), line(2), line(1, source="two")])
        assert sorted(await bodies(telemetry)) == [1, 1, 2]


# Bounds.


async def test_what_does_not_fit_the_queue_is_refused_and_counted(telemetry_place: TelemetryPlace) -> None:
    async with telemetry_place.opened(queue_rows=3, queue_bytes=10) as telemetry:
        assert not telemetry.offer(points=[point(at, at=at) for at in range(4)])
        assert not telemetry.offer(lines=[line(1, body=b"x" * 11)])
        assert telemetry.offer(points=[point(at, at=at) for at in range(3)])
        assert not telemetry.offer(points=[point(9, at=9)])
        assert telemetry.statistics().refused == 6
        await telemetry.flush()
        assert telemetry.offer(points=[point(9, at=9)]), "there is room again"


async def test_rows_that_make_no_sense_do_not_cost_their_neighbours(telemetry_place: TelemetryPlace) -> None:
    async with telemetry_place.opened() as telemetry:
        telemetry.offer(
            points=[point(math.nan), point(math.inf), point(1, at=1e10), point(4)],
            lines=[line(1, body=b"x" * 70_000), line(2, code=-1), line(3)],
        )
        assert await bodies(telemetry) == [3]
        numbers = telemetry.statistics()
        assert (numbers.written, numbers.unsound, numbers.lost) == (2, 5, 0)


async def test_series_beyond_the_bound_are_ignored(telemetry_place: TelemetryPlace) -> None:
    async with telemetry_place.opened(series=2) as telemetry:
        telemetry.offer(points=[point(1, source=f"source-{number}") for number in range(5)])
        await telemetry.flush()
        assert (telemetry.statistics().series, telemetry.statistics().over_quota) == (2, 3)


async def test_what_is_too_old_is_deleted_with_the_names_nobody_uses_any_more(
    telemetry_place: TelemetryPlace,
) -> None:
    kept: dict[str, Any] = {"points_age_seconds": 5 * 86_400.0, "lines_age_seconds": 3 * 86_400.0}
    async with telemetry_place.opened(**kept) as telemetry:
        telemetry.offer(
            points=[point(1, source="gone"), point(2)],
            lines=[line(1), line(2, at=-86_400)],
        )
        await telemetry.flush()
    later = VirtualClock(start_ns=NOW + 3 * DAY)
    async with telemetry_place.opened(later, **kept) as telemetry:
        telemetry.offer(points=[point(3, at=3 * 86_400)], lines=[line(3, at=3 * 86_400)])
        await telemetry.flush()
        assert await telemetry.sweep() == 1, "a line of four days ago"
        assert sorted(await bodies(telemetry, to_ns=NOW + 9 * DAY)) == [1, 3]
    later = VirtualClock(start_ns=NOW + 7 * DAY)
    async with telemetry_place.opened(later, **kept) as telemetry:
        assert await telemetry.sweep() == 4
        assert await bodies(telemetry, to_ns=NOW + 9 * DAY) == []
        assert telemetry.statistics().series == 1
        telemetry.offer(points=[point(5, at=7 * 86_400, source="gone")])
        await telemetry.flush()
        assert set(await telemetry.latest("org/a", "load", from_ns=0, to_ns=NOW + 9 * DAY)) == {"one", "gone"}


async def test_rows_of_another_time_are_left_out_and_counted(telemetry_place: TelemetryPlace) -> None:
    day = 86_400
    async with telemetry_place.opened() as telemetry:
        assert telemetry.offer(
            points=[point(1, at=-36 * day), point(2, at=-34 * day), point(3, at=2 * day), point(4)],
            lines=[line(1, at=-36 * day), line(2, at=2 * day), line(3, at=day - 1)],
        )
        assert await bodies(telemetry, to_ns=NOW + 9 * DAY) == [3]
        (found,) = (await telemetry.latest("org/a", "load", from_ns=0, to_ns=NOW + 9 * DAY, count=9)).values()
        assert [one.value for one in found] == [4, 2]
        numbers = telemetry.statistics()
        assert (numbers.written, numbers.unsound, numbers.expired, numbers.lost) == (3, 2, 2, 0)


async def test_names_that_are_too_long_do_not_cost_their_neighbours(telemetry_place: TelemetryPlace) -> None:
    async with telemetry_place.opened() as telemetry:
        telemetry.offer(
            points=[point(1, series="\u20ac" * 601), point(2, series="\u20ac" * 580), point(3)],
            lines=[line(1, source="x" * 700), line(2, subject="h" * 9_000), line(3, source="a\0b")],
        )
        assert sorted(await bodies(telemetry)) == [2, 3]
        assert len(await bodies(telemetry, source="a\0b")) == 1
        numbers = telemetry.statistics()
        assert (numbers.written, numbers.unsound, numbers.lost) == (4, 2, 0)


async def test_old_rows_are_deleted_as_time_passes(telemetry_place: TelemetryPlace) -> None:
    clock = VirtualClock()
    async with telemetry_place.opened(clock, lines_age_seconds=86_400.0) as telemetry:
        telemetry.offer(lines=[line(1)])
        await telemetry.flush()
        await clock.advance(3 * 86_400)
        async with asyncio.timeout(60):
            while telemetry.statistics().expired == 0:
                await clock.advance(60)  # until the next sweep, should one have begun before
                await asyncio.sleep(0.005)
        assert await bodies(telemetry) == []


async def test_when_there_is_too_much_the_oldest_lines_go_first(telemetry_place: TelemetryPlace) -> None:
    async with telemetry_place.opened(size_bytes=4 << 20) as telemetry:
        for start in range(0, 30_000, 5_000):
            telemetry.offer(
                lines=[line(n, at=n / 1000, body=b"%0300d" % n) for n in range(start, start + 5_000)]
            )
            telemetry.offer(points=[point(start, at=start)])
            await telemetry.flush()
        expired = await telemetry.sweep()
        assert 0 < expired < 30_000
        assert telemetry.statistics().used_bytes <= 4 << 20
        kept = (await telemetry.lines(asked(limit=1))).total
        assert kept == 30_000 - expired
        (held,) = (await telemetry.latest("org/a", "load", from_ns=0, to_ns=NOW + DAY, count=100)).values()
        assert len(held) == 6


async def test_points_give_way_too_when_there_are_no_lines_left(telemetry_place: TelemetryPlace) -> None:
    async with telemetry_place.opened(size_bytes=1 << 20, points_age_seconds=80_000.0) as telemetry:
        for first in (0, 39_500):
            assert telemetry.offer(points=[point(n, at=n - 79_000) for n in range(first, first + 39_500)])
            await telemetry.flush()
        assert await telemetry.sweep() > 0
        assert telemetry.statistics().used_bytes <= 1 << 20
        found = await telemetry.latest("org/a", "load", from_ns=0, to_ns=NOW + DAY)
        assert found["one"][0].value == 78_999


# Trouble.


async def test_a_batch_that_cannot_be_written_is_counted_and_the_next_goes_through(
    telemetry_place: TelemetryPlace,
) -> None:
    async with telemetry_place.opened() as telemetry:
        telemetry.offer(points=[point(1, at=0), point(1, source="\ud800")])  # no encoding has this
        await telemetry.flush()
        assert telemetry.statistics().lost == 2
        telemetry.offer(points=[point(2, at=1)])
        await telemetry.flush()
        assert telemetry.statistics().written == 1


async def test_what_was_taken_is_written_before_it_closes_and_nothing_is_taken_after(
    telemetry_place: TelemetryPlace,
) -> None:
    before = set(threading.enumerate())
    async with telemetry_place.opened() as telemetry:
        telemetry.offer(lines=[line(number) for number in range(1_000)])
    assert not telemetry.offer(points=[point(1)])
    with pytest.raises(Unavailable):
        await telemetry.lines(asked())
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert [name for name in left if not name.startswith("asyncio_")] == [], "but for the loop's own"
    async with telemetry_place.opened() as telemetry:
        assert (await telemetry.lines(asked())).total == 1_000


async def test_its_numbers_are_shown_to_prometheus(telemetry_place: TelemetryPlace) -> None:
    registry = CollectorRegistry()
    async with telemetry_place.opened() as telemetry:
        registry.register(TelemetryCollector(telemetry))
        telemetry.offer(points=[point(1), point(math.nan)])
        await telemetry.flush()
        text = generate_latest(registry).decode()
    assert "fleetplane_telemetry_written_total 1.0" in text
    assert "fleetplane_telemetry_unsound_total 1.0" in text
    assert "fleetplane_telemetry_series 1.0" in text
