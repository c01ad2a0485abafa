"""Who gets in at a node, and who may do what there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.boards.board_node_rig import LOCAL, NodeRig, configured, node_rig
from support.boards.boards_rig import BoardsRig
from support.boards.node_calls import (
    CODE,
    HIGH,
    READ,
    RELEASE,
    failing,
    gpio,
)

from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.boards import boards_pb2_grpc
from fleetplane.gen.pi_agent import pi_agent_pb2 as pi
from fleetplane.gen.pi_agent import pi_agent_pb2_grpc


async def test_both_services_health_and_reflection_answer_on_one_port(rig: NodeRig) -> None:
    channel = await rig.controller()
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(cast("Any", channel))
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = await anext(aiter(stub.ServerReflectionInfo(iter([ask]))))
    names = {service.name for service in answer.list_services_response.service}
    assert {"NodeAgent", "pi_agent.PiAgentService", "grpc.health.v1.Health"} <= names
    assert (await boards_pb2_grpc.NodeAgentStub(channel).HealthCheck(pb.Empty())).node_id == "1"
    assert (
        await pi_agent_pb2_grpc.PiAgentServiceStub(channel).AgentHealth(pi.AgentHealthRequest())
    ).status == "ok"


async def test_without_a_certificate_of_ours_nobody_gets_in(rig: NodeRig) -> None:
    from support.shared.throwaway_ca import ThrowawayCa, key_pem, make_key

    foreign, key = ThrowawayCa(), make_key("p256")
    certificate = foreign.client(key.public_key(), "boss")
    for channel in (await rig.channel(), await rig.channel(key_pem(key), certificate)):
        failure = await failing(boards_pb2_grpc.NodeAgentStub(channel).HealthCheck(pb.Empty(), timeout=60))
        assert failure.code is CODE.UNAVAILABLE


async def test_other_boards_and_other_kinds_of_agents_have_no_business_here(
    rig: NodeRig, server: BoardsRig
) -> None:
    other = await server.join("pi-2")
    board = await rig.channel(other.key.pem, other.certificate)
    stranger = await rig.certified(["fleetplane://role/instances.agent"])
    for channel in (board, stranger):
        failure = await failing(boards_pb2_grpc.NodeAgentStub(channel).HealthCheck(pb.Empty()))
        assert (failure.code, failure.cause) == (CODE.PERMISSION_DENIED, "role")


async def test_a_certificate_with_two_roles_is_none(rig: NodeRig) -> None:
    channel = await rig.certified(["fleetplane://role/boards.viewer", "fleetplane://role/boards.admin"])
    failure = await failing(boards_pb2_grpc.NodeAgentStub(channel).HealthCheck(pb.Empty()))
    assert failure.code is CODE.PERMISSION_DENIED


async def test_viewers_look_and_do_nothing_else(rig: NodeRig) -> None:
    viewer, operator = await rig.node_of("boards.viewer"), await rig.node_of("boards.operator")
    await viewer.HealthCheck(pb.Empty())
    await viewer.GetSystemMetrics(pb.Empty())
    async for _ in viewer.StreamLogs(pb.LogFilter(sources=["agent"])):
        pass
    for call in (
        viewer.ControlGPIO(gpio(state=HIGH)),
        viewer.ControlGPIO(gpio(action=RELEASE)),
        viewer.ExecuteCommand(pb.CommandRequest(command="echo", args=["x"])),
    ):
        assert (await failing(call)).code is CODE.PERMISSION_DENIED
    unclaimed = await failing(viewer.ControlGPIO(gpio(action=READ)))
    assert (unclaimed.code, unclaimed.cause) == (CODE.FAILED_PRECONDITION, "unconfigured")
    assert rig.copper.wires[18].consumer is None

    await operator.ControlGPIO(gpio(state=HIGH))
    assert (await viewer.ControlGPIO(gpio(action=READ))).state == HIGH


async def test_a_server_that_acts_for_a_viewer_may_only_look(rig: NodeRig) -> None:
    node = await rig.node()
    for_viewer = [("fleetplane-actor", "operator/eve"), ("fleetplane-role", "boards.viewer")]
    for_operator = [("fleetplane-actor", "operator/bob"), ("fleetplane-role", "boards.operator")]
    assert (
        await failing(node.ControlGPIO(gpio(state=HIGH), metadata=for_viewer))
    ).code is CODE.PERMISSION_DENIED
    await node.ControlGPIO(gpio(state=HIGH), metadata=for_operator)
    odd = await failing(node.HealthCheck(pb.Empty(), metadata=[("fleetplane-role", "boards.god")]))
    assert odd.code is CODE.PERMISSION_DENIED
    written = [entry for entry in rig.audited() if entry["event"] == "pin_write"]
    assert [entry["user"] for entry in written] == ["board-controller/main for operator/bob"]


async def test_only_a_server_is_believed_about_whom_it_acts_for(rig: NodeRig) -> None:
    operator = await rig.node_of("boards.operator")
    claims = [("fleetplane-actor", "operator/god"), ("fleetplane-role", "boards.admin")]
    await operator.ControlGPIO(gpio(state=HIGH), metadata=claims)
    assert {entry["user"] for entry in rig.audited()} == {"operator/boss"}


async def test_the_owner_can_keep_someone_out(tmp_path: Path, server: BoardsRig) -> None:
    config = configured(access={"refuse": ["operator/boss"]})
    async with node_rig(tmp_path, server, config=config) as rig:
        failure = await failing((await rig.node_of("boards.admin")).HealthCheck(pb.Empty()))
        assert (failure.code, failure.cause) == (CODE.UNAUTHENTICATED, "refused")
        await (await rig.node()).HealthCheck(pb.Empty())


async def test_the_board_is_believed_for_its_certificate_and_no_other_name(
    rig: NodeRig, server: BoardsRig
) -> None:
    from fleetplane.domains.boards.joining import credentials

    certificate, key = credentials.issue_to_self(server.kernel.authority, "main", days=1)
    secure = grpc.ssl_channel_credentials(server.kernel.authority.trust_pem, key, certificate)
    options = [("grpc.ssl_target_name_override", credentials.host_of(2))]
    async with grpc.aio.secure_channel(rig.address(rig.ports.tls), secure, options=options) as channel:
        failure = await failing(boards_pb2_grpc.NodeAgentStub(channel).HealthCheck(pb.Empty(), timeout=60))
    assert failure.code is CODE.UNAVAILABLE


async def test_plain_text_beyond_this_machine_needs_a_word_more(tmp_path: Path, server: BoardsRig) -> None:
    from fleetplane.kernel.errors import SettingsError

    config = configured(listen={**LOCAL, "plaintext": "0.0.0.0:0"})
    with pytest.raises(ExceptionGroup) as raised:
        async with node_rig(tmp_path, server, config=config):
            pass
    assert raised.group_contains(SettingsError, match="other machines")
