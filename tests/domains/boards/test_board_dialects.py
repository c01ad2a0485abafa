"""Which methods an agent knows is written down when it registers, and not guessed from its transport."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.boards.boards_rig import BoardsRig

from fleetplane.domains.boards.inventory.boards import status_of
from fleetplane.domains.boards.kinds import AgentDialect, BoardState, BoardStatus
from fleetplane.domains.boards.logs import relay
from fleetplane.domains.boards.wire.message_json import enum_table, filled, known
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.gen.pi_controller import pi_controller_pb2_grpc
from fleetplane.kernel.errors import InvalidArgument, Unimplemented


async def test_an_agent_of_ours_is_one_however_it_is_spoken_to_afterwards(rig: BoardsRig) -> None:
    member = await rig.join("pi-1")
    assert status_of(rig.board(member.number)).dialect is AgentDialect.FLEETPLANE
    stub: Any = pi_controller_pb2_grpc.PiControllerServiceStub(member.channel)
    again = pi.UpdateNodeRequest(
        id=member.number,
        name="pi-1",
        ip_address="192.0.2.7",
        mac_address="dc:a6:32:01:02:03",
        status=pi.NODE_STATUS_READY,
    )
    await stub.UpdateNode(again)
    assert status_of(rig.board(member.number)).dialect is AgentDialect.FLEETPLANE


async def test_who_registers_by_the_original_methods_without_a_certificate_is_original(
    rig: BoardsRig,
) -> None:
    stub: Any = pi_controller_pb2_grpc.PiControllerServiceStub(await rig.plain_channel())
    made = await stub.CreateNode(pi.CreateNodeRequest(name="pi-2", ip_address="192.0.2.8"))
    status = status_of(rig.board(made.id))
    assert status.dialect is AgentDialect.ORIGINAL
    assert status.plaintext


@pytest.mark.parametrize(
    ("dialect", "plaintext", "original"),
    [
        (None, True, True),
        (None, False, False),
        (AgentDialect.ORIGINAL, False, True),
        (AgentDialect.FLEETPLANE, True, False),
    ],
)
async def test_the_dialect_decides_what_is_asked_and_the_transport_only_without_one(
    rig: BoardsRig, dialect: AgentDialect | None, plaintext: bool, original: bool
) -> None:
    assert not BoardStatus(state=BoardState.READY).speaks_original
    member = await rig.join("pi-1")

    def step(status: BoardStatus, _now_ns: int) -> BoardStatus:
        return msgspec.structs.replace(status, dialect=dialect, plaintext=plaintext)

    board = await rig.core.boards.hear(member.number, step, actor="t")
    assert status_of(board).speaks_original is original
    assert rig.domain.nodes.pins._is_original(member.number) is original
    if original:
        with pytest.raises(Unimplemented, match="original agent"):
            relay._check(board, pb.LogFilter())
    else:
        relay._check(board, pb.LogFilter())


def test_a_message_is_filled_from_its_sources_and_a_field_without_one_is_an_error() -> None:
    class Step:
        name, message, started_at_ns, finished_at_ns = "3/install", "done", 1_500_000_000, None

    made = filled(pb.ProvisioningStep, Step, state=pb.ProvisioningStep.READY)
    assert (made.name, made.message, made.state) == ("3/install", "done", pb.ProvisioningStep.READY)
    assert (made.started_at.seconds, made.started_at.nanos) == (1, 500_000_000)
    assert not made.HasField("finished_at")
    with pytest.raises(TypeError, match="nothing fills state of ProvisioningStep"):
        filled(pb.ProvisioningStep, Step)


def test_enums_of_messages_have_the_names_of_ours() -> None:
    table = enum_table(BoardState, pi.NodeStatus, "NODE_STATUS_")
    assert table[BoardState.NOT_READY] == pi.NODE_STATUS_NOT_READY
    assert known(pi.NODE_STATUS_READY, table, "status") is BoardState.READY
    assert known(pi.NODE_STATUS_UNSPECIFIED, table, "status") is None
    with pytest.raises(InvalidArgument, match="status 99 is not known"):
        known(99, table, "status")
