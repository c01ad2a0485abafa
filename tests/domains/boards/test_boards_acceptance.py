"""What boards promise, point by point: a real server, real agents and the original programs, as processes.

Details of each point have tests of their own in this folder; here a point fails if it is broken where a
user would meet it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from support.boards.boards_processes import (
    BoardProcess,
    Certified,
    Place,
    boards_place,
    config_of,
    refused,
    until,
)
from support.boards.original_board_agent import OriginalBoardAgent, dial
from support.boards.original_controller import OriginalClient

from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.boards import boards_pb2_grpc
from fleetplane.gen.pi_agent import pi_agent_pb2 as pi_agent
from fleetplane.gen.pi_agent import pi_agent_pb2_grpc
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.gen.pi_controller import pi_controller_pb2_grpc

CRITICAL_PINS = (0, 1, 2, 3, 14, 15)
LOG_LINES = 20_000
HIGH = pb.GPIORequest.HIGH


@pytest.fixture
def node(board: BoardProcess, controller: Certified) -> Iterator[Any]:
    """The board's agent, as a server calls it."""
    with board.channel(controller) as channel:
        yield boards_pb2_grpc.NodeAgentStub(channel)


@pytest.fixture
def plain(board: BoardProcess) -> Iterator[Any]:
    """The board's agent, as the original programs call it."""
    with grpc.insecure_channel(board.listens("node-plain")) as channel:
        yield pi_agent_pb2_grpc.PiAgentServiceStub(channel)


def raw(channel: grpc.Channel, path: str, request: Any, answer: type[Any]) -> Any:
    """A call with one service's path and another's messages."""
    call: Any = channel.unary_unary(path)
    return answer.FromString(call(request.SerializeToString(), timeout=60))


def test_1_all_services_answer_on_their_two_ports_and_reflection_lists_them(
    place: Place, board: BoardProcess, controller: Certified, node: Any
) -> None:
    with controller.channel(place.address) as channel:
        found = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert {"ControlPlane", "pi_controller.PiControllerService"} <= set(found)
        boards_pb2_grpc.ControlPlaneStub(channel).SyncClusterState(pb.ClusterStateRequest())
        pi_controller_pb2_grpc.PiControllerServiceStub(channel).Health(pi.HealthRequest())
    with board.channel(controller) as channel:
        found = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert {"NodeAgent", "pi_agent.PiAgentService"} <= set(found)
        health = pi_agent_pb2_grpc.PiAgentServiceStub(channel).AgentHealth(pi_agent.AgentHealthRequest())
    assert health.status == "ok"
    assert node.HealthCheck(pb.Empty()).node_id == str(board.number)


def test_2_the_original_messages_and_the_documented_ones_are_the_same_bytes(
    place: Place, board: BoardProcess, controller: Certified, plain: Any
) -> None:
    with board.channel(controller) as channel:
        write = pi_agent.WriteGPIOPinRequest(pin=17, value=1)
        done = raw(channel, "/NodeAgent/ControlGPIO", write, pi_agent.SetGPIOPWMResponse)
        health = raw(channel, "/NodeAgent/HealthCheck", pb.Empty(), pi_agent.AgentHealthResponse)
    assert (done.success, done.pin) == (True, 17)
    assert plain.ReadGPIOPin(pi_agent.ReadGPIOPinRequest(pin=17)).value == 1
    assert health.gpio_available
    assert health.version

    cluster = place.did("POST", "/clusters", {"name": "bytes"})
    with controller.channel(place.address) as channel:
        listed = raw(
            channel, "/ControlPlane/SyncClusterState", pb.ClusterStateRequest(), pi.ListClustersResponse
        )
    assert (cluster["id"], "bytes") in [(one.id, one.name) for one in listed.clusters]
    member = place.certified("reports-in-bytes", purpose="board")
    with member.channel(place.address) as channel:
        report = pi.UpdateNodeRequest(id=member.number, status=pi.NODE_STATUS_READY, kernel_version="6.6.31")
        raw(channel, "/ControlPlane/ReportHealth", report, pb.Empty)
    assert place.node(member.number)["kernel_version"] == "6.6.31"


def test_3_the_original_agent_restarts_as_the_same_board_and_harms_no_record(place: Place) -> None:
    address = place.server.address("boards-plain", "http").removeprefix("http://")

    async def life(calls: list[str]) -> int:
        async with OriginalBoardAgent(address, mac="dc:a6:32:00:00:03", ip="10.3.3.3") as agent:
            await agent.start()
            await agent.heartbeat()
            assert agent.calls[: len(calls)] == calls
            return agent.id

    number = asyncio.run(life(["CreateNode"]))
    known = {"serial_number": "s3", "memory": 4 << 30, "os_version": "Debian 12", "status": "provisioning"}
    place.did("PUT", f"/nodes/{number}", known)

    assert asyncio.run(life(["CreateNode", "ListNodes", "UpdateNode"])) == number
    kept = place.node(number)
    assert {name: kept[name] for name in known} == known


def test_3_the_original_client_runs_its_whole_demonstration_against_our_agent(board: BoardProcess) -> None:
    async def demonstration() -> list[str]:
        async with dial(board.listens("node-plain")) as channel:
            return await OriginalClient(channel).demo(pin=12)

    lines = asyncio.run(demonstration())
    assert lines[:6] == ["health ok", "configured True", "read 1", "read 0", "read 1", "pwm True"]
    assert "pin 12 direction 2" in lines


def test_4_pins_are_guarded_leased_never_exhausted_and_low_without_a_server(
    board: BoardProcess, node: Any, plain: Any, place: Place
) -> None:
    for pin in CRITICAL_PINS:
        with refused(grpc.StatusCode.PERMISSION_DENIED):
            node.ControlGPIO(pb.GPIORequest(pin=pin, state=HIGH))
        output = pi_agent.AGENT_GPIO_DIRECTION_OUTPUT
        assert not plain.ConfigureGPIOPin(pi_agent.ConfigureGPIOPinRequest(pin=pin, direction=output)).success

    mine = pb.GPIORequest(pin=22, state=HIGH, lease_id="mine")
    claimed = node.ControlGPIO(mine, metadata=[("fleetplane-lease-seconds", "3600")])
    assert claimed.state == HIGH
    with refused(grpc.StatusCode.ABORTED):
        node.ControlGPIO(pb.GPIORequest(pin=22, lease_id="another's"))
    for _ in range(1000):
        assert node.ControlGPIO(pb.GPIORequest(pin=22, action=pb.GPIORequest.READ)).state == HIGH

    waved = node.ControlGPIO(
        pb.GPIORequest(pin=18, action=pb.GPIORequest.PWM, pwm_frequency=1000, pwm_duty_cycle=25)
    )
    assert waved.success
    assert (waved.pwm_frequency, waved.pwm_duty_cycle) == (1000, 25)


def test_4_a_pin_is_safe_soon_after_its_board_lost_the_server(tmp_path: Path) -> None:
    def level(stub: Any) -> int:
        pins = stub.ListConfiguredPins(pi_agent.ListConfiguredPinsRequest()).pins
        return next((one.value for one in pins if one.pin == 26), -1)

    arguments = ("--plaintext-listen", "127.0.0.1:0")
    with (
        boards_place(tmp_path, "--set", "boards.heartbeat_seconds=1") as place,
        place.board("alone", config=config_of(tmp_path), arguments=arguments) as board,
        grpc.insecure_channel(board.listens("node-plain")) as channel,
    ):
        stub: Any = pi_agent_pb2_grpc.PiAgentServiceStub(channel)
        with board.channel(place.certified("second-server")) as secure:
            node: Any = boards_pb2_grpc.NodeAgentStub(secure)

            def driven() -> bool:
                node.ControlGPIO(pb.GPIORequest(pin=26, state=HIGH))
                return level(stub) == 1

            until(driven, "the pin is high, though a server that stands still may count as lost meanwhile")
        place.server.process.send_signal(signal.SIGKILL)

        until(lambda: level(stub) != 1, "the pin is safe")


def test_5_metrics_come_at_once_and_say_what_the_machine_does(node: Any) -> None:
    took = []
    for _ in range(20):
        begun = time.perf_counter()
        metrics = node.GetSystemMetrics(pb.Empty())
        took.append(time.perf_counter() - begun)
    assert min(took) < 0.15, "less than it takes to measure"
    states = metrics.detail.processes
    assert states.total > 0
    assert states.running + states.sleeping + states.stopped + states.zombie > 0
    cpu = metrics.detail.cpu
    shares = cpu.user_percent + cpu.system_percent + cpu.idle_percent + cpu.iowait_percent
    assert 0 < shares <= 101, "the rest are interrupts, and what other machines of the host took"
    assert 0 < metrics.memory_usage < 100
    assert metrics.HasField("power") or "power" in metrics.unavailable


def test_6_a_board_runs_only_what_its_owner_allows_ends_what_nobody_waits_for_and_both_sides_know(
    place: Place, board: BoardProcess, node: Any
) -> None:
    for command, arguments in (("/bin/sh", ["-c", "id"]), ("echo", ["a", "b"]), ("/tmp/echo", ["a"])):
        with refused(grpc.StatusCode.PERMISSION_DENIED):
            node.ExecuteCommand(pb.CommandRequest(command=command, args=arguments))
    said = node.ExecuteCommand(pb.CommandRequest(command="/bin/echo", args=["$(id); `id` | id > /tmp/x"]))
    assert said.stdout == b"$(id); `id` | id > /tmp/x\n"

    flood = node.ExecuteCommand(
        pb.CommandRequest(
            command="/usr/bin/head", args=["-c", "9000000", "/dev/zero"], max_output_bytes=1 << 20
        )
    )
    assert flood.stdout_truncated
    assert len(flood.stdout) <= 1 << 20

    length = f"{60 + os.getpid() / 1e6:.6f}"  # a process that can be told from all others
    running = node.ExecuteCommand.future(pb.CommandRequest(command="/bin/sleep", args=[length]))
    until(lambda: processes_with(length), "it runs")
    running.cancel()
    until(lambda: not processes_with(length), "it was ended")

    said = place.did("POST", f"/nodes/{board.number}/exec", {"command": "/bin/echo", "args": ["both sides"]})
    assert said["stdout"] == "both sides\n", said
    with contextlib.closing(sqlite3.connect(place.data / "fleetplane.db")) as database:
        here = [bytes(entry).decode() for (entry,) in database.execute("select entry from audit")]
    assert any('"token/boss"' in entry and said["command_id"] in entry for entry in here)
    there = [entry for entry in board.audited() if entry.get("request_id") == said["command_id"]]
    assert {entry["event"] for entry in there} == {"command_begun", "command_ended"}
    assert {entry["on_behalf_of"] for entry in there} == {"token/boss"}


def processes_with(argument: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if argument.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def test_7_logs_resume_count_what_was_lost_and_reach_no_other_file(place: Place, node: Any) -> None:
    file = place.folder / "app.log"
    for source in ("file:/etc/passwd", "file:../etc/passwd", "/etc/passwd", "file:app/../../etc/passwd"):
        with refused(grpc.StatusCode.INVALID_ARGUMENT):
            list(node.StreamLogs(pb.LogFilter(sources=[source])))

    with file.open("a") as log:
        log.write("".join(f"first {index}\n" for index in range(10)))
    first = list(node.StreamLogs(pb.LogFilter(sources=["file:app"], contains="first", tail_lines=4)))
    assert [entry.message for entry in first] == [f"first {index}" for index in range(6, 10)]
    again = list(node.StreamLogs(pb.LogFilter(sources=["file:app"], cursor=first[1].cursor)))
    assert [entry.message for entry in again] == ["first 8", "first 9"]

    following = node.StreamLogs(
        pb.LogFilter(sources=["file:app"], cursor=first[-1].cursor, follow=True, contains="flood")
    )
    received = dropped = 0
    with file.open("a") as log:
        log.write("flood begins\n")
        log.flush()
        assert next(following).message == "flood begins"
        # Nobody reads now, while more comes than any buffer on the way holds.
        for _ in range(20):
            log.write("".join(f"flood {'x' * 200}\n" for _ in range(LOG_LINES // 20)))
            log.flush()
            time.sleep(0.05)
        log.write("flood ends\n")
    for entry in following:
        received, dropped = received + 1, dropped + entry.dropped
        if entry.message == "flood ends":
            break
    following.cancel()
    assert received + dropped == LOG_LINES + 1
