"""The original agent, byte for byte, starts, restarts, reports and stops against our server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from support.boards.boards_rig import BOSS, BoardsRig, until
from support.boards.original_board_agent import OriginalBoardAgent, ProcessExit, number, text
from support.shared.h2_grpc import GrpcFailed

from fleetplane.domains.boards.access import PI_CONTROLLER
from fleetplane.domains.boards.inventory.boards import status_of
from fleetplane.domains.boards.kinds import BoardRole, BoardSilence, BoardState
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.gen.pi_controller import pi_controller_pb2_grpc

MAC, IP = "dc:a6:32:01:02:03", "10.1.2.3"
PERMISSION_DENIED = 7


@asynccontextmanager
async def agent(rig: BoardsRig, mac: str = MAC, ip: str = IP) -> AsyncIterator[OriginalBoardAgent]:
    async with OriginalBoardAgent(rig.plain_address, mac=mac, ip=ip) as made:
        yield made


def test_its_registration_is_the_bytes_that_the_contract_s_own_encoder_makes() -> None:
    original = OriginalBoardAgent("127.0.0.1:1", mac=MAC, ip=IP)

    generated = pi.CreateNodeRequest(
        name="raspberry-pi-dca632010203",
        ip_address=IP,
        mac_address=MAC,
        role=pi.NODE_ROLE_WORKER,
        architecture="arm64",
        model="raspberry-pi",
        cpu_cores=4,
    )
    again = pi.UpdateNodeRequest.FromString(original.update_request(7))

    assert original.create_request() == generated.SerializeToString(deterministic=True)
    assert again.SerializeToString(deterministic=True) == original.update_request(7)
    assert again.HasField("serial_number")
    assert again.HasField("memory")


async def test_its_first_start_registers_a_ready_board(rig: BoardsRig) -> None:
    async with agent(rig) as original:
        await original.start()

        board = rig.board(original.id)
        assert original.calls == ["CreateNode"]
        assert original.status == pi.NODE_STATUS_READY
        assert (board.spec.name, board.spec.mac_address) == ("raspberry-pi-dca632010203", MAC)
        assert (status_of(board).address, status_of(board).port) == (IP, 9091)
        assert status_of(board).plaintext
        assert status_of(board).speaks_original


async def test_its_restart_ends_as_the_same_board(rig: BoardsRig) -> None:
    async with agent(rig) as first:
        await first.start()
    async with agent(rig) as again:
        await again.start()

        assert again.calls == ["CreateNode", "ListNodes", "UpdateNode"]
        assert (again.id, again.status) == (first.id, pi.NODE_STATUS_READY)
        assert len(rig.core.boards.all()) == 1


async def test_the_blanks_of_its_restart_overwrite_nothing(rig: BoardsRig) -> None:
    async with agent(rig) as first:
        await first.start()
    known = BoardFacts(
        serial_number="s1",
        memory_bytes=8 << 30,
        os_version="Debian 12",
        kernel_version="6.6",
        role=BoardRole.MASTER,
    )
    before = await rig.core.boards.update(first.id, known, actor=BOSS)

    async with agent(rig) as again:
        await again.start()

    assert rig.board(first.id).spec == before.spec


async def test_it_finds_itself_among_hundreds_although_it_reads_one_page(rig: BoardsRig) -> None:
    for index in range(150):
        facts = BoardFacts(name=f"other-{index}", ip_address=f"10.9.{index // 200}.{index % 200}")
        await rig.core.boards.create(facts, actor=BOSS)
    async with agent(rig) as first:
        await first.start()
    async with agent(rig) as again:
        await again.start()

        assert again.id == first.id == 151


async def test_its_address_may_change_while_it_is_down(rig: BoardsRig) -> None:
    async with agent(rig) as first:
        await first.start()
    async with agent(rig, ip="10.7.7.7") as again:
        await again.start()

        assert again.id == first.id
        assert rig.board(first.id).spec.ip_address == "10.7.7.7"


async def test_its_heartbeats_are_seen_and_write_nothing(rig: BoardsRig) -> None:
    async with agent(rig) as original:
        await original.start()
        board, revision = rig.board(original.id), rig.store.revision
        seen = rig.core.presence.last_seen_ns(board)

        await original.heartbeat()
        await original.health()

        assert rig.store.revision == revision
        assert (rig.core.presence.last_seen_ns(board) or 0) > (seen or 0)


async def test_health_alone_brings_a_silent_board_back(rig: BoardsRig) -> None:
    async with agent(rig) as original:
        await original.start()
        await rig.core.boards.silence(original.id, BoardSilence.DEAD, last_seen_at_ns=None)
        assert rig.state(original.id) == BoardState.UNKNOWN

        await original.health()

        assert rig.state(original.id) == BoardState.READY


async def test_health_over_a_connection_that_never_registered_is_nobody_s(rig: BoardsRig) -> None:
    async with agent(rig) as original:
        await original.start()
        await rig.core.boards.silence(original.id, BoardSilence.STALE, last_seen_at_ns=None)
        stub = pi_controller_pb2_grpc.PiControllerServiceStub(await rig.plain_channel())

        answer = await stub.Health(pi.HealthRequest())

        assert answer.status == "ok"
        assert rig.state(original.id) == BoardState.NOT_READY


@pytest.mark.parametrize("declared", [BoardState.PROVISIONING, BoardState.FAILED, BoardState.DISCOVERED])
async def test_the_status_that_it_repeats_undoes_no_provisioning(
    rig: BoardsRig, declared: BoardState
) -> None:
    async with agent(rig) as original:
        await original.start()
        await rig.core.boards.declare(original.id, declared, actor=BOSS)

        await original.heartbeat()

        assert rig.state(original.id) == declared
    async with agent(rig) as again:
        await again.start()
        await again.heartbeat()

        assert rig.state(again.id) == declared


async def test_sigterm_is_maintenance_until_it_is_back(rig: BoardsRig) -> None:
    async with agent(rig) as original:
        await original.start()
        await original.sigterm()
        assert rig.state(original.id) == BoardState.MAINTENANCE
    async with agent(rig) as again:
        await again.start()

        assert rig.state(again.id) == BoardState.READY


async def test_its_keepalive_pings_are_answered_and_end_nothing(rig: BoardsRig) -> None:
    async with agent(rig) as original:
        await original.start()
        channel = original.channel
        assert channel is not None
        for _ in range(20):
            channel.ping()
        await until(lambda: channel.pongs == 20)

        await original.heartbeat()

        assert not channel.leaving


async def test_a_deleted_board_s_agent_ends_and_its_next_start_is_a_new_board(rig: BoardsRig) -> None:
    async with agent(rig) as original:
        await original.start()
        await rig.core.boards.delete(original.id, actor=BOSS)

        with pytest.raises(GrpcFailed, match="code 5"):
            await original.heartbeat()
    async with agent(rig) as again:
        await again.start()

        assert again.id == original.id + 1


async def test_twenty_first_starts_at_once_are_twenty_boards(rig: BoardsRig) -> None:
    agents = [
        OriginalBoardAgent(rig.plain_address, mac=f"02:00:00:00:00:{index:02x}", ip=f"10.3.0.{index}")
        for index in range(20)
    ]
    try:
        await asyncio.gather(*(one.start() for one in agents))

        assert len({one.id for one in agents}) == 20
    finally:
        await asyncio.gather(*(one.kill() for one in agents))


async def test_the_same_start_twice_at_once_is_one_board(rig: BoardsRig) -> None:
    async with agent(rig) as one, agent(rig) as other:
        await asyncio.gather(one.start(), other.start())

        assert one.id == other.id
        assert sorted([one.calls, other.calls]) == [["CreateNode"], ["CreateNode", "ListNodes", "UpdateNode"]]


async def test_without_a_certificate_nobody_speaks_for_a_board_that_has_one(rig: BoardsRig) -> None:
    member = await rig.join("secure", mac_address=MAC, ip_address=IP)

    async with agent(rig) as impostor:
        with pytest.raises(GrpcFailed) as refused:
            await impostor.start()
        assert refused.value.code == PERMISSION_DENIED
        await rig.core.boards.silence(member.number, BoardSilence.STALE, last_seen_at_ns=None)
        await impostor.health()

    assert rig.state(member.number) == BoardState.NOT_READY


async def test_a_bad_registration_ends_the_agent_with_a_word_why(rig: BoardsRig) -> None:
    async with agent(rig, mac="zz:zz") as original:
        with pytest.raises(ProcessExit, match="hardware address"):
            await original.start()


NEEDED = {
    "CreateNode",
    "GetNode",
    "ListNodes",
    "UpdateNode",
    "Health",
    "StreamAgentMetrics",
    "GetCluster",
    "ListClusters",
}


async def test_without_tls_an_agent_may_do_what_agents_do_and_no_more(rig: BoardsRig) -> None:
    refused = set()
    async with agent(rig) as original:
        await original.start()
        for method in PI_CONTROLLER.methods:
            try:
                await original._call(method.name, number(1, original.id))
            except GrpcFailed as error:
                if error.code == PERMISSION_DENIED:
                    refused.add(method.name)

    assert {method.name for method in PI_CONTROLLER.methods} - refused == NEEDED


async def test_an_operator_s_token_counts_for_nothing_without_tls(rig: BoardsRig) -> None:
    _, metadata = await rig.operator()
    stub = pi_controller_pb2_grpc.PiControllerServiceStub(await rig.plain_channel())

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.DeleteNode(pi.DeleteNodeRequest(id=1), metadata=metadata)

    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_text_of_the_hand_made_encoder_is_protobuf() -> None:
    assert pi.GetNodeRequest(id=300).SerializeToString() == number(1, 300)
    assert pi.CreateClusterRequest(name="é").SerializeToString() == text(1, "é")
