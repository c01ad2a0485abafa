"""What an agent measures reaches its server, and nothing of the agent depends on it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog

from fleetplane.gen.fleetplane.fleet.v1 import figures_pb2 as pb
from fleetplane.gen.fleetplane.fleet.v1 import figures_pb2_grpc
from fleetplane.kernel.errors import Unavailable
from fleetplane.node import figures
from fleetplane.node.connection import no_metadata, together
from fleetplane.node.figures import FigureReporter, HostFigures, Measured
from fleetplane.sim.clock import VirtualClock

SECONDS = 60.0
METADATA = (("authorization", "Bearer t"),)


class Server(figures_pb2_grpc.AgentFiguresServicer):
    """Answers in turn what it was given; an exception is a refusal."""

    def __init__(self, *answers: float | grpc.StatusCode) -> None:
        self.answers = list(answers)
        self.heard: list[pb.ReportFiguresRequest] = []
        self.metadata: list[Any] = []

    async def Report(self, request: Any, context: Any) -> pb.ReportFiguresResponse:
        self.heard.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        answer = self.answers.pop(0) if self.answers else 3600.0
        if not isinstance(answer, float):
            await context.abort(answer, "no")
            raise AssertionError
        return pb.ReportFiguresResponse(next_seconds=answer)


@asynccontextmanager
async def served(server: Server | None) -> AsyncIterator[grpc.aio.Channel]:
    listening = grpc.aio.server()
    if server is not None:
        figures_pb2_grpc.add_AgentFiguresServicer_to_server(server, listening)
    port = listening.add_insecure_port("127.0.0.1:0")
    await listening.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await listening.stop(None)


def reporter(measure: Any, clock: VirtualClock) -> FigureReporter:
    return FigureReporter(measure, clock=clock, log=structlog.get_logger, name="me")


async def measured() -> Measured:
    return {"": {"cpuPercent": 1.5}, "gpu-0": {"powerWatts": 2.0}}


async def until(clock: VirtualClock, holds: Callable[[], object], seconds: float) -> None:
    """Let time pass until something holds: an answer may be late, and the pause begins after it."""
    async with asyncio.timeout(SECONDS):
        while not holds():
            await clock.advance(seconds)
            await asyncio.sleep(0.01)


async def test_figures_are_told_again_and_again_and_after_a_refusal() -> None:
    clock = VirtualClock()
    server = Server(10.0, grpc.StatusCode.UNAVAILABLE, math.nan)
    async with served(server) as channel:
        telling = asyncio.create_task(reporter(measured, clock).follow(channel, lambda: METADATA))
        await until(clock, lambda: len(server.heard) == 2, 10.0)
        await until(clock, lambda: len(server.heard) == 3, figures.RETRY_SECONDS)
        await until(clock, lambda: len(server.heard) == 4, figures.LONGEST_SECONDS)
        telling.cancel()
        await asyncio.wait([telling])
    assert server.heard[0].name == "me"
    told = {one.object: dict(one.values) for one in server.heard[-1].objects}
    assert told == {"": {"cpuPercent": 1.5}, "gpu-0": {"powerWatts": 2.0}}
    assert all(one["authorization"] == "Bearer t" for one in server.metadata)


async def test_a_server_that_does_not_know_figures_is_left_alone() -> None:
    async with served(None) as channel, asyncio.timeout(SECONDS):
        await together(reporter(measured, VirtualClock()).follow)(channel, no_metadata)


@pytest.mark.parametrize("error", [Unavailable("the driver is held up"), OSError("no /proc")])
async def test_what_cannot_be_read_is_read_again_later(error: Exception) -> None:
    clock, server, asked = VirtualClock(), Server(), 0

    async def fails_once() -> Measured:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise error
        return await measured()

    async with served(server) as channel:
        telling = asyncio.create_task(reporter(fails_once, clock).follow(channel, no_metadata))
        await until(clock, lambda: server.heard, figures.RETRY_SECONDS)
        telling.cancel()
        await asyncio.wait([telling])
    assert asked == 2


def test_a_host_tells_what_can_be_read_of_it(tmp_path: Path) -> None:
    here = HostFigures(tmp_path).look()
    assert {"memoryPercent", "diskPercent", "loadAverage"} <= here.keys()
    assert all(0 <= here[name] <= 100 for name in here.keys() - {"loadAverage"})
    root = tmp_path / "elsewhere"
    (root / "proc").mkdir(parents=True)
    stat = root / "proc/stat"
    stat.write_text("cpu 10 0 10 80 0 0 0 0\n")
    (root / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 250 kB\n")
    host = HostFigures(tmp_path / "gone", root)
    stat.write_text("cpu 40 0 10 150 0 0 0 0\n")
    found = host.look()
    assert (found["cpuPercent"], found["memoryPercent"]) == (30.0, 75.0)
    assert "diskPercent" not in found
