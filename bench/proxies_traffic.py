"""A month of traffic of 200 virtual hosts: what it takes in the file, and how long questions about it take.

Every host has three locations, two upstreams and traffic on two agents in every stretch that is kept: the
minutes of two hours, the hours of three days, the days of a month. Summaries are made by the server's own
code of rows with twenty latencies, clients and user agents and fifty paths each, and are put into the file
before it is asked; answers are put together by the server's own code in this process. Processor time, and the
best of some.
"""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import product

from bench import servers
from bench.figures import Effort, Row, alone
from fleetplane.domains.proxies.traffic.fields import ACCESS, row_of
from fleetplane.domains.proxies.traffic.summary import PLACES, AccessSummarizer, placed, report, total
from fleetplane.kernel.telemetry import LogRecord, TelemetryLimits
from fleetplane.kernel.telemetry.sqlite import database, summing
from fleetplane.kernel.telemetry.summaries import DAY, HOUR, FoundSummary
from fleetplane.kernel.values.times import NS

HOSTS = 200
LOCATIONS = 3
AGENTS = 2
LINES = 60
"""Of one host on one agent in one stretch: more of them make no larger summary."""
QUESTIONS = 3
MUST_SECONDS = 1.0
SCOPE = "org/o/ws/w"
_INSERT = "INSERT INTO summaries VALUES (?, ?, ?, ?, ?, ?)"


def _lines(host: int, agent: str, randomly: random.Random) -> Sequence[LogRecord]:
    made = []
    for number in range(LINES):
        fields = {
            "status": "500" if number % 20 == 0 else "200",
            "request_length": "420",
            "bytes_sent": str(randomly.randrange(200, 20_000)),
            "response_time_ms": f"{randomly.choice(LATENCIES)}",
            "uri": f"/things/{randomly.randrange(50)}/of/a/usual/length",
            "remote_addr": f"192.0.2.{randomly.randrange(20)}",
            "user_agent": f"Mozilla/5.0 (X11; Linux x86_64; rv:1{randomly.randrange(20)}.0) Gecko/20100101",
            "virtual_host_id": f"880e8400-e29b-41d4-a716-44665544{host:04}",
            "location": f"/path{number % LOCATIONS}/",
            "upstream_id": f"990e8400-e29b-41d4-a716-446655{host:04}{number % 2:02}",
        }
        line = LogRecord(
            scope=SCOPE,
            stream=ACCESS,
            source=agent,
            at_ns=0,
            identity=str(number),
            body=b"",
            detail=row_of(fields),
        )
        made.append(line)
    return made


LATENCIES = tuple(round(1.5**power, 2) for power in range(20))


def _stretches(now: int) -> Iterator[tuple[int, int]]:
    """Width and beginning of all that are kept, at their most."""
    for width, count in ((60, 120), (HOUR, 72), (DAY, 30)):
        yield from ((width, now - now % width - number * width) for number in range(count))


def _fill(connection: sqlite3.Connection, hosts: int, now: int) -> int:
    summarizer, randomly = AccessSummarizer(), random.Random(1)
    for number, kind in enumerate((ACCESS, PLACES), 1):
        connection.execute("INSERT INTO channels VALUES (?, ?, ?)", (number, SCOPE, kind))
    channels = {ACCESS: 1, PLACES: 2}
    for channel, (width, oldest) in product(channels.values(), ((60, now - 2 * HOUR), (HOUR, now - 3 * DAY))):
        row = (channel, width, now - now % width, oldest - oldest % DAY)
        connection.execute("INSERT INTO folded VALUES (?, ?, ?, ?)", row)
    stretches, count = list(_stretches(now)), 0
    with database.transaction(connection):
        for host in range(hosts):
            for agent in (f"770e8400-e29b-41d4-a716-44665544{number:04}" for number in range(AGENTS)):
                some = [summarizer.digest(_lines(host, agent, randomly)) for _ in range(5)]
                rows = [
                    (channels[kind], width, at, agent, subject, body)
                    for number, (width, at) in enumerate(stretches)
                    for (kind, subject), body in some[number % len(some)].items()
                ]
                connection.executemany(_INSERT, rows)
                count += len(rows)
    return count


def _best(ask: Callable[[], object]) -> float:
    took = []
    for _ in range(QUESTIONS):
        begun = time.process_time()
        ask()
        took.append(time.process_time() - begun)
    return min(took)


def measure(effort: Effort) -> Sequence[Row]:
    hosts = 10 if effort.gpus is not None else HOSTS
    now = time.time_ns() // NS
    with servers.scratch() as directory:
        path = directory / "telemetry.db"
        database.prepare(path)
        with closing(database.connect(path, for_writing=True)) as connection:
            rows = _fill(connection, hosts, now)
            (pages,) = connection.execute("PRAGMA page_count").fetchone()
        used = pages * 4096
        with closing(database.connect(path)) as connection:

            def found(kind: str, days: int) -> Sequence[FoundSummary]:
                return summing.found(
                    connection, SCOPE, kind, from_ns=(now - days * DAY) * NS, to_ns=now * NS, step_seconds=DAY
                )

            step = DAY
            month = _best(lambda: report(found(ACCESS, 30), step_seconds=step))
            before = _best(lambda: total(found(ACCESS, 30)))
            places = _best(lambda: placed(found(PLACES, 30), step_seconds=step))
            hour = _best(
                lambda: report(
                    summing.found(connection, SCOPE, ACCESS, from_ns=(now - HOUR) * NS, to_ns=now * NS),
                    step_seconds=60,
                )
            )
    bound = TelemetryLimits().size_bytes
    what = f"{hosts} virtual hosts, {hosts * LOCATIONS} locations, {AGENTS} agents"
    return [
        Row(
            figure=f"A month of traffic of {hosts} virtual hosts, asked for",
            ours=f"{month + before:.2f} s",
            reference="",
            ratio=None,
            must_reach=f"under {MUST_SECONDS:g} s",
            reached=month + before < MUST_SECONDS,
            note=f"{what}; of it {before:.2f} s for the month that ended a day before; "
            f"by location and upstream: {places:.2f} s; the last hour: {hour:.2f} s",
        ),
        Row(
            figure=f"A month of traffic of {hosts} virtual hosts, in the file",
            ours=f"{used / 1e6:,.0f} MB",
            reference="",
            ratio=None,
            must_reach=f"under {bound / 1e9:.1f} GB",
            reached=used < bound,
            note=f"{rows:,} summaries; {what}",
        ),
    ]


if __name__ == "__main__":
    alone(measure, __doc__)
