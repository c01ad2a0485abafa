"""Processes that play a part in the boards' figures: they take orders as lines of JSON."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.servers import ROOT, Server

STOP_SECONDS = 60.0
PATIENCE_SECONDS = 60.0


class Helper:
    """Answers each order with one line; says hello once it is ready."""

    def __init__(self, module: str, plan: Path, core: int | None) -> None:
        command = [sys.executable, "-m", module, str(plan)]
        if core is not None:
            command = ["taskset", "--cpu-list", str(core), *command]
        self._process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.hello = self._read()

    @property
    def server(self) -> Server:
        """To ask what it uses."""
        return Server(name="helper", pid=self._process.pid, host="", port=0, started_seconds=0.0)

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], PATIENCE_SECONDS)[0]:
            raise RuntimeError(f"a helper said nothing for {PATIENCE_SECONDS:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a helper ended with {self._process.wait(STOP_SECONDS)}")
        said: dict[str, Any] = json.loads(line)
        return said

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(STOP_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


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


def spell(server: Server, count: Callable[[], int], meanwhile: Callable[[], None]) -> Spell:
    before, used, begun = count(), server.cpu_seconds(), time.perf_counter()
    meanwhile()
    elapsed = time.perf_counter() - begun
    return Spell(seconds=elapsed, share=(server.cpu_seconds() - used) / elapsed, count=count() - before)


def until(condition: Callable[[], bool], what: str, *, seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited longer than {seconds} s until {what}")
        time.sleep(0.05)
