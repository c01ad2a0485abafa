"""A noisy neighbour in telemetry: what one board or tenant can take from the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import structlog.testing
from prometheus_client import CollectorRegistry, generate_latest
from support.shared.telemetry_place import TelemetryPlace

from fleetplane.kernel.telemetry import LineQuery, LogRecord, Point, Telemetry
from fleetplane.kernel.telemetry.fair_queue import FLOOR_ROWS, FairLineQueue
from fleetplane.kernel.telemetry.sqlite import database
from fleetplane.kernel.telemetry.telemetry import TelemetryCollector
from fleetplane.sim.clock import VirtualClock

SECOND = 1_000_000_000
NOW = VirtualClock().now_ns()


def point(series: str, source: str, *, scope: str = "boards", at: int = 0, value: float = 1.0) -> Point:
    return Point(scope=scope, series=series, source=source, at_ns=NOW + at * SECOND, value=value)


def line(number: int, source: str, *, scope: str, size: int = 400) -> LogRecord:
    body = (b"%d " % number).ljust(size, b"x")
    return LogRecord(
        scope=scope, stream="access", source=source, at_ns=NOW + number, identity=str(number), body=body
    )


async def kept(telemetry: Telemetry, source: str, series: str, *, scope: str = "boards") -> bool:
    await telemetry.flush()
    found = await telemetry.latest(scope, series, from_ns=0, to_ns=NOW + 10_000 * SECOND, sources=[source])
    return source in found


async def flood(telemetry: Telemetry, source: str, series: int, *, scope: str = "boards") -> None:
    for first in range(0, series, 500):
        telemetry.offer(points=[point(f"junk/{first + n}", source, scope=scope) for n in range(500)])
        await telemetry.flush()


async def test_one_board_has_a_quota_of_series_and_a_new_board_is_heard(
    telemetry_place: TelemetryPlace,
) -> None:
    with structlog.testing.capture_logs() as logs:
        async with telemetry_place.opened(series=4_000, source_series=1_000) as telemetry:
            await flood(telemetry, "noisy", 8_000)
            telemetry.offer(points=[point("cpu_usage", "new")])
            assert await kept(telemetry, "new", "cpu_usage")
            numbers = telemetry.statistics()
            assert (numbers.series, numbers.over_quota) == (1_001, 7_000)
            registry = CollectorRegistry()
            registry.register(TelemetryCollector(telemetry))
            assert b"fleetplane_telemetry_over_quota_total 7000.0" in generate_latest(registry)
    told = [(entry["event"], entry["quota"], entry.get("source")) for entry in logs if "quota" in entry]
    assert told.index(("telemetry.quota_near", "source", "noisy")) < told.index(
        ("telemetry.quota_hit", "source", "noisy")
    ), "told before, and when it is hit"
    assert len(told) == len(set(told)), "and not for every point"


async def test_many_noisy_boards_give_way_to_one_that_has_little(telemetry_place: TelemetryPlace) -> None:
    async with telemetry_place.opened(series=2_000, source_series=1_000) as telemetry:
        for number in range(4):
            await flood(telemetry, f"noisy-{number}", 1_000)
        quiet = [f"cpu/{n}" for n in range(60)]
        telemetry.offer(points=[point(series, "quiet") for series in quiet])
        assert [series for series in quiet if not await kept(telemetry, "quiet", series)] == []
        numbers = telemetry.statistics()
        assert numbers.series <= 2_000
        assert numbers.evicted > 0


async def test_one_tenant_leaves_room_for_others(telemetry_place: TelemetryPlace) -> None:
    async with telemetry_place.opened(series=4_000, tenant_series=3_000, source_series=1_000) as telemetry:
        for number in range(5):
            await flood(telemetry, f"agent-{number}", 1_000, scope="org/loud/workspace/1")
        assert telemetry.statistics().series == 3_000
        telemetry.offer(points=[point("requests", "a", scope="org/quiet/workspace/1")])
        assert await kept(telemetry, "a", "requests", scope="org/quiet/workspace/1")


def test_a_full_queue_still_takes_from_those_who_have_nothing_waiting() -> None:
    queue = FairLineQueue(rows_limit=10_000, bytes_limit=10_000_000)
    sent = 0
    while queue.put([point(f"s/{sent + n}", "noisy", scope="org/loud") for n in range(500)]):
        sent += 500
    assert sent < 10_000, "one source does not fill it"
    assert queue.put([point(f"s/{n}", "quiet", scope="org/quiet") for n in range(FLOOR_ROWS)])
    assert queue.put([point("s", "other", scope="org/loud")]), "nor does it keep out its own neighbours"

    first = queue.take(100)
    assert {row.source for row in first} == {"noisy", "quiet", "other"}, "and nobody waits behind it"
    rows = [*first, *queue.take(10_000)]
    mine = [row.series for row in rows if isinstance(row, Point) and row.source == "noisy"]
    assert mine == [f"s/{n}" for n in range(sent)], "each source's own order is kept"
    assert len(queue) == 0


async def test_room_is_made_where_most_was_taken(telemetry_place: TelemetryPlace) -> None:
    async with telemetry_place.opened(size_bytes=4 << 20) as telemetry:
        for number in range(50):
            telemetry.offer(lines=[line(number, "a", scope="org/quiet")])
        await telemetry.flush()
        for first in range(0, 20_000, 500):
            batch = [line(first + n, "b", scope="org/loud") for n in range(500)]
            while not telemetry.offer(lines=batch):
                await telemetry.flush()
        await telemetry.flush()
        assert await telemetry.sweep() > 0
        assert telemetry.statistics().used_bytes <= 4 << 20

        quiet, loud = [
            await telemetry.lines(
                LineQuery(scope=scope, stream="access", from_ns=0, to_ns=NOW + SECOND, limit=100)
            )
            for scope in ("org/quiet", "org/loud")
        ]
        assert quiet.total == 50, "though they are the oldest of all"
        assert 0 < loud.total < 20_000


async def test_measurements_give_way_where_most_was_taken(telemetry_place: TelemetryPlace) -> None:
    async with telemetry_place.opened(size_bytes=1 << 20) as telemetry:
        telemetry.offer(points=[point("cpu", "quiet", at=n) for n in range(100)])
        for first in range(0, 60_000, 2_000):
            telemetry.offer(points=[point("cpu", "noisy", at=first + n) for n in range(2_000)])
            await telemetry.flush()
        assert await telemetry.sweep() > 0
        found = await telemetry.latest(
            "boards", "cpu", from_ns=0, to_ns=NOW + 100_000 * SECOND, count=100, sources=["quiet"]
        )
        assert len(found["quiet"]) == 100


async def test_a_file_of_the_first_version_is_counted_when_it_is_opened(tmp_path: Path) -> None:
    async with TelemetryPlace(path=tmp_path / "telemetry.db").opened() as telemetry:
        telemetry.offer(points=[point("cpu", "1")], lines=[line(1, "b", scope="org/a")])
        await telemetry.flush()
    path = tmp_path / "telemetry.db"
    connection = database.connect(path, for_writing=True)
    connection.executescript("DROP TABLE shares; DROP INDEX series_by_source; PRAGMA user_version = 1;")
    connection.close()
    async with TelemetryPlace(path=tmp_path / "telemetry.db").opened() as telemetry:
        assert await kept(telemetry, "1", "cpu")
    connection = database.connect(path)
    shares = connection.execute("SELECT scope, source, rows, bytes FROM shares ORDER BY scope").fetchall()
    connection.close()
    assert shares == [("boards", "1", 1, 0), ("org/a", "b", 1, 400)]


class Bulky:
    """Sums up lines in as many bytes as they can be made to take."""

    stream = "access"
    kinds = ("access",)

    def digest(self, lines: Sequence[LogRecord]) -> Mapping[tuple[str, str], bytes]:
        return {("access", one.subject): bytes(1000) for one in lines}

    def merged(self, bodies: Sequence[bytes]) -> bytes:
        return bodies[0]


async def test_summaries_that_one_tenant_makes_up_cost_no_other_their_lines(
    telemetry_place: TelemetryPlace,
) -> None:
    def about(scope: str, number: int, minute: int = 0) -> LogRecord:
        said = {"identity": f"{minute}-{number}", "subject": f"host-{number}", "body": b"1"}
        at_ns = NOW - minute * 60 * SECOND
        return msgspec.structs.replace(line(number, "a", scope=scope), at_ns=at_ns, **said)

    async with telemetry_place.opened(size_bytes=2 << 20) as telemetry:
        telemetry.summarize(Bulky())
        assert telemetry.offer(lines=[about("org/victim", number) for number in range(20)])
        for minute in range(4):
            assert telemetry.offer(lines=[about("org/prowler", number, minute) for number in range(900)])
            await telemetry.flush()
        await telemetry.sweep()
        assert telemetry.statistics().used_bytes <= 2 << 20
        query = LineQuery(scope="org/victim", stream="access", from_ns=0, to_ns=NOW + SECOND, limit=100)
        assert (await telemetry.lines(query)).total == 20
        stretch = {"from_ns": NOW - 60 * SECOND, "to_ns": NOW + 60 * SECOND}
        assert len(await telemetry.summaries("org/victim", "access", **stretch)) == 20
