"""Telemetry that several servers share: written by all, and nobody waits for a database that is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import asyncpg
import pytest
from support.shared.free_ports import free_port
from support.shared.postgres_server import PostgresServer
from support.shared.rough_network import Roughness, RoughNetwork, rough_network
from support.shared.telemetry_place import DAY, NOW, SECOND, TelemetryPlace, asked, bodies, line, point

from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import Unavailable
from fleetplane.kernel.telemetry import LogRecord, Telemetry
from fleetplane.kernel.telemetry.postgres import link, schema
from fleetplane.sim.clock import VirtualClock

WINDOW: Any = {"from_ns": NOW - 40 * DAY, "to_ns": NOW + 2 * DAY}


@pytest.fixture
def shared(postgres: PostgresServer, tmp_path: Path) -> TelemetryPlace:
    return TelemetryPlace(path=tmp_path / "unused.db", url=postgres.database())


@asynccontextmanager
async def across(place: TelemetryPlace) -> AsyncIterator[tuple[TelemetryPlace, RoughNetwork]]:
    """The same database, over a network that can be cut."""
    parts = urlsplit(place.url)
    async with rough_network(f"{parts.hostname}:{parts.port}") as network:
        url = place.url.replace(f"{parts.hostname}:{parts.port}", network.address)
        yield TelemetryPlace(path=place.path, url=url), network


class Counting:
    """Counts lines by subject."""

    stream = "access"
    kinds = ("access",)

    def digest(self, lines: Sequence[LogRecord]) -> Mapping[tuple[str, str], bytes]:
        counts: dict[str, int] = {}
        for one in lines:
            counts[one.subject] = counts.get(one.subject, 0) + 1
        return {("access", subject): b"%d" % count for subject, count in counts.items()}

    def merged(self, bodies: Sequence[bytes]) -> bytes:
        return b"%d" % sum(map(int, bodies))


async def counted(telemetry: Telemetry, step_seconds: int = 0) -> int:
    found = await telemetry.summaries("org/a", "access", step_seconds=step_seconds, **WINDOW)
    return sum(int(one.body) for one in found)


async def test_servers_that_write_the_same_days_and_lines_at_once_keep_each_line_once(
    shared: TelemetryPlace,
) -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(shared.opened()) for _ in range(3)]
        for server in servers:
            server.summarize(Counting())
        rows = [
            line(number, at=-(number % 20) * 86_400 - number % 7, subject=f"host-{number % 3}")
            for number in range(300)
        ]
        points = [point(number, at=-number * 86_400, source=f"s{number % 5}") for number in range(30)]
        for first, server in enumerate(servers):  # each another two thirds
            assert server.offer(lines=[row for n, row in enumerate(rows) if n % 3 != first], points=points)
        await asyncio.gather(*(server.flush() for server in servers))
        assert [server.statistics().lost for server in servers] == [0, 0, 0]
        assert sum(server.statistics().written for server in servers) == 330
        assert (await servers[0].lines(asked(limit=1))).total == 300
        assert await counted(servers[0]) == 300

        await asyncio.gather(*(server.sweep() for server in servers))  # which makes stretches wider
        assert await counted(servers[1]) == 300
        again = [row for number, row in enumerate(rows) if number % 20 < 7]  # of days whose lines are kept
        for server in servers:
            server.offer(lines=[*again, line(1000 + servers.index(server), at=-86_400 * 3)])
        await asyncio.gather(*(server.flush() for server in servers))
        assert await counted(servers[2], step_seconds=86_400) == 303, "late ones, and those sent again"


async def test_a_counter_goes_on_where_another_server_left_it(shared: TelemetryPlace) -> None:
    async with shared.opened() as one, shared.opened() as two:
        for at, (server, value) in enumerate([(one, 50), (two, 70), (two, 5), (one, 30), (two, 31)]):
            server.offer(points=[point(value, at=at, counter=True)])
            await server.flush()
        found = await one.growth("org/a", "load", from_ns=NOW, to_ns=NOW + 60 * SECOND)
        assert found == {"one": 20 + 5 + 25 + 1}


async def test_series_that_gave_way_on_another_server_are_made_anew(shared: TelemetryPlace) -> None:
    async with shared.opened(series=4) as one, shared.opened(series=4) as two:
        one.offer(points=[point(1, series=f"s{number}") for number in range(4)])
        await one.flush()
        two.offer(points=[point(1, source="two")])  # it opened before there were any
        await two.flush()
        await two.sweep()
        two.offer(points=[point(1, series="other", source="two")])
        await two.flush()
        assert two.statistics().evicted > 0
        one.offer(points=[point(2, at=1, series=f"s{number}") for number in range(4)])
        await one.flush()
        named = [set(await one.latest("org/a", f"s{number}", **WINDOW)) for number in range(4)]
        assert one.statistics().lost == 0
        async with asyncio.timeout(60):
            connection = await asyncpg.connect(shared.url)
            try:
                lonely = "SELECT count(*) FROM telemetry_points p WHERE at_ns > $1"
                lonely += " AND NOT EXISTS (SELECT FROM telemetry_series s WHERE s.id = p.series)"
                assert await connection.fetchval(lonely, NOW) == 0
            finally:
                await connection.close()
        assert {"one"} in named


async def test_while_the_database_is_away_nobody_waits_and_what_was_taken_is_written_later(
    shared: TelemetryPlace,
) -> None:
    async with across(shared) as (place, network), place.opened(SystemClock(), queue_rows=100) as telemetry:
        there, network.upstream = network.upstream, f"127.0.0.1:{free_port()}"
        network.cut_all()
        now = SystemClock().now_ns()
        offered = [line(number, at=(now - NOW) / SECOND) for number in range(200)]
        taken = [one for one in offered if telemetry.offer(lines=[one])]
        async with asyncio.timeout(60):
            while not telemetry.statistics().retried:
                await asyncio.sleep(0.01)
        taken += [one for one in offered if one not in taken and telemetry.offer(lines=[one])]
        numbers = telemetry.statistics()
        assert numbers.refused >= 200 - len(taken)
        assert len(taken) <= 200
        with pytest.raises(Unavailable):
            await telemetry.lines(asked())
        network.upstream = there
        async with asyncio.timeout(60):
            await telemetry.flush()
        assert (await telemetry.lines(asked(to_ns=now + DAY, limit=1))).total == len(taken)
        assert telemetry.statistics().lost == 0


async def test_a_database_that_does_not_answer_costs_a_batch_its_patience_and_no_row(
    shared: TelemetryPlace,
) -> None:
    async with across(shared) as (place, network), place.opened(SystemClock()) as telemetry:
        now = SystemClock().now_ns()
        telemetry.offer(lines=[line(1, at=(now - NOW) / SECOND)])
        await telemetry.flush()
        with patch.dict(link.PATIENCE, {"write": 0.5}):
            network.roughness = Roughness(stall=1.0, stall_seconds=3600.0)
            telemetry.offer(lines=[line(2, at=(now - NOW) / SECOND)])
            async with asyncio.timeout(60):
                while not telemetry.statistics().retried:
                    await asyncio.sleep(0.01)
        network.roughness = Roughness()
        network.cut_all()
        async with asyncio.timeout(60):
            await telemetry.flush()
        assert sorted(await bodies(telemetry, to_ns=now + DAY)) == [1, 2]


async def test_what_is_queued_when_a_server_ends_without_its_database_is_counted_as_lost(
    shared: TelemetryPlace,
) -> None:
    async with across(shared) as (place, network), asyncio.timeout(60):
        async with place.opened(SystemClock()) as telemetry:
            network.upstream = f"127.0.0.1:{free_port()}"
            network.cut_all()
            at = (SystemClock().now_ns() - NOW) / SECOND
            for number in range(20):
                assert telemetry.offer(lines=[line(number, at=at)])
        numbers = telemetry.statistics()
        assert (numbers.lost, numbers.written) == (20, 0)


async def test_a_server_that_only_reads_tells_what_another_wrote_and_that_it_did(
    shared: TelemetryPlace,
) -> None:
    async with shared.opened() as writer, shared.opened(only_reads=True) as reader:
        before = reader.elsewhere
        assert not reader.offer(points=[point(1)])
        writer.offer(points=[point(1)], lines=[line(1)])
        await writer.flush()
        assert await bodies(reader) == [1]
        assert set(await reader.latest("org/a", "load", **WINDOW)) == {"one"}
        async with asyncio.timeout(60):
            while reader.elsewhere == before:
                await asyncio.sleep(0.01)


async def test_a_server_whose_clock_runs_ahead_deletes_nothing_that_is_kept(shared: TelemetryPlace) -> None:
    clock = SystemClock()
    async with shared.opened(clock) as telemetry:
        telemetry.offer(lines=[line(1, at=(clock.now_ns() - NOW) / SECOND)])
        await telemetry.flush()
        async with shared.opened(VirtualClock(start_ns=clock.now_ns() + 100 * DAY)) as ahead:
            assert await ahead.sweep() == 0
        assert await bodies(telemetry, to_ns=clock.now_ns() + DAY) == [1]


async def test_days_have_tables_ahead_and_go_whole(shared: TelemetryPlace) -> None:
    today = schema.day_of(NOW)
    async with shared.opened(lines_age_seconds=2 * 86_400.0) as telemetry:
        telemetry.offer(lines=[line(number, at=-number * 86_400) for number in range(6)])
        await telemetry.flush()
        await telemetry.sweep()
        connection = await asyncpg.connect(shared.url)
        try:
            assert await schema.days(connection, schema.LINES) == set(range(today - 2, today + 3))
            # While somebody reads a day, its table stays, and nobody waits for it for long.
            reading = connection.transaction()
            await reading.start()
            await connection.fetch(f"SELECT FROM {schema.table_of(schema.LINES, today)}")
            later = VirtualClock(start_ns=NOW + 5 * DAY)
            with patch.dict(link.WRITER, {"lock_timeout": "200"}):
                async with shared.opened(later, lines_age_seconds=2 * 86_400.0) as other:
                    await other.sweep()
                    assert today in await schema.days(connection, schema.LINES)
                    assert other.offer(lines=[line(9, at=5 * 86_400)])
                    await other.flush()
                    await reading.rollback()
                    await other.sweep()
            assert min(await schema.days(connection, schema.LINES)) == today + 5
        finally:
            await connection.close()


async def test_a_question_that_takes_too_long_is_given_up_and_the_next_answered(
    shared: TelemetryPlace,
) -> None:
    async with shared.opened() as telemetry:
        telemetry.offer(lines=[line(1)])
        await telemetry.flush()
        connection = await asyncpg.connect(shared.url)
        try:
            with patch.dict(link.READER, {"statement_timeout": "300"}):
                async with shared.opened(only_reads=True) as impatient:
                    holding = connection.transaction()
                    await holding.start()
                    await connection.execute(f"LOCK TABLE {schema.LINES} IN ACCESS EXCLUSIVE MODE")
                    with pytest.raises(Unavailable, match="too long"):
                        await impatient.lines(asked())
                    await holding.rollback()
        finally:
            await connection.close()
        assert await bodies(telemetry) == [1]
