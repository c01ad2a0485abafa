"""What five hundred boards cost one server: they join, report, and their logs are followed through it.

Every board is played to the byte: a key of its own, a registration over TLS with a join token, then a
connection with its certificate for reports, and a port of its own where the server reads its log and drives
its pins. Somebody follows each board's log over REST. How long others wait meanwhile is measured too.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import servers
from bench.boards_calls import Times, Web, drives, outputs, reads, updates
from bench.boards_helpers import Helper, Spell, helper, spell, until
from bench.boards_population import Population, prepared
from bench.figures import Effort, Row, alone
from bench.http2 import files_for
from bench.servers import Server

LINES = 20.0
"""A second, of each board's log."""
REPORT_SECONDS = 2.0
SETTLE_SECONDS = 2.0
FLOOD_BOARDS, FLOOD_LINES, FLOOD_SECONDS = 20, 3000.0, 2.0
"""Some boards go wild: more lines than a board keeps for a reader who cannot follow."""
DRAIN_SECONDS = 60.0
MUST_JOIN = 50.0
MUST_REPORTS = 0.5
MUST_LOGS = 1.0
MUST_GPIO, MUST_REST, MUST_UPDATE = 0.1, 0.2, 1.0
MUST_MEMORY = 512e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    boards: int = 500
    seconds: float = 15.0
    """Of each measurement."""
    reads: int = 300
    drives: int = 200
    updates: int = 40

    @classmethod
    def of(cls, effort: Effort) -> Plan:
        if effort.gpus is None:
            return cls()
        return cls(boards=20, seconds=1.0, reads=40, drives=20, updates=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Where every line of log went, at the end."""

    made: int
    received: int
    dropped: int
    """Told to the reader by the line after them."""
    untold: int
    """Missing without a word."""
    most_at_once: float
    """Lines a second that came through while some boards went wild."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    join_seconds: float
    join_cpu: float
    reports: Spell
    bare: Spell
    bare_bytes: int
    logs: Spell
    reading: Times
    driving: Times
    updating: Times
    account: Account
    idle_bytes: int
    peak_bytes: int
    slowest_report_seconds: float
    load_share: float
    """Of the boards' core, by the boards."""


@contextlib.contextmanager
def _server(data: Path, core: int) -> Iterator[tuple[Server, str]]:
    with servers.fleetplane(data, core, domains="boards") as web:
        listeners = json.loads(data.with_name(data.name + ".ready").read_text())["listeners"]
        yield web, listeners["boards"][0].rpartition("//")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Everything that is there while one thing is measured."""

    plan: Plan
    directory: Path
    core: int
    people: Population
    server: Server
    nodes: Helper

    @property
    def numbers(self) -> list[int]:
        return [number for number, _, _ in self.nodes.hello["boards"]]

    def wait(self) -> None:
        time.sleep(self.plan.seconds)

    # Measuring.

    def reports(self) -> Spell:
        until(lambda: self.nodes.ask()["reports"] >= self.plan.boards, "every board has reported")
        time.sleep(min(SETTLE_SECONDS, self.plan.seconds))
        return spell(self.server, lambda: int(self.nodes.ask()["reports"]), self.wait)

    def bare(self) -> tuple[Spell, int]:
        """The same streams, read by nobody but a bare client, on the server's core."""
        own = {"ca": self.people.ca, "certificate": self.people.certificate, "key": self.people.key}
        said = {"boards": self.nodes.hello["boards"], **{name: text.decode() for name, text in own.items()}}
        self.nodes.ask(rate=LINES)
        with helper("bench.boards_bare", self.directory / "bare.json", said, self.core) as client:
            until(lambda: self.nodes.ask()["followed"] == self.plan.boards, "every board is followed")
            time.sleep(min(SETTLE_SECONDS, self.plan.seconds))
            done = spell(client.server, lambda: int(client.ask()["lines"]), self.wait)
            resident = client.server.resident_bytes()
        until(lambda: self.nodes.ask()["followed"] == 0, "nobody is followed any more")
        self.nodes.ask(rate=0, anew=True)
        return done, resident

    @contextlib.contextmanager
    def followers(self) -> Iterator[Helper]:
        said = {"web": self.server.authority, "token": self.people.reader, "boards": self.numbers}
        with helper("bench.boards_readers", self.directory / "readers.json", said) as readers:
            until(lambda: self.nodes.ask()["followed"] == self.plan.boards, "every board is followed")
            self.nodes.ask(rate=LINES)
            time.sleep(min(SETTLE_SECONDS, self.plan.seconds))
            yield readers

    def calls(self) -> tuple[Times, Times, Times]:
        web = Web(self.server, self.people.operator)
        with contextlib.closing(web):
            devices = outputs(web, self.numbers[:20])
            return (
                reads(web, self.numbers, self.plan.reads),
                drives(web, devices, self.plan.drives),
                updates(self.server, self.people.operator, web, devices[0], self.plan.updates),
            )

    def account(self, readers: Helper) -> Account:
        """A few boards log more than anyone can follow; then every line is looked for."""
        wild = min(FLOOD_BOARDS, self.plan.boards)
        self.nodes.ask(rate=FLOOD_LINES, of=wild)
        before, begun = int(readers.ask()["lines"]), time.perf_counter()
        time.sleep(FLOOD_SECONDS)
        self.nodes.ask(rate=LINES, of=wild)
        most = (int(readers.ask()["lines"]) - before) / (time.perf_counter() - begun)
        self.nodes.ask(rate=0)

        def settled() -> bool:
            made, got = self.nodes.ask()["made"], readers.ask()
            return bool(got["lines"] + got["dropped"] == made) or bool(got["failures"])

        with contextlib.suppress(RuntimeError):  # what is missing stands in the account
            until(settled, "every line came or was told of", seconds=DRAIN_SECONDS)
        made, got = self.nodes.ask()["made"], readers.ask()
        if got["failures"]:
            raise RuntimeError(f"{got['failures']} readers were left alone: {got['failure']}")
        return Account(
            made=made,
            received=got["lines"],
            dropped=got["dropped"],
            untold=max(abs(got["untold"]), abs(made - got["lines"] - got["dropped"])),
            most_at_once=most,
        )


def _observe(stage: Stage, *, idle_bytes: int, join_cpu: float) -> Seen:
    server, nodes = stage.server, stage.nodes
    reports = stage.reports()
    bare, bare_bytes = stage.bare()
    with stage.followers() as readers:
        nodes.ask()
        own, begun = nodes.ask()["cpu_seconds"], time.perf_counter()
        logs = spell(server, lambda: int(readers.ask()["lines"]), stage.wait)
        share = (nodes.ask()["cpu_seconds"] - own) / (time.perf_counter() - begun)
        reading, driving, updating = stage.calls()
        slowest = nodes.ask()["slowest_report_seconds"]
        account = stage.account(readers)
    return Seen(
        join_seconds=nodes.hello["took"],
        join_cpu=join_cpu,
        reports=reports,
        bare=bare,
        bare_bytes=bare_bytes,
        logs=logs,
        reading=reading,
        driving=driving,
        updating=updating,
        account=account,
        idle_bytes=idle_bytes,
        peak_bytes=server.peak_resident_bytes(),
        slowest_report_seconds=slowest,
        load_share=share,
    )


def _fleet(plan: Plan) -> Seen:
    with files_for(4 * plan.boards), servers.load_core() as core, servers.scratch() as directory:
        people = prepared(directory / "data", plan.boards)
        (directory / "ca.crt").write_bytes(people.ca)
        with _server(directory / "data", core) as (server, place):
            idle, used = server.resident_bytes(), server.cpu_seconds()
            said = {
                "folder": str(directory),
                "server": place,
                "tokens": people.tokens,
                "first": 0,
                "report_seconds": REPORT_SECONDS,
            }
            with helper("bench.boards_nodes", directory / "nodes.json", said) as nodes:
                join_cpu = (server.cpu_seconds() - used) / plan.boards
                stage = Stage(
                    plan=plan, directory=directory, core=core, people=people, server=server, nodes=nodes
                )
                return _observe(stage, idle_bytes=idle, join_cpu=join_cpu)


# The table.


def _row(figure: str, ours: str, must: str, *, reached: bool, note: str = "", reference: str = "") -> Row:
    return Row(
        figure=figure, ours=ours, reference=reference, ratio=None, must_reach=must, reached=reached, note=note
    )


def _rows(seen: Seen, plan: Plan) -> Iterator[Row]:
    many = f"{plan.boards:,} boards"
    joins = plan.boards / seen.join_seconds
    yield _row(
        f"{many} join, a key and a certificate each",
        f"{joins:,.0f}/s",
        f"{MUST_JOIN:g}/s",
        reached=joins >= MUST_JOIN,
        note=f"{seen.join_cpu * 1e3:.1f} ms of the server's processor time each",
    )
    yield _row(
        f"{many} reporting every {REPORT_SECONDS:g} s, with metrics",
        f"{seen.reports.share:.0%} of a core",
        f"under {MUST_REPORTS:.0%}",
        reached=seen.reports.share < MUST_REPORTS,
        note=f"{seen.reports.rate:,.0f} reports/s at {seen.reports.cost_us:,.0f} µs each",
    )
    yield _row(
        f"And their logs followed over REST, {LINES:g} lines/s each",
        f"{seen.logs.share:.0%} of a core",
        f"under {MUST_LOGS:.0%}",
        reached=seen.logs.share < MUST_LOGS,
        reference=f"{seen.bare.share:.0%}, bare streams",
        note=f"{seen.logs.rate:,.0f} lines/s at {_line_us(seen):.0f} µs each, reports left out; a bare "
        f"client of the boards reads {seen.bare.rate:,.0f} lines/s at {seen.bare.cost_us:.0f} µs each in "
        f"{seen.bare_bytes / 1e6:.0f} MB; the boards took {seen.load_share:.0%} of their core; the slowest "
        f"report took {seen.slowest_report_seconds:.2f} s",
    )
    account = seen.account
    yield _row(
        f"Lines missing without a word, {FLOOD_BOARDS} boards gone wild",
        f"{account.untold:,}",
        "0",
        reached=account.untold == 0 and account.made > 0,
        note=f"{account.made:,} lines made, {account.received:,} received, {account.dropped:,} told to be "
        f"dropped; {account.most_at_once:,.0f} lines/s came through while they did",
    )
    for figure, times, must in (
        ("A pin driven over REST, p95", seen.driving, MUST_GPIO),
        ("REST, one board or a page of 50, p95", seen.reading, MUST_REST),
        ("From a pin driven to its event on a WebSocket, p95", seen.updating, MUST_UPDATE),
    ):
        yield _row(
            f"{figure}, meanwhile",
            f"{times.p95 * 1e3:.0f} ms",
            f"under {must * 1e3:.0f} ms",
            reached=times.p95 < must,
            note=str(times),
        )
    yield _row(
        f"Memory of the server, {many}, the most at any time",
        f"{seen.peak_bytes / 1e6:.0f} MB",
        f"under {MUST_MEMORY / 1e6:.0f} MB",
        reached=seen.peak_bytes < MUST_MEMORY,
        note=f"{seen.idle_bytes / 1e6:.0f} MB when idle",
    )


def _line_us(seen: Seen) -> float:
    return (seen.logs.share - seen.reports.share) / seen.logs.rate * 1e6 if seen.logs.count else 0.0


def measure(effort: Effort) -> Sequence[Row]:
    plan = Plan.of(effort)
    return list(_rows(_fleet(plan), plan))


if __name__ == "__main__":
    alone(measure, __doc__)
