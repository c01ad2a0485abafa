"""What telemetry promises: nothing waits for it, what it took it can tell, and it stays within its bounds."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from fleetplane.kernel.errors import IntegrityError, InvalidArgument, Unavailable
from fleetplane.kernel.telemetry import Line, LineQuery, Point, Telemetry, TelemetryLimits
from fleetplane.kernel.telemetry import reading as reading_module
from fleetplane.kernel.telemetry.metrics import TelemetryCollector
from fleetplane.sim.clock import VirtualClock

SECOND = 1_000_000_000
DAY = 86_400 * SECOND
CLOCK = VirtualClock()
NOW = CLOCK.now_ns()


def point(value: float, *, at: float = 0, **about: Any) -> Point:
    given = {"scope": "org/a", "series": "load", "source": "one", **about}
    return Point(at_ns=NOW + round(at * SECOND), value=value, **given)


def line(number: int, *, at: float = 0, **about: Any) -> Line:
    given = {"scope": "org/a", "stream": "access", "source": "one", "body": b"%d" % number, **about}
    return Line(at_ns=NOW + round(at * SECOND), identity=given.pop("identity", f"line-{number}"), **given)


def asked(**about: Any) -> LineQuery:
    given = {"scope": "org/a", "stream": "access", "limit": 100, "from_ns": 0, "to_ns": NOW + DAY, **about}
    return LineQuery(**given)


@asynccontextmanager
async def opened(folder: Path, **limits: Any) -> AsyncIterator[Telemetry]:
    async with Telemetry.open(
        folder / "telemetry.db", VirtualClock(), limits=TelemetryLimits(**limits)
    ) as it:
        yield it


async def bodies(telemetry: Telemetry, **about: Any) -> list[int]:
    await telemetry.flush()
    return [int(found.body) for found in (await telemetry.lines(asked(**about))).lines]


async def growth(telemetry: Telemetry, start: float, stop: float) -> dict[str, float]:
    await telemetry.flush()
    from_ns, to_ns = NOW + round(start * SECOND), NOW + round(stop * SECOND)
    return dict(await telemetry.growth("org/a", "load", from_ns=from_ns, to_ns=to_ns))


# Numbers.


async def test_buckets_hold_what_all_sources_said_in_each_stretch(tmp_path: Path) -> None:
    async with opened(tmp_path) as telemetry:
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


async def test_a_counters_growth_is_counted_over_restarts(tmp_path: Path) -> None:
    async with opened(tmp_path) as telemetry:
        for at, value in enumerate((100, 110, 5, 25, 1)):
            telemetry.offer(points=[point(value, at=at, counter=True)])
        assert await growth(telemetry, 0, 60) == {"one": 10 + 5 + 20 + 1}
        assert await growth(telemetry, 2, 4) == {"one": 5 + 20}, "the point before the stretch counts"
        assert await growth(telemetry, 5, 60) == {}


async def test_a_counter_goes_on_where_it_stood_when_the_file_is_opened_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as telemetry:
        telemetry.offer(points=[point(50, at=0, counter=True), point(10, at=1, counter=True)])
    async with opened(tmp_path) as telemetry:
        telemetry.offer(points=[point(30, at=2, counter=True), point(4, at=3, counter=True)])
        assert await growth(telemetry, 0, 60) == {"one": 10 + 20 + 4}


async def test_counters_that_are_sent_again_are_counted_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as telemetry:
        batch = [point(1, at=0, counter=True), point(9, at=1, counter=True)]
        telemetry.offer(points=batch)
        telemetry.offer(points=batch)
        assert await growth(telemetry, 0, 60) == {"one": 8}
        assert (telemetry.statistics().written, telemetry.statistics().ignored) == (2, 2)


async def test_the_latest_points_come_newest_first_and_by_source(tmp_path: Path) -> None:
    async with opened(tmp_path) as telemetry:
        telemetry.offer(points=[point(at, at=at) for at in range(5)] + [point(7, at=-100, source="two")])
        await telemetry.flush()
        found = await telemetry.latest("org/a", "load", from_ns=NOW - SECOND, to_ns=NOW + 4 * SECOND, count=2)
        assert {source: [one.value for one in rows] for source, rows in found.items()} == {"one": [3, 2]}


async def test_too_many_buckets_are_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as telemetry:
        with pytest.raises(InvalidArgument):
            await telemetry.buckets("org/a", "load", from_ns=0, to_ns=NOW, width_ns=SECOND)


# Lines.


async def test_lines_are_found_by_each_of_their_fields(tmp_path: Path) -> None:
    async with opened(tmp_path) as telemetry:
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


async def test_pages_meet_without_gap_or_overlap_while_lines_are_added(tmp_path: Path) -> None:
    async with opened(tmp_path) as telemetry:
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
async def test_a_cursor_of_nobodys_is_refused(tmp_path: Path, cursor: str) -> None:
    async with opened(tmp_path) as telemetry:
        with pytest.raises(InvalidArgument) as caught:
            await telemetry.lines(asked(cursor=cursor))
        assert caught.value.field == "cursor"


async def test_a_line_that_is_sent_again_is_kept_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as telemetry:
        telemetry.offer(lines=[line(1), line(2)])
        telemetry.offer(lines=[line(1), line(2), line(1, source="two")])
        assert sorted(await bodies(telemetry)) == [1, 1, 2]


# Bounds.


async def test_what_does_not_fit_the_queue_is_refused_and_counted(tmp_path: Path) -> None:
    async with opened(tmp_path, queue_rows=3, queue_bytes=10) as telemetry:
        assert not telemetry.offer(points=[point(at, at=at) for at in range(4)])
        assert not telemetry.offer(lines=[line(1, body=b"x" * 11)])
        assert telemetry.offer(points=[point(at, at=at) for at in range(3)])
        assert not telemetry.offer(points=[point(9, at=9)])
        assert telemetry.statistics().refused == 6
        await telemetry.flush()
        assert telemetry.offer(points=[point(9, at=9)]), "there is room again"


async def test_rows_that_make_no_sense_do_not_cost_their_neighbours(tmp_path: Path) -> None:
    async with opened(tmp_path) as telemetry:
        telemetry.offer(
            points=[point(math.nan), point(math.inf), point(1, at=1e10), point(4)],
            lines=[line(1, body=b"x" * 70_000), line(2, code=-1), line(3)],
        )
        assert await bodies(telemetry) == [3]
        numbers = telemetry.statistics()
        assert (numbers.written, numbers.unsound, numbers.lost) == (2, 5, 0)


async def test_series_beyond_the_bound_are_ignored(tmp_path: Path) -> None:
    async with opened(tmp_path, series=2) as telemetry:
        telemetry.offer(points=[point(1, source=f"source-{number}") for number in range(5)])
        await telemetry.flush()
        assert (telemetry.statistics().series, telemetry.statistics().over_quota) == (2, 3)


async def test_what_is_too_old_is_deleted_with_the_names_nobody_uses_any_more(tmp_path: Path) -> None:
    async with opened(tmp_path, points_age_seconds=100.0, lines_age_seconds=50.0) as telemetry:
        telemetry.offer(
            points=[point(1, at=-101, source="gone"), point(2, at=-101), point(3, at=-99)],
            lines=[line(1, at=-51), line(2, at=-49)],
        )
        await telemetry.flush()
        assert await telemetry.sweep() == 3
        assert await bodies(telemetry) == [2]
        assert telemetry.statistics().series == 1
        telemetry.offer(points=[point(5, source="gone")])
        await telemetry.flush()
        assert set(await telemetry.latest("org/a", "load", from_ns=0, to_ns=NOW + DAY)) == {"one", "gone"}


async def test_old_rows_are_deleted_as_time_passes(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with Telemetry.open(
        tmp_path / "t.db", clock, limits=TelemetryLimits(lines_age_seconds=30)
    ) as telemetry:
        telemetry.offer(lines=[line(1)])
        await telemetry.flush()
        await clock.advance(61)
        async with asyncio.timeout(60):
            while telemetry.statistics().expired == 0:
                await asyncio.sleep(0.005)
        assert await bodies(telemetry) == []


async def test_when_there_is_too_much_the_oldest_lines_go_first(tmp_path: Path) -> None:
    async with opened(tmp_path, size_bytes=4 << 20) as telemetry:
        for start in range(0, 30_000, 5_000):
            telemetry.offer(
                lines=[line(n, at=n / 1000, body=b"%0300d" % n) for n in range(start, start + 5_000)]
            )
            telemetry.offer(points=[point(start, at=start)])
            await telemetry.flush()
        expired = await telemetry.sweep()
        assert expired in (20_000, 30_000)
        assert telemetry.statistics().used_bytes <= 4 << 20
        kept = (await telemetry.lines(asked(limit=1))).total
        assert kept == 30_000 - expired
        (held,) = (await telemetry.latest("org/a", "load", from_ns=0, to_ns=NOW + DAY, count=100)).values()
        assert len(held) == 6


async def test_points_give_way_too_when_there_are_no_lines_left(tmp_path: Path) -> None:
    async with opened(tmp_path, size_bytes=1 << 20, points_age_seconds=80_000.0) as telemetry:
        for first in (0, 39_500):
            assert telemetry.offer(points=[point(n, at=n - 79_000) for n in range(first, first + 39_500)])
            await telemetry.flush()
        assert await telemetry.sweep() > 0
        assert telemetry.statistics().used_bytes <= 1 << 20
        found = await telemetry.latest("org/a", "load", from_ns=0, to_ns=NOW + DAY)
        assert found["one"][0].value == 78_999


# Trouble.


async def test_a_question_that_takes_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as telemetry:
        telemetry.offer(lines=[line(number) for number in range(5_000)])
        await telemetry.flush()
        monkeypatch.setattr(reading_module, "PATIENCE_SECONDS", -1.0)
        with pytest.raises(Unavailable, match="too long"):
            await telemetry.lines(asked())
        monkeypatch.undo()
        assert len(await bodies(telemetry)) == 100


async def test_a_batch_that_cannot_be_written_is_counted_and_the_next_goes_through(tmp_path: Path) -> None:
    async with opened(tmp_path) as telemetry:
        telemetry.offer(points=[point(1, at=0), point(1, source="\ud800")])  # no encoding has this
        await telemetry.flush()
        assert telemetry.statistics().lost == 2
        telemetry.offer(points=[point(2, at=1)])
        await telemetry.flush()
        assert telemetry.statistics().written == 1


async def test_what_was_taken_is_written_before_it_closes_and_nothing_is_taken_after(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    async with opened(tmp_path) as telemetry:
        telemetry.offer(lines=[line(number) for number in range(1_000)])
    assert not telemetry.offer(points=[point(1)])
    with pytest.raises(Unavailable):
        await telemetry.lines(asked())
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert [name for name in left if not name.startswith("asyncio_")] == [], "but for the loop's own"
    async with opened(tmp_path) as telemetry:
        assert (await telemetry.lines(asked())).total == 1_000


async def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.db"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE mine (x)")
    other.close()
    with pytest.raises(IntegrityError, match="something else"):
        async with opened(tmp_path):
            pass
    path.write_bytes(b"not a database, but long enough to be taken for one" * 100)
    with pytest.raises(IntegrityError, match="damaged"):
        async with opened(tmp_path):
            pass


async def test_its_numbers_are_shown_to_prometheus(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    async with opened(tmp_path) as telemetry:
        registry.register(TelemetryCollector(telemetry))
        telemetry.offer(points=[point(1), point(math.nan)])
        await telemetry.flush()
        text = generate_latest(registry).decode()
    assert "fleetplane_telemetry_written_total 1.0" in text
    assert "fleetplane_telemetry_unsound_total 1.0" in text
    assert "fleetplane_telemetry_series 1.0" in text


async def test_a_full_disk_costs_the_batch_and_nothing_else(tmp_path: Path) -> None:
    async with opened(tmp_path) as telemetry:
        telemetry.offer(lines=[line(1)])
        await telemetry.flush()
        held = telemetry._writer._connection
        held.execute("PRAGMA max_page_count = 20")  # SQLite then says what it says of a full disk
        telemetry.offer(lines=[line(n, body=b"x" * 50_000) for n in range(10, 14)])
        await telemetry.flush()
        assert telemetry.statistics().lost == 4
        assert await bodies(telemetry) == [1]
        held.execute("PRAGMA max_page_count = 100000")
        telemetry.offer(lines=[line(2, at=1)])
        assert await bodies(telemetry) == [2, 1]
