"""What five hundred boards cost one server: joining, reporting, and their logs followed through it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import servers
from bench.boards_population import Population, prepared
from bench.figures import Effort, Row, alone
from bench.http2 import files_for
from bench.servers import ROOT, Server

BOARDS = 500
LINES = 20.0
"""A second, of each board's log."""
REPORT_SECONDS = 2.0
MEASURED_SECONDS = 15.0
STOP_SECONDS = 20.0


class Helper:
    """A process of ours that takes orders as lines of JSON and answers each with one."""

    def __init__(self, module: str, plan: Path, core: int | None = None) -> None:
        command = [sys.executable, "-m", module, str(plan)]
        if core is not None:
            command = ["taskset", "--cpu-list", str(core), *command]
        self._process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.hello = self._read()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a helper ended with {self._process.wait(STOP_SECONDS)}")
        said: dict[str, Any] = json.loads(line)
        return said

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(STOP_SECONDS)


@contextlib.contextmanager
def helper(module: str, plan: Path, said: dict[str, Any], core: int | None = None) -> Iterator[Helper]:
    plan.write_text(json.dumps(said))
    made = Helper(module, plan, core)
    try:
        yield made
    finally:
        made.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spell:
    """What a process used over a while, and what came of it."""

    seconds: float
    share: float
    """Of a core."""
    count: int

    @property
    def rate(self) -> float:
        return self.count / self.seconds

    @property
    def cost_us(self) -> float:
        return self.share / self.rate * 1e6 if self.count else 0.0


def spell(server: Server, seconds: float, count: Any) -> Spell:
    before, used, begun = count(), server.cpu_seconds(), time.perf_counter()
    time.sleep(seconds)
    elapsed = time.perf_counter() - begun
    return Spell(
        seconds=elapsed, share=(server.cpu_seconds() - used) / elapsed, count=count() - before
    )


@contextlib.contextmanager
def _server(data: Path, core: int) -> Iterator[tuple[Server, str]]:
    with servers.fleetplane(data, core, domains="boards") as web:
        listeners = json.loads(data.with_name(data.name + ".ready").read_text())["listeners"]
        yield web, listeners["boards"][0].rpartition("//")[2]


def _bare(people: Population, boards: Any, nodes: Helper, directory: Path, core: int, seconds: float) -> Spell:
    plan = {
        "boards": boards, "ca": people.ca.decode(), "certificate": people.certificate.decode(),
        "key": people.key.decode(),
    }  # fmt: skip
    with helper("bench.boards_bare", directory / "bare.json", plan, core) as bare:
        _until(lambda: nodes.ask()["followed"] == len(boards), "every board is followed")
        server = Server(name="bare", pid=bare.pid, host="", port=0, started_seconds=0.0)
        time.sleep(2.0)
        done = spell(server, seconds, lambda: bare.ask()["lines"])
        print("bare MB", server.resident_bytes()/1e6, done)
    _until(lambda: nodes.ask()["followed"] == 0, "nobody is followed")
    return done


def _until(condition: Any, what: str, *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited longer than {seconds} s until {what}")
        time.sleep(0.05)


def measure(effort: Effort) -> Sequence[Row]:
    quick = effort.gpus is not None
    count = 20 if quick else BOARDS
    seconds = 1.0 if quick else MEASURED_SECONDS
    with files_for(4 * count), servers.load_core() as core, servers.scratch() as directory:
        people = prepared(directory / "data", count)
        (directory / "ca.crt").write_bytes(people.ca)
        with _server(directory / "data", core) as (server, place):
            plan = {
                "folder": str(directory), "server": place, "tokens": people.tokens, "first": 0,
                "report_seconds": REPORT_SECONDS,
            }  # fmt: skip
            idle = server.resident_bytes()
            used = server.cpu_seconds()
            with helper("bench.boards_nodes", directory / "nodes.json", plan) as nodes:
                took = nodes.hello["took"]
                joined = (server.cpu_seconds() - used) / count
                print("took", took, joined, idle/1e6)
                _until(lambda: nodes.ask()["reports"] >= count, "every board has reported")
                time.sleep(2)
                reports = spell(server, seconds, lambda: nodes.ask()["reports"])
                print(reports, reports.rate, reports.cost_us, server.resident_bytes()/1e6)
                nodes.ask(rate=LINES)
                bare = _bare(people, nodes.hello["boards"], nodes, directory, core, seconds)
                print(bare, bare.rate, bare.cost_us)
                print(nodes.ask())
    return []


if __name__ == "__main__":
    alone(measure, __doc__)
