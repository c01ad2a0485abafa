"""Telemetry moves from a file to PostgreSQL and back, and tells the same afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.shared.postgres_server import PostgresServer
from support.shared.telemetry_place import DAY, NOW, TelemetryPlace, asked, line, point

from fleetplane.kernel.telemetry import LogRecord, Telemetry
from fleetplane.kernel.telemetry.postgres import copying
from fleetplane.sim.clock import VirtualClock

LATER = VirtualClock(start_ns=NOW + DAY)
OLDEST = NOW - 34 * DAY
WINDOW: Any = {"from_ns": NOW - 40 * DAY, "to_ns": NOW + 2 * DAY}


class Counting:
    """Counts lines by subject."""

    stream = "access"
    kinds = ("access",)

    def digest(self, lines: Sequence[LogRecord]) -> Mapping[tuple[str, str], bytes]:
        return {("access", lines[0].subject): b"%d" % len(lines)}

    def merged(self, bodies: Sequence[bytes]) -> bytes:
        return b"%d" % sum(map(int, bodies))


async def fill(place: TelemetryPlace) -> None:
    async with place.opened() as telemetry:
        telemetry.summarize(Counting())
        telemetry.offer(
            points=[
                *(point(value, at=at - 86_400, counter=True) for at, value in enumerate((5, 9, 2, 4))),
                *(point(number, at=-number * 3_600, source="two") for number in range(60)),
            ],
            lines=[
                line(number, at=-number * 1_800, code=200 + number, subject="h\0", action="GET")
                for number in range(100)
            ],
        )
        await telemetry.flush()
        await telemetry.sweep()
    async with place.opened(LATER) as telemetry:  # what is not folded yet
        telemetry.summarize(Counting())
        telemetry.offer(lines=[line(500, at=86_000, subject="late"), line(501, scope="org/b")])


async def told(telemetry: Telemetry) -> Sequence[Any]:
    """Everything that can be asked."""
    page = await telemetry.lines(asked(limit=1000, **WINDOW))
    elsewhere = await telemetry.lines(asked(scope="org/b", **WINDOW))
    summaries = await telemetry.summaries("org/a", "access", step_seconds=3600, **WINDOW)
    return (
        await telemetry.latest("org/a", "load", count=500, **WINDOW),
        await telemetry.growth("org/a", "load", sources=["one"], **WINDOW),
        await telemetry.buckets("org/a", "load", width_ns=DAY, **WINDOW),
        sorted((one.at_ns, one.source, one.body) for one in page.lines),
        elsewhere.total,
        sorted(
            (one.width_seconds, one.at_seconds, one.subject.replace("\0", "\ufffd"), one.body)
            for one in summaries
        ),
    )


async def test_a_file_moves_in_even_if_it_was_interrupted_and_goes_on_where_it_was(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    file = TelemetryPlace(path=tmp_path / "telemetry.db")
    shared = TelemetryPlace(path=tmp_path / "unused.db", url=postgres.database())
    await fill(file)
    async with file.opened(LATER) as telemetry:
        before = await told(telemetry)
        rows = 64 + 102

    moving = asyncio.create_task(copying.move_in(file.path, shared.url, oldest_ns=OLDEST))
    await asyncio.wait([moving], timeout=0.05)
    moving.cancel()
    await asyncio.wait([moving])
    assert await copying.move_in(file.path, shared.url, oldest_ns=OLDEST) == rows
    assert await copying.move_in(file.path, shared.url, oldest_ns=OLDEST) == rows

    async with shared.opened(LATER) as telemetry:
        telemetry.summarize(Counting())
        assert await told(telemetry) == before
        telemetry.offer(points=[point(6, at=100, counter=True)], lines=[line(0, subject="h\0")])
        await telemetry.flush()
        assert (telemetry.statistics().written, telemetry.statistics().ignored) == (1, 1)
        grown = await telemetry.growth("org/a", "load", sources=["one"], **WINDOW)
        assert grown == {"one": before[1]["one"] + 2}
        await telemetry.sweep()
        found = await telemetry.summaries("org/a", "access", step_seconds=86_400, **WINDOW)
        assert sum(int(one.body) for one in found) == 101, "each line once, also after folding"


async def test_what_is_in_postgresql_is_written_to_a_file_and_put_back_in_its_place(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    shared = TelemetryPlace(path=tmp_path / "unused.db", url=postgres.database())
    copy = TelemetryPlace(path=tmp_path / "copy.db")
    assert not await copying.export(shared.url, copy.path), "no server has used it"
    assert not copy.path.exists()
    await fill(shared)
    async with shared.opened(LATER) as telemetry:
        before = await told(telemetry)
        assert await copying.export(shared.url, copy.path), "while it is in use"
    async with copy.opened(LATER) as telemetry:
        assert await told(telemetry) == before
        assert telemetry.statistics().series == 2
    async with shared.opened(LATER) as telemetry:
        telemetry.offer(points=[point(1, series="later")])
        await telemetry.flush()
        await copying.move_in(copy.path, shared.url, oldest_ns=OLDEST, replace=True)
        assert await told(telemetry) == before
        assert await telemetry.latest("org/a", "later", **WINDOW) == {}
        telemetry.offer(points=[point(7, at=200, counter=True)])  # a server that runs notices
        await telemetry.flush()
        assert (await telemetry.latest("org/a", "load", **WINDOW))["one"][0].value == 7 + 9
