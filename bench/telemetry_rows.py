"""Measurements and log lines on PostgreSQL against the file: rows a second, processor time, a day read.

Both engines take the same lines and points from the same queue, in turns, in one process on a real PostgreSQL
with its default settings. Processor time is that of this process and of all of PostgreSQL's together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg

from bench import servers
from bench.figures import Effort, Row, against, alone
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.telemetry import LineQuery, LogRecord, Point, Telemetry
from fleetplane.kernel.values.times import NS
from tools.run_cluster import Cluster, Ports

LINES = 60_000
"""And as many points."""
AGENTS = 50
OFFERED = 500
BODY = b'["GET","/a/path?with=parameters","HTTP/1.1","200","1234","0.012","Mozilla/5.0 (X11; Linux)"]'.ljust(
    400
)
MUST_WRITE = 0.5
MUST_EFFORT = 0.4
"""Of what the file does: two processes share the work, and every row crosses from one to the other."""
MUST_READ = 0.3
READS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    rows_per_second: float
    rows_per_cpu_second: float
    """Of processor time."""
    reads_per_second: float


def _lines(first: int, count: int, at_ns: int) -> list[LogRecord]:
    source = f"agent-{first // OFFERED % AGENTS}"
    return [
        LogRecord(
            scope=f"org/1/ws/{first // OFFERED % 5}",
            stream="access",
            source=source,
            at_ns=at_ns + number * 1_000,
            identity=f"{source}-{number}",
            body=BODY,
            code=200,
            subject="example.com",
            action="GET",
        )
        for number in range(first, first + count)
    ]


def _points(first: int, count: int, at_ns: int) -> list[Point]:
    return [
        Point(
            scope="boards",
            series=f"cpu/{number % 20}",
            source=f"{first // OFFERED % AGENTS}",
            at_ns=at_ns + number * 1_000,
            value=float(number),
            counter=number % 2 == 0,
        )
        for number in range(first, first + count)
    ]


async def _run(folder: Path, url: str, rows: int, others: Callable[[], float]) -> Found:
    clock = SystemClock()
    at_ns = clock.now_ns() - 3_600 * NS
    batches: list[tuple[list[LogRecord], list[Point]]] = [
        (_lines(first, OFFERED, at_ns), _points(first, OFFERED, at_ns)) for first in range(0, rows, OFFERED)
    ]
    async with Telemetry.open(folder / "telemetry.db", clock, url=url) as telemetry:
        if url:
            await telemetry.sweep()  # which makes the tables of today
        begun, spent = time.perf_counter(), time.process_time() + others()
        for lines, points in batches:
            while not telemetry.offer(lines=lines, points=points):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await telemetry.flush()
        took = time.perf_counter() - begun
        effort = time.process_time() + others() - spent
        written = telemetry.statistics().written
        assert telemetry.statistics().lost == 0
        reading = time.perf_counter()
        for scope in range(READS):
            day: Any = {"from_ns": clock.now_ns() - 86_400 * NS, "to_ns": clock.now_ns() + NS}
            await telemetry.lines(LineQuery(scope=f"org/1/ws/{scope}", stream="access", limit=100, **day))
            await telemetry.buckets("boards", f"cpu/{scope}", width_ns=60 * NS, **day)
        read = READS / (time.perf_counter() - reading)
    return Found(rows_per_second=written / took, rows_per_cpu_second=written / effort, reads_per_second=read)


async def _empty(url: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public; CHECKPOINT")
    finally:
        await connection.close()


def measure(effort: Effort) -> Sequence[Row]:
    rows = 2_000 if effort.gpus is not None else LINES
    found: dict[str, list[Found]] = {"file": [], "postgresql": []}
    with servers.scratch() as directory, ExitStack() as stack:
        directory.chmod(0o755)
        cluster = Cluster(directory, Ports(0), stack)
        cluster.start_database()
        url = cluster.environment["FLEETPLANE_STORE__URL"]
        first = int((directory / "database" / "data" / "postmaster.pid").read_text().split()[0])
        for number in range(min(effort.rounds, 3)):
            folder = directory / f"round-{number}"
            folder.mkdir()
            found["file"].append(asyncio.run(_run(folder, "", rows, lambda: 0.0)))
            asyncio.run(_empty(url))
            found["postgresql"].append(
                asyncio.run(_run(folder, url, rows, lambda: servers.family_cpu_seconds(first)))
            )

    def best(engine: str, what: str) -> float:
        return max(float(getattr(one, what)) for one in found[engine])

    def row(figure: str, what: str, must: float, show: Callable[[float], str]) -> Row:
        ours, reference = best("postgresql", what), best("file", what)
        return against(figure=figure, ours=ours, reference=reference, must=must, show=show)

    return [
        row(
            "Telemetry on PostgreSQL, rows written",
            "rows_per_second",
            MUST_WRITE,
            lambda one: f"{one:,.0f}/s",
        ),
        row(
            "Telemetry on PostgreSQL, processor time of a row",
            "rows_per_cpu_second",
            MUST_EFFORT,
            lambda one: f"{1e6 / one:.1f} µs",
        ),
        row(
            "Telemetry on PostgreSQL, a day of a workspace and of a series",
            "reads_per_second",
            MUST_READ,
            lambda one: f"{1e3 / one:.1f} ms",
        ),
    ]


if __name__ == "__main__":
    alone(measure, __doc__)
