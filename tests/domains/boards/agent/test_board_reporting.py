"""How a board's agent keeps its server informed, renews, and lives without it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from board_node_rig import configured, joined, make_parts, node_rig
from board_relay import Relay
from boards_rig import BOSS, BoardsRig, boards_rig, until

from fleetplane.domains.boards.agent import link
from fleetplane.domains.boards.agent.assembly import Parts, introduced_now
from fleetplane.domains.boards.agent.gpio.port import Direction
from fleetplane.domains.boards.agent.gpio.simulated import SimulatedBoard
from fleetplane.domains.boards.agent.identity_folder import Membership
from fleetplane.domains.boards.agent.registration import Joiner
from fleetplane.domains.boards.core import BoardOptions
from fleetplane.domains.boards.registry import status_of
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.boards import boards_pb2_grpc
from fleetplane.kernel.errors import (
    FailedPrecondition,
)

FAST = BoardOptions(plain=True, heartbeat_seconds=1.0)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[BoardsRig]:
    async with boards_rig(tmp_path, options=FAST) as made:
        yield made


async def test_reports_arrive_with_figures_and_a_goodbye(server: BoardsRig, tmp_path: Path) -> None:
    async with node_rig(tmp_path, server) as rig:
        await until(lambda: server.board(1).conditions)
        status = status_of(server.board(1))
        assert status.port == rig.ports.agent_port
        assert "gpio" in status.capabilities
        assert status.boot_id
        first = server.core.presence._sightings[1].sequence
        await until(lambda: server.core.presence._sightings[1].sequence > first)
        assert {condition.type for condition in server.board(1).conditions} >= {"gpio", "disk", "certificate"}
    assert server.state(1) == "maintenance"


async def test_every_start_registers_once_and_then_only_what_changed(
    server: BoardsRig, tmp_path: Path
) -> None:
    listen = {"addresses": ["127.0.0.1"], "port": await free_port()}
    parts = make_parts(tmp_path / "node", configured(listen=listen), SimulatedBoard())
    labelled = configured(listen=listen, node={"name": "pi-1", "labels": {"a": "b"}})

    def count(method: str) -> int:
        return server.kernel.calls.method("boards", f"/ControlPlane/{method}").finished.get(0, 0)

    async def run_for_three_reports(parts: Parts) -> int:
        """How often it registered meanwhile."""
        registered, reported = count("RegisterNode"), count("ReportHealth")
        async with running(parts):
            await until(lambda: count("ReportHealth") > reported + 2)
            return count("RegisterNode") - registered

    await joined(parts, server)
    assert await run_for_three_reports(parts) == 1
    assert await run_for_three_reports(parts) == 1  # so that the server sees to its pins
    assert await run_for_three_reports(replace(parts, config=labelled)) == 1
    assert server.board(1).labels == {"a": "b"}


async def test_what_changes_while_it_runs_is_registered(server: BoardsRig, tmp_path: Path) -> None:
    copper = SimulatedBoard()
    async with node_rig(tmp_path, server, copper=copper) as rig:
        await until(lambda: "gpio" in status_of(server.board(1)).capabilities)
        copper.unplug()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await (await rig.node()).ControlGPIO(pb.GPIORequest(pin=18, state=pb.GPIORequest.HIGH))
        await until(lambda: "gpio" not in status_of(server.board(1)).capabilities)


def membership_of(parts: Parts) -> Membership:
    membership = parts.folder.load_membership()
    assert membership is not None
    return membership


@contextlib.asynccontextmanager
async def running(parts: Parts) -> AsyncIterator[asyncio.Task[None]]:
    from fleetplane.domains.boards.agent.assembly import run_node

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run_node(parts))
        try:
            yield task
        finally:
            task.cancel()


async def free_port() -> int:
    async def nobody(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    listening = await asyncio.start_server(nobody, "127.0.0.1", 0)
    port: int = listening.sockets[0].getsockname()[1]
    listening.close()
    await listening.wait_closed()
    return port


async def test_a_certificate_with_a_third_of_its_life_left_is_renewed_in_place(tmp_path: Path) -> None:
    # Certificates begin five minutes before they are issued, so a third of this one's life begins in 3 s.
    options = BoardOptions(plain=True, heartbeat_seconds=1.0, certificate_days=(150 + 1.5 * 3) / 86_400)
    async with boards_rig(tmp_path, options=options) as server, node_rig(tmp_path, server) as rig:
        before = rig.folder.credentials()
        node = await rig.node()
        await node.HealthCheck(pb.Empty())

        await until(lambda: rig.folder.credentials().serial != before.serial, seconds=20)

        after = rig.folder.credentials()
        assert after.key_pem == before.key_pem
        assert after.life.ends > before.life.ends
        await node.HealthCheck(pb.Empty())  # what is open goes on
        shown = await until_shown(rig.address(rig.ports.tls), after.serial)
        assert shown == after.serial
        certificates = len(server.core.certificates.all())
        await asyncio.sleep(2.5)
        assert len(server.core.certificates.all()) == certificates == 2


async def until_shown(address: str, serial: str) -> str:
    from cryptography import x509

    host, port = link.endpoint(address)
    async with asyncio.timeout(15):
        while True:
            chain = await asyncio.to_thread(link._shown_by, host, port)
            found = f"{x509.load_der_x509_certificate(chain[0]).serial_number:x}"
            if found == serial:
                return found
            await asyncio.sleep(0.05)


async def test_alone_it_serves_on_makes_pins_safe_once_and_tells_everything_later(tmp_path: Path) -> None:
    """The server goes, and comes back at the same place."""
    (tmp_path / "server").mkdir()
    config = configured(
        report={"loss_after_seconds": 2},
        gpio={"pins": [{"pin": 18, "safe_on_loss": True}, {"pin": 23}]},
        commands={"profiles": [{"name": "d", "rules": [{"program": "/usr/bin/id"}]}]},
    )
    copper = SimulatedBoard()
    relay = Relay()
    async with boards_rig(tmp_path / "server", options=FAST) as server, relay.to(server.address):
        parts = make_parts(tmp_path / "node", config, copper)
        me = introduced_now(parts, relay.address)
        await Joiner(parts.folder, parts.clock).join(await server.token(), relay.address, me)
        opened: list[Any] = []
        async with node_rig(
            tmp_path, server, copper=copper, parts=replace(parts, opened=opened.append), opened=opened
        ) as rig:
            node = await rig.node()
            await until(lambda: server.state(1) == "ready" and server.board(1).conditions)
            for pin in (18, 23):
                await node.ControlGPIO(pb.GPIORequest(pin=pin, state=pb.GPIORequest.HIGH))

            await relay.cut()
            await until(lambda: copper.wires[18].direction is Direction.INPUT)

            assert copper.wires[23].level() == 1
            assert (await node.ExecuteCommand(pb.CommandRequest(command="id"))).success
            assert (await node.ControlGPIO(pb.GPIORequest(pin=18, state=pb.GPIORequest.HIGH))).success
            await asyncio.sleep(1.5)
            assert copper.wires[18].level() == 1  # said once a loss
            known = server.core.presence._sightings[1].sequence

            await relay.mend()
            await until(lambda: server.core.presence._sightings[1].sequence > known, seconds=30)
            lost = [entry for entry in rig.audited() if entry["event"] == "safe_state_applied"]
            assert [entry["pin"] for entry in lost] == [18]


async def test_without_an_identity_nothing_is_opened(tmp_path: Path) -> None:
    parts = make_parts(tmp_path / "node", configured(), SimulatedBoard())
    with pytest.raises(ExceptionGroup) as raised:
        async with running(parts) as task:
            await task
    assert raised.group_contains(FailedPrecondition, match="no identity")


async def test_a_board_whose_certificate_ran_out_comes_back_by_its_key_and_an_approval(
    tmp_path: Path,
) -> None:
    options = BoardOptions(plain=True, heartbeat_seconds=1.0, certificate_days=1 / 86_400)
    async with boards_rig(tmp_path, options=options) as server:
        parts = make_parts(tmp_path / "node", configured(), SimulatedBoard())
        await joined(parts, server)
        await until(lambda: parts.folder.credentials().life.ends < parts.clock.now_ns() / 1e9)
        server.core.enrolment._days = 1.0
        async with running(parts):
            (pending,) = await until(server.core.approvals.all)
            assert parts.folder.credentials().life.ends < parts.clock.now_ns() / 1e9  # nobody let it in yet
            await server.core.approvals.approve(pending.name, actor=BOSS)
            await until(lambda: server.board(1).conditions, seconds=30)
        assert parts.folder.credentials().life.ends > parts.clock.now_ns() / 1e9 + 3600


async def test_a_board_that_was_deleted_is_told_so_and_serves_on(server: BoardsRig, tmp_path: Path) -> None:
    async with node_rig(tmp_path, server) as rig:
        await until(lambda: server.board(1).conditions)
        await server.core.boards.delete(1, actor=BOSS)
        stub = boards_pb2_grpc.NodeAgentStub(await rig.controller())
        assert (await stub.HealthCheck(pb.Empty())).node_id == "1"
