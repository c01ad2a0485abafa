"""Unary calls per second, by h2load."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench import population, servers
from bench.figures import Effort
from bench.servers import Server

CONNECTIONS = 8
STREAMS = 8
PREFIX_BYTES = 5
WARM_UP_SECONDS = 0.3
LONGEST_SECONDS = 15.0
WINDOW_BITS = 30
"""Flow control wide open: it is not what is measured."""

_RATE = re.compile(r"finished in [^,]+, ([0-9.]+) req/s")
_COUNTS = re.compile(r"requests: \d+ total, \d+ started, (\d+) done, (\d+) succeeded, (\d+) failed")
_DATA = re.compile(r"traffic: .*, \S+ \((\d+)\) data")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a server did under load."""

    rate: float
    """Calls per second."""
    cpu_us: float
    """The server's processor time per call; unlike the rate, it hardly depends on what else runs."""


def under_load(server: Server, method: str, request: bytes, answer_bytes: int, seconds: float) -> Served:
    """What it does once warm; raises if an answer was missing or not of the size that a good one has."""
    return once_warm(server, lambda length: _h2load(server, method, request, answer_bytes, length), seconds)


def once_warm(server: Server, load: Callable[[float], tuple[float, int]], seconds: float) -> Served:
    """What it does under `load`, which tells rate and answers; for longer if nothing was answered in time."""
    load(min(seconds, WARM_UP_SECONDS))
    while True:
        before = server.cpu_seconds()
        rate, finished = load(seconds)
        if finished:
            return Served(rate=rate, cpu_us=(server.cpu_seconds() - before) / finished * 1e6)
        if seconds > LONGEST_SECONDS:
            raise RuntimeError(f"nothing was answered within {seconds:g} s")
        seconds *= 4


def _h2load(
    server: Server, method: str, request: bytes, answer_bytes: int, seconds: float
) -> tuple[float, int]:
    """The rate, and how many calls there were."""
    with tempfile.NamedTemporaryFile() as body:
        body.write(struct.pack(">BI", 0, len(request)) + request)
        body.flush()
        done = subprocess.run(
            [
                "h2load",
                "--threads",
                "1",
                "--clients",
                str(CONNECTIONS),
                "--max-concurrent-streams",
                str(STREAMS),
                "--duration",
                f"{round(seconds * 1000)}ms",
                "--window-bits",
                str(WINDOW_BITS),
                "--connection-window-bits",
                str(WINDOW_BITS),
                "--header",
                "content-type: application/grpc",
                "--header",
                "te: trailers",
                "--data",
                body.name,
                f"http://{server.authority}{method}",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"h2load failed: {done.stdout}{done.stderr}")
    return _checked(done.stdout, answer_bytes)


def _checked(report: str, answer_bytes: int) -> tuple[float, int]:
    rate, counts, data = _RATE.search(report), _COUNTS.search(report), _DATA.search(report)
    if rate is None or counts is None or data is None:
        raise RuntimeError(f"h2load says something unexpected:\n{report}")
    finished, succeeded, failed = (int(count) for count in counts.groups())
    # A gRPC error is a success to HTTP but has no body. What is under way when the time is up
    # is counted in bytes and not in answers, hence not exactly equal.
    expected = finished * (answer_bytes + PREFIX_BYTES)
    under_way = CONNECTIONS * STREAMS * (answer_bytes + PREFIX_BYTES)
    if failed or succeeded != finished or not expected <= int(data[1]) <= expected + under_way:
        raise RuntimeError(f"not every call succeeded; {answer_bytes} bytes were expected:\n{report}")
    return float(rate[1]), finished


def in_turns(effort: Effort, gpus: int, measure: Callable[[Server], Served]) -> tuple[Served, Served]:
    """The best that `measure` says of Fleetplane and of the reference, both holding these GPUs."""
    ours: list[Served] = []
    reference: list[Served] = []
    with (
        servers.load_core() as core,
        servers.scratch() as directory,
        servers.fleetplane(directory / "data", core) as fleetplane,
        servers.grpc_aio(directory, core) as grpc_aio,
    ):
        for server in (fleetplane, grpc_aio):
            population.register(server, gpus)
        for _ in range(effort.rounds):
            ours.append(measure(fleetplane))
            reference.append(measure(grpc_aio))
    return best(ours), best(reference)


def best(rounds: Sequence[Served]) -> Served:
    """The highest rate and the least processor time."""
    return Served(rate=max(one.rate for one in rounds), cpu_us=min(one.cpu_us for one in rounds))


def processor_time(ours: Served, reference: Served) -> str:
    ratio = f"{reference.cpu_us / ours.cpu_us:.1f} ×"
    return f"processor time a call {ours.cpu_us:.1f} µs, of the reference {reference.cpu_us:.0f} µs: {ratio}"
