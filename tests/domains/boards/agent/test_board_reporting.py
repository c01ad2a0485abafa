"""How a board's agent keeps its server informed, renews, and lives without it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import randrange
from typing import Any

import grpc
import pytest
from support.boards.board_node_rig import configured, joined, make_parts, node_rig
from support.boards.board_relay import Relay
from support.boards.boards_rig import BOSS, BoardsRig, boards_rig, until

from fleetplane.domains.boards.agent import registration as link
from fleetplane.domains.boards.agent import reporter
from fleetplane.domains.boards.agent.assembly import BoardAgentParts, introduced_now
from fleetplane.domains.boards.agent.gpio.chip import LineDirection
from fleetplane.domains.boards.agent.gpio.drivers import SimulatedBoard
from fleetplane.domains.boards.agent.membership import Membership
from fleetplane.domains.boards.agent.registration import Joiner
from fleetplane.domains.boards.core import BoardOptions
from fleetplane.domains.boards.inventory.boards import status_of
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.boards import boards_pb2_grpc
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import (
    FailedPrecondition,
)

FAST = BoardOptions(plain=True, heartbeat_seconds=1.0)


class JumpingClock(SystemClock):
    """The machine's, which a test may put forward under those who sleep by it."""

    ahead_seconds = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_seconds

    async def sleep(self, seconds: float) -> None:
        end = self.monotonic() + seconds
        while (left := end - self.monotonic()) > 0:
            await asyncio.sleep(min(left, 0.05))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[BoardsRig]:
    async with boards_rig(tmp_path, options=FAST) as made:
        yield made


async def test_reports_arrive_with_figures_and_a_goodbye(
    server: BoardsRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "GOODBYE_SECONDS", 60.0)
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
    # An address of its own: nobody else takes the port before it listens, or between two runs.
    own = f"127.{randrange(1, 255)}.{randrange(256)}.{randrange(1, 255)}"
    listen = {"addresses": [own], "port": await free_port(own)}
    parts = make_parts(tmp_path / "node", configured(listen=listen), SimulatedBoard())
    labelled = configured(listen=listen, node={"name": "pi-1", "labels": {"a": "b"}})

    def count(method: str) -> int:
        return server.kernel.calls.method("boards", f"/ControlPlane/{method}").finished.get(0, 0)

    async def run_for_three_reports(parts: BoardAgentParts) -> int:
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


async def test_the_name_chosen_at_joining_holds_whatever_the_machine_is_called(
    server: BoardsRig, tmp_path: Path
) -> None:
    chosen, machine = configured(node={"name": "attic"}), configured(node={"name": ""})
    parts = make_parts(tmp_path / "node", chosen, SimulatedBoard())
    await joined(parts, server)

    async with running(replace(parts, config=machine)):
        await until(lambda: server.board(1).conditions)
        assert server.board(1).spec.name == "attic"

    await server.core.boards.update(1, BoardFacts(name="cellar"), actor=BOSS)
    before = server.board(1).revision
    async with running(replace(parts, config=chosen)):
        await until(lambda: status_of(server.board(1)).state.value == "ready")
        await until(lambda: server.board(1).revision > before)
        assert server.board(1).spec.name == "cellar", "an operator's later word counts too"


def _reports(server: BoardsRig, number: int) -> bool:
    return bool(server.board(number).conditions)


async def test_boards_with_the_same_hostname_are_all_online(server: BoardsRig, tmp_path: Path) -> None:
    machine = configured(node={"name": ""})  # both have the hostname of this machine
    async with contextlib.AsyncExitStack() as stack:
        for name in ("attic", "cellar"):
            parts = make_parts(tmp_path / name, configured(node={"name": name}), SimulatedBoard())
            await joined(parts, server)
            await stack.enter_async_context(running(replace(parts, config=machine)))
        for number in (1, 2):
            await until(partial(_reports, server, number))
        assert [server.board(number).spec.name for number in (1, 2)] == ["attic", "cellar"]
        await until(lambda: [server.state(number) for number in (1, 2)] == ["ready", "ready"])


async def test_what_changes_while_it_runs_is_registered(server: BoardsRig, tmp_path: Path) -> None:
    copper = SimulatedBoard()
    async with node_rig(tmp_path, server, copper=copper) as rig:
        await until(lambda: "gpio" in status_of(server.board(1)).capabilities)
        copper.unplug()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await (await rig.node()).ControlGPIO(pb.GPIORequest(pin=18, state=pb.GPIORequest.HIGH))
        await until(lambda: "gpio" not in status_of(server.board(1)).capabilities)


def membership_of(parts: BoardAgentParts) -> Membership:
    membership = parts.folder.load_membership()
    assert membership is not None
    return membership


@contextlib.asynccontextmanager
async def running(parts: BoardAgentParts) -> AsyncIterator[asyncio.Task[None]]:
    from fleetplane.domains.boards.agent.assembly import run_node

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run_node(parts))
        try:
            yield task
        finally:
            task.cancel()


async def free_port(address: str) -> int:
    async def nobody(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    listening = await asyncio.start_server(nobody, address, 0)
    port: int = listening.sockets[0].getsockname()[1]
    listening.close()
    await listening.wait_closed()
    return port


async def test_a_certificate_with_a_third_of_its_life_left_is_renewed_in_place(tmp_path: Path) -> None:
    # Certificates begin five minutes before they are issued, so a third of this one's life begins in 3 s.
    options = BoardOptions(plain=True, heartbeat_seconds=1.0, certificate_days=(150 + 1.5 * 3) / 86_400)
    opened: list[Any] = []
    parts = make_parts(tmp_path / "node", configured(), SimulatedBoard(), opened=opened.append)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(boards_rig(tmp_path, options=options))
        await joined(parts, server)
        before = parts.folder.credentials()
        server.core.enrolment.certificate_days = 1.0  # the next is not to be renewed soon
        rig = await stack.enter_async_context(node_rig(tmp_path, server, parts=parts, opened=opened))
        node = await rig.node()
        await node.HealthCheck(pb.Empty())

        await until(lambda: rig.folder.credentials().serial != before.serial, seconds=60)

        after = rig.folder.credentials()
        assert after.key_pem == before.key_pem
        assert after.life.end > before.life.end
        await node.HealthCheck(pb.Empty())  # what is open goes on
        shown = await until_shown(rig.address(rig.ports.tls), after.serial)
        assert shown == after.serial
        certificates = len(server.core.certificates.all())
        await asyncio.sleep(2.5)
        assert len(server.core.certificates.all()) == certificates == 2


async def until_shown(address: str, serial: str) -> str:
    from cryptography import x509

    host, port = link.endpoint(address)
    async with asyncio.timeout(60):
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
        report={"loss_after_seconds": 600},
        gpio={"pins": [{"pin": 18, "safe_on_loss": True}, {"pin": 23}]},
        commands={"profiles": [{"name": "d", "rules": [{"program": "/usr/bin/id"}]}]},
    )
    copper = SimulatedBoard()
    relay = Relay()
    async with boards_rig(tmp_path / "server", options=FAST) as server, relay.to(server.address):
        clock = JumpingClock()
        parts = make_parts(tmp_path / "node", config, copper, clock=clock)
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
            # By then an answer that was under way has arrived: it would be heard after the jump.
            await until(lambda: server.state(1) != "ready")
            clock.ahead_seconds = 601
            await until(lambda: copper.wires[18].direction is LineDirection.INPUT)

            assert copper.wires[23].level() == 1
            assert (await node.ExecuteCommand(pb.CommandRequest(command="id"))).success
            assert (await node.ControlGPIO(pb.GPIORequest(pin=18, state=pb.GPIORequest.HIGH))).success
            await asyncio.sleep(1.5)
            assert copper.wires[18].level() == 1  # said once a loss
            known = server.core.presence._sightings[1].sequence

            await relay.mend()
            clock.ahead_seconds += 60  # the longest pause between two attempts
            await until(lambda: server.core.presence._sightings[1].sequence > known, seconds=60)
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
        await until(lambda: parts.folder.credentials().life.end < parts.clock.now_ns() / 1e9)
        server.core.enrolment.certificate_days = 1.0
        async with running(parts):
            (pending,) = await until(server.core.approvals.all)
            assert parts.folder.credentials().life.end < parts.clock.now_ns() / 1e9  # nobody let it in yet
            await server.core.approvals.approve(pending.name, actor=BOSS)
            await until(lambda: server.board(1).conditions, seconds=60)
        assert parts.folder.credentials().life.end > parts.clock.now_ns() / 1e9 + 3600


async def test_a_board_that_was_deleted_is_told_so_and_serves_on(server: BoardsRig, tmp_path: Path) -> None:
    async with node_rig(tmp_path, server) as rig:
        await until(lambda: server.board(1).conditions)
        await server.core.boards.delete(1, actor=BOSS)
        stub = boards_pb2_grpc.NodeAgentStub(await rig.controller())
        assert (await stub.HealthCheck(pb.Empty())).node_id == "1"
