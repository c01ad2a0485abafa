"""Boards whose agents know no TLS: called in clear text, in the original's words, and only if that is set."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.boards.board_node_rig import NodeRig, node_rig
from support.boards.boards_rig import BoardsRig, boards_rig, until
from support.boards.boards_web import boards_web

from fleetplane.domains.boards.access import OPERATOR
from fleetplane.domains.boards.calls.channels import CallOrigin
from fleetplane.domains.boards.commands.encoding import BoardProgram
from fleetplane.domains.boards.core import BoardOptions
from fleetplane.domains.boards.metrics.history import BoardRecords, OriginalMetrics
from fleetplane.domains.boards.pins.kinds import Direction, GpioSpec, status_of
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.pi_agent import pi_agent_pb2 as pi_agent
from fleetplane.gen.pi_agent import pi_agent_pb2_grpc
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.gen.pi_controller import pi_controller_pb2_grpc
from fleetplane.kernel.commands import CommandState
from fleetplane.kernel.errors import FailedPrecondition, Unimplemented

PIN = 17
BOSS = CallOrigin(actor="operator/boss", role=OPERATOR)


@dataclass(slots=True, kw_only=True)
class Plain:
    rig: BoardsRig
    node: NodeRig
    board: int


@pytest.fixture
async def plain(tmp_path: Path) -> AsyncIterator[Plain]:
    """A board that has registered as the original agent does, and answers as one."""
    async with node_rig(tmp_path, None) as node:
        port = int(node.plain_address.rpartition(":")[2])
        async with boards_rig(tmp_path, options=BoardOptions(plain=True, agent_port=port)) as rig:
            yield Plain(rig=rig, node=node, board=await registered(rig))


async def registered(rig: BoardsRig) -> int:
    stub = pi_controller_pb2_grpc.PiControllerServiceStub(await rig.plain_channel())
    made = await stub.CreateNode(
        pi.CreateNodeRequest(name="old", ip_address="127.0.0.1", mac_address="02:00:00:00:00:01")
    )
    return int(made.id)


async def lamp(rig: BoardsRig, board: int, **more: Any) -> int:
    spec = GpioSpec(name="lamp", board=board, pin=PIN, direction=Direction.OUTPUT, **more)
    return int((await rig.domain.nodes.devices.create(spec, actor="operator/boss")).name)


async def test_an_original_agents_pins_are_driven_and_read(plain: Plain) -> None:
    driver = plain.rig.domain.nodes.driver
    device = await lamp(plain.rig, plain.board)

    await driver.write(device, 1, holder="operator/boss", asked=BOSS)

    assert plain.node.copper.wires[PIN].level() == 1
    assert (await driver.read(device, asked=BOSS)).level == 1
    await driver.write(device, 0, holder="operator/boss", asked=BOSS)
    assert plain.node.copper.wires[PIN].level() == 0


async def test_an_original_agents_pins_are_brought_back_when_it_registers_again(plain: Plain) -> None:
    rig = plain.rig
    device = await lamp(rig, plain.board)
    await rig.domain.nodes.driver.write(device, 1, holder="operator/boss", asked=BOSS)
    stub = pi_agent_pb2_grpc.PiAgentServiceStub(
        await rig.stack.enter_async_context(grpc.aio.insecure_channel(plain.node.plain_address))
    )
    await stub.WriteGPIOPin(pi_agent.WriteGPIOPinRequest(pin=PIN, value=0))
    assert plain.node.copper.wires[PIN].level() == 0

    original = pi_controller_pb2_grpc.PiControllerServiceStub(await rig.plain_channel())
    await original.UpdateNode(
        pi.UpdateNodeRequest(id=plain.board, ip_address="127.0.0.1", status=pi.NODE_STATUS_READY)
    )

    await until(lambda: plain.node.copper.wires[PIN].level() == 1)


async def test_what_an_original_agent_refuses_with_ok_is_an_error_here(plain: Plain) -> None:
    rig = plain.rig
    device = await lamp(rig, plain.board)
    plain.node.copper.occupy(PIN, "someone")

    with pytest.raises(FailedPrecondition):
        await rig.domain.nodes.driver.write(device, 1, holder="operator/boss", asked=BOSS)
    assert status_of(rig.domain.nodes.devices.require(device)).value is None


async def test_an_original_agents_health_and_metrics_are_told_in_our_words(plain: Plain) -> None:
    history = plain.rig.domain.nodes.history

    assert (await history.health(plain.board, asked=BOSS)).status == "OK"
    assert (await history.now(plain.board, asked=BOSS)).gauges["memory_usage"] > 0


async def test_original_agents_run_no_commands_and_have_no_logs(plain: Plain) -> None:
    nodes = plain.rig.domain.nodes
    issued = await nodes.commander.execute(BoardProgram(command="uptime"), [plain.board], asked=BOSS)

    (outcome,) = await nodes.commander.finished(issued)

    assert outcome.state is CommandState.FAILED
    with pytest.raises(Unimplemented):
        await anext(nodes.logs.read(plain.board, pb.LogFilter(), asked=BOSS))


# Figures and programs.


async def test_an_original_agents_figures_are_asked_for_and_kept(plain: Plain) -> None:
    nodes, core = plain.rig.domain.nodes, plain.rig.core
    telemetry = plain.rig.kernel.telemetry
    assert telemetry is not None
    asking = OriginalMetrics(
        boards=core.boards,
        links=nodes.links,
        history=nodes.history,
        intake=BoardRecords(telemetry),
        clock=plain.rig.kernel.clock,
        every_seconds=0.01,
    )
    running = asyncio.create_task(asking.run())
    try:
        async with asyncio.timeout(60):
            while not (await nodes.history.latest([plain.board]))[plain.board].keys() >= {"memory_usage"}:
                await telemetry.flush()
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
    async with boards_web(plain.rig) as web:
        told = (await web.get(f"/nodes/{plain.board}/system"))["data"]
    assert {"cpu_usage", "memory_usage", "disk_usage"} <= told.keys(), "the table shows these"


async def test_exec_on_an_original_agent_says_why_it_cannot(plain: Plain) -> None:
    commander = plain.rig.domain.nodes.commander
    command = await commander.execute(BoardProgram(command="uptime"), [plain.board], asked=BOSS)
    (outcome,) = await commander.finished(command)
    assert outcome.state is CommandState.FAILED
    assert "original agent" in outcome.detail
