"""Logs and figures of boards through the server: passed on as they come, resumed, bounded, kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.boards.board_node_rig import NodeRig, configured, node_rig
from support.boards.boards_rig import BoardsRig, Member, until

from fleetplane.domains.boards.calls.channels import CallOrigin
from fleetplane.domains.boards.inventory.boards import status_of
from fleetplane.domains.boards.logs import relay as logs_relay
from fleetplane.fleet.figures import Stretch
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.boards import boards_pb2_grpc
from fleetplane.gen.pi_agent import pi_agent_pb2 as pi_agent
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable

ASKED = CallOrigin(actor="operator/boss")
NS = 1_000_000_000


class Chronicle(boards_pb2_grpc.NodeAgentServicer):
    """A board whose log is a list, and which can be cut off."""

    def __init__(self) -> None:
        self.lines = [f"line {number}" for number in range(10)]
        self.asked: list[pb.LogFilter] = []
        self.cut_after: int | None = None
        self.open = 0
        self.more = asyncio.Event()

    async def StreamLogs(self, wanted: pb.LogFilter, context: Any) -> AsyncIterator[pb.LogEntry]:
        self.asked.append(wanted)
        self.open += 1
        try:
            at = int(wanted.cursor) + 1 if wanted.cursor else 0
            sent = 0
            while True:
                while at < len(self.lines):
                    if self.cut_after is not None and sent >= self.cut_after:
                        self.cut_after = None
                        await context.abort(grpc.StatusCode.UNAVAILABLE, "the cable was pulled")
                    yield pb.LogEntry(message=self.lines[at], cursor=str(at), dropped=int(at == 3))
                    at, sent = at + 1, sent + 1
                if not wanted.follow:
                    return
                self.more.clear()
                await self.more.wait()
        finally:
            self.open -= 1

    async def GetSystemMetrics(self, _request: pb.Empty, _context: Any) -> pb.SystemMetrics:
        return pb.SystemMetrics(cpu_usage=12.5, unavailable=["temperature"])


async def served(rig: BoardsRig, member: Member, servicer: Chronicle) -> grpc.aio.Server:
    server = grpc.aio.server()
    boards_pb2_grpc.add_NodeAgentServicer_to_server(servicer, server)
    own = grpc.ssl_server_credentials(
        [(member.key.pem, member.certificate)], rig.kernel.authority.trust_pem, require_client_auth=True
    )
    port = server.add_secure_port("127.0.0.1:0", own)
    await server.start()
    rig.stack.push_async_callback(server.stop, None)
    name = rig.board(member.number).spec.name
    await member.control.RegisterNode(pb.NodeRegistration(name=name, agent_port=port))
    return server


@pytest.fixture
async def chronicle(rig: BoardsRig) -> tuple[int, Chronicle]:
    member, servicer = await rig.join("chronicle"), Chronicle()
    await served(rig, member, servicer)
    return member.number, servicer


async def read(rig: BoardsRig, board: int, wanted: pb.LogFilter, count: int = 1000) -> list[pb.LogEntry]:
    found: list[pb.LogEntry] = []
    async with aclosing(rig.domain.nodes.logs.read(board, wanted, asked=ASKED)) as entries:
        async for entry in entries:
            found.append(entry)
            if len(found) == count:
                break
    return found


async def test_a_log_is_read_to_its_end_and_its_losses_are_counted(
    rig: BoardsRig, chronicle: tuple[int, Chronicle]
) -> None:
    board, servicer = chronicle

    found = await read(rig, board, pb.LogFilter(contains="line", tail_lines=50))

    assert [entry.message for entry in found] == servicer.lines
    assert servicer.asked[0].contains == "line"
    assert servicer.asked[0].tail_lines == 50
    numbers = rig.domain.nodes.logs.statistics()
    assert (numbers.entries, numbers.dropped, numbers.readers) == (10, 1, 0)


async def test_a_followed_log_goes_on_after_the_last_entry_when_the_connection_breaks(
    rig: BoardsRig, chronicle: tuple[int, Chronicle]
) -> None:
    board, servicer = chronicle
    servicer.cut_after = 4

    found = await read(rig, board, pb.LogFilter(follow=True), count=10)

    assert [entry.message for entry in found] == servicer.lines, "nothing twice, nothing missing"
    assert [asked.cursor for asked in servicer.asked] == ["", "3"]
    assert rig.domain.nodes.logs.statistics().resumed == 1


async def test_a_log_that_is_not_followed_ends_with_an_error_that_says_where_to_go_on(
    rig: BoardsRig, chronicle: tuple[int, Chronicle]
) -> None:
    board, servicer = chronicle
    servicer.cut_after = 4

    with pytest.raises(Unavailable) as error:
        await read(rig, board, pb.LogFilter())

    assert error.value.details["cursor"] == "3"


async def test_a_reader_that_leaves_ends_its_stream_at_the_board(
    rig: BoardsRig, chronicle: tuple[int, Chronicle]
) -> None:
    board, servicer = chronicle

    await read(rig, board, pb.LogFilter(follow=True), count=3)

    await until(lambda: servicer.open == 0)
    assert rig.domain.nodes.logs.statistics().readers == 0


async def test_a_board_has_so_many_readers_and_no_more(
    rig: BoardsRig, chronicle: tuple[int, Chronicle]
) -> None:
    board, _ = chronicle
    async with AsyncExitStack() as stack:
        for _ in range(logs_relay.READERS_PER_BOARD):
            entries = rig.domain.nodes.logs.read(board, pb.LogFilter(follow=True), asked=ASKED)
            await stack.enter_async_context(aclosing(entries))
            await anext(entries)

        with pytest.raises(ResourceExhausted):
            await read(rig, board, pb.LogFilter())
    assert rig.domain.nodes.logs.statistics().refused == 1
    assert len(await read(rig, board, pb.LogFilter())) == 10, "and then there is room again"


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (pb.LogFilter(tail_lines=10_001), "tail_lines"),
        (pb.LogFilter(tail_lines=-1), "tail_lines"),
        (pb.LogFilter(regex="a" * 1025), "regex"),
        (pb.LogFilter(contains="a" * 1025), "contains"),
        (pb.LogFilter(units=["u"] * 33), "units"),
        (pb.LogFilter(sources=["s" * 257]), "sources"),
    ],
)
async def test_a_hostile_filter_is_refused_before_a_board_is_asked(
    rig: BoardsRig, chronicle: tuple[int, Chronicle], wanted: pb.LogFilter, field: str
) -> None:
    board, servicer = chronicle

    with pytest.raises(InvalidArgument) as error:
        await read(rig, board, wanted)

    assert error.value.field == field
    assert servicer.asked == []


async def test_an_unknown_board_has_no_log(rig: BoardsRig) -> None:
    with pytest.raises(NotFound):
        await read(rig, 77, pb.LogFilter())


# Figures.


@pytest.fixture
async def node(rig: BoardsRig, tmp_path: Path) -> AsyncIterator[NodeRig]:
    async with node_rig(tmp_path, rig, config=configured()) as made:
        await until(lambda: status_of(rig.board(number_of(made))).port == made.ports.agent_port)
        yield made


def number_of(node: NodeRig) -> int:
    assert node.membership is not None
    return node.membership.node_id


async def test_a_real_agents_own_log_metrics_and_health_are_reached(rig: BoardsRig, node: NodeRig) -> None:
    history, board = rig.domain.nodes.history, number_of(node)
    node.parts.ring.add("info", {"event": "the kettle boils"})

    found = await read(rig, board, pb.LogFilter(sources=["agent"], contains="kettle"))
    measured = await history.now(board, asked=ASKED)
    health = await history.health(board, asked=ASKED)
    nested = await history.nested(board, asked=ASKED)

    assert [entry.message for entry in found] == ["the kettle boils"]
    assert measured.gauges["memory_usage"] > 0
    assert health.status in ("OK", "DEGRADED")
    assert health.gpio_available
    assert nested.memory.total_bytes > 0


async def test_what_boards_report_becomes_history(rig: BoardsRig) -> None:
    first, second = await rig.join("first"), await rig.join("second")
    now_ns = rig.kernel.clock.now_ns()
    for step, usage in enumerate((10.0, 30.0)):
        for member in (first, second):
            at = now_ns - (1 - step) * 10 * NS
            metrics = pb.SystemMetrics(
                cpu_usage=usage,
                memory_usage=50.0,
                unavailable=["temperature"],
                interfaces=[pb.NetworkInterface(name="eth0", bytes_sent=1000 * (step + 1))],
            )
            metrics.timestamp.FromNanoseconds(at)
            await member.control.ReportHealth(pb.HealthReport(metrics=metrics, sequence=step + 1))
    assert rig.kernel.telemetry is not None
    await rig.kernel.telemetry.flush()
    history = rig.domain.nodes.history
    stretch = Stretch(from_ns=now_ns - 60 * NS, to_ns=now_ns + 60 * NS, step_seconds=120.0)

    (bucket,) = await history.over([first.number], "cpu_usage", stretch)
    assert (bucket.count, bucket.lowest, bucket.highest, bucket.average) == (2, 10.0, 30.0, 20.0)
    (both,) = await history.over([first.number, second.number], "cpu_usage", stretch)
    assert both.count == 4
    grown = await history.growth([first.number], "network/eth0/bytes_sent", stretch)
    assert grown == {first.number: 1000.0}
    latest = await history.latest([first.number, second.number])
    assert latest[first.number]["cpu_usage"].value == 30.0
    assert "temperature" not in latest[first.number], "what could not be read is not 0"


async def test_samples_that_an_agent_streams_become_history_too(rig: BoardsRig) -> None:
    member = await rig.join("streamer")

    async def samples() -> AsyncIterator[pi.AgentMetricsRequest]:
        yield pi.AgentMetricsRequest(
            metrics=pi_agent.SystemMetrics(cpu=pi_agent.CPUMetrics(usage_percent=77.0))
        )

    answer = await member.original.StreamAgentMetrics(samples())
    assert answer.success
    assert rig.kernel.telemetry is not None
    await rig.kernel.telemetry.flush()

    latest = await rig.domain.nodes.history.latest([member.number])

    assert latest[member.number]["cpu_usage"].value == 77.0


@pytest.mark.parametrize(
    ("stretch", "field"),
    [
        (Stretch(from_ns=10, to_ns=10), "from"),
        (Stretch(from_ns=0, to_ns=10**15, step_seconds=1), "step"),
        (Stretch(from_ns=0, to_ns=10**9, step_seconds=-1), "step"),
    ],
)
def test_a_stretch_that_makes_no_sense_is_refused(stretch: Stretch, field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        stretch.width_ns()
    assert error.value.field == field


async def test_a_board_that_is_gone_cannot_be_measured(rig: BoardsRig) -> None:
    member, servicer = await rig.join("gone"), Chronicle()
    server = await served(rig, member, servicer)
    assert (await rig.domain.nodes.history.now(member.number, asked=ASKED)).gauges["cpu_usage"] == 12.5
    await server.stop(None)

    with pytest.raises(Unavailable):
        await rig.domain.nodes.history.now(member.number, asked=ASKED)


async def test_a_followed_file_is_read_on_when_the_boards_agent_was_restarted(
    rig: BoardsRig, tmp_path: Path
) -> None:
    app = tmp_path / "app.log"
    app.write_text("one\n")
    wanted = pb.LogFilter(sources=["file:app"], follow=True, tail_lines=100)
    found: list[str] = []

    async def follow(board: int) -> None:
        async with aclosing(rig.domain.nodes.logs.read(board, wanted, asked=ASKED)) as entries:
            async for entry in entries:
                if entry.message:
                    found.append(entry.message)  # noqa: PERF401  # seen as they come

    config = configured(logs={"files": {"app": str(app)}})
    async with asyncio.TaskGroup() as tasks:
        async with node_rig(tmp_path, rig, config=config) as first:
            await until(lambda: status_of(rig.board(number_of(first))).port == first.ports.agent_port)
            reading = tasks.create_task(follow(number_of(first)))
            await until(lambda: found == ["one"])
        with app.open("a") as more:
            more.write("two\n")
        async with node_rig(tmp_path, rig, config=config):
            with app.open("a") as more:
                more.write("three\n")
            await until(lambda: found == ["one", "two", "three"])
            reading.cancel()
    assert rig.domain.nodes.logs.statistics().resumed == 1
