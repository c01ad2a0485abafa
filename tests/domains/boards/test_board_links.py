"""The channels to boards: how many, to whom, with which certificate, and what happens to them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from cryptography import x509
from support.boards.boards_rig import BoardsRig, Member, until

from fleetplane.domains.boards.calls import channels as node_link
from fleetplane.domains.boards.calls.channels import CallOrigin, NodeLinks
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.boards import boards_pb2_grpc
from fleetplane.kernel.errors import PermissionDenied, ResourceExhausted, Unavailable

ASKED = CallOrigin(actor="operator/boss")


class Node(boards_pb2_grpc.NodeAgentServicer):
    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.let_go.set()
        self.callers: list[str] = []
        self.issuers: list[str] = []
        self.under_way = 0

    async def HealthCheck(self, _request: pb.Empty, context: Any) -> pb.HealthStatus:
        names = context.auth_context()["x509_subject_alternative_name"]
        self.callers.append(",".join(name.decode() for name in names))
        shown = x509.load_pem_x509_certificate(context.auth_context()["x509_pem_cert"][0])
        issuer = shown.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
        self.issuers.append((issuer or b"").hex())
        self.under_way += 1
        try:
            await self.let_go.wait()
        finally:
            self.under_way -= 1
        return pb.HealthStatus(status="OK")


async def serve(rig: BoardsRig, member: Member, node: Node) -> grpc.aio.Server:
    server = grpc.aio.server()
    boards_pb2_grpc.add_NodeAgentServicer_to_server(node, server)
    own = grpc.ssl_server_credentials(
        [(member.key.pem, member.certificate)], rig.kernel.authority.trust_pem, require_client_auth=True
    )
    port = server.add_secure_port("127.0.0.1:0", own)
    await server.start()
    rig.stack.push_async_callback(server.stop, None)
    name = rig.board(member.number).spec.name
    await member.control.RegisterNode(pb.NodeRegistration(name=name, agent_port=port))
    return server


def make_links(rig: BoardsRig, **more: Any) -> NodeLinks:
    links = NodeLinks(
        boards=rig.core.boards,
        authority=rig.kernel.authority,
        revocations=rig.kernel.revocations,
        clock=rig.kernel.clock,
        own_name="main",
        **more,
    )
    rig.stack.push_async_callback(links.close)
    return links


async def ask(links: NodeLinks, board: int, seconds: float = 60.0) -> str:
    answer = await links.call(
        board, lambda link: link.node.HealthCheck, pb.Empty(), pb.HealthStatus, asked=ASKED, seconds=seconds
    )
    return answer.status


async def test_the_server_shows_a_controllers_certificate(rig: BoardsRig) -> None:
    node, member, links = Node(), await rig.join("pi"), make_links(rig)
    await serve(rig, member, node)

    assert await ask(links, member.number) == "OK"

    assert node.callers == ["fleetplane://role/boards.controller,fleetplane://boards/controller/main"]


async def test_the_channel_unused_for_longest_makes_room(rig: BoardsRig) -> None:
    links = make_links(rig, channels_limit=2)
    members = [await rig.join(f"pi-{number}") for number in range(3)]
    for member in members:
        await serve(rig, member, Node())
    for member in members:
        assert await ask(links, member.number) == "OK"

    assert links.statistics().channels == 2
    assert await ask(links, members[0].number) == "OK", "it is opened again when it is needed"


async def test_when_all_channels_are_busy_the_next_board_has_to_wait(rig: BoardsRig) -> None:
    links, busy = make_links(rig, channels_limit=1), Node()
    first, second = await rig.join("first"), await rig.join("second")
    await serve(rig, first, busy)
    await serve(rig, second, Node())
    busy.let_go.clear()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask(links, first.number))
        await until(lambda: busy.under_way)
        with pytest.raises(Unavailable):
            await ask(links, second.number)
        busy.let_go.set()
    assert await ask(links, second.number) == "OK"


async def test_one_board_has_so_many_calls_at_once(rig: BoardsRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_link, "IN_FLIGHT_LIMIT", 2)
    links, node, member = make_links(rig), Node(), await rig.join("pi")
    await serve(rig, member, node)
    node.let_go.clear()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(ask(links, member.number))
        await until(lambda: node.under_way == 2)
        with pytest.raises(ResourceExhausted):
            await ask(links, member.number)
        node.let_go.set()


async def test_a_dropped_channel_lets_its_calls_end(rig: BoardsRig) -> None:
    links, node, member = make_links(rig), Node(), await rig.join("pi")
    await serve(rig, member, node)
    node.let_go.clear()
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(ask(links, member.number))
        await until(lambda: node.under_way)
        links.drop(member.number)
        assert links.statistics().channels == 1, "until the call has ended"
        node.let_go.set()
    assert asking.result() == "OK"
    assert links.statistics().channels == 0


async def test_a_board_that_does_not_answer_costs_no_more_than_the_deadline(rig: BoardsRig) -> None:
    links, node, member = make_links(rig), Node(), await rig.join("pi")
    await serve(rig, member, node)
    assert await ask(links, member.number) == "OK"  # its channel is open
    node.let_go.clear()

    with pytest.raises(Unavailable) as error:
        await ask(links, member.number, seconds=0.2)

    assert error.value.reason == "BOARD_SILENT"
    assert links.statistics().lost == 1
    await until(lambda: node.under_way == 0)


async def test_a_board_that_moved_is_found_at_its_new_place(rig: BoardsRig) -> None:
    links, first, second, member = make_links(rig), Node(), Node(), await rig.join("pi")
    server = await serve(rig, member, first)
    await ask(links, member.number)
    await server.stop(None)
    await serve(rig, member, second)

    assert await ask(links, member.number) == "OK"
    assert len(second.callers) == 1


async def test_boards_are_still_reached_after_the_authority_was_replaced(rig: BoardsRig) -> None:
    links, member = make_links(rig), await rig.join("pi")
    await rig.kernel.authority.announce(actor="operator/boss")
    node, before = Node(), rig.kernel.authority.key_id
    await serve(rig, member, node)  # it trusts both by now
    assert await ask(links, member.number) == "OK"
    await rig.kernel.authority.switch(actor="operator/boss")

    assert await ask(links, member.number) == "OK"

    assert node.issuers == [before, rig.kernel.authority.key_id]


async def test_a_board_without_tls_is_not_called_unless_that_is_set(rig: BoardsRig) -> None:
    from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
    from fleetplane.gen.pi_controller import pi_controller_pb2_grpc

    links = make_links(rig, plain=False)
    stub = pi_controller_pb2_grpc.PiControllerServiceStub(await rig.plain_channel())
    board = await stub.CreateNode(pi.CreateNodeRequest(name="old", ip_address="127.0.0.1"))

    with pytest.raises(PermissionDenied) as error:
        await ask(links, board.id)

    assert error.value.details["cause"] == "plaintext"


async def test_nobody_there_is_an_error_and_not_a_wait(rig: BoardsRig) -> None:
    links, member = make_links(rig), await rig.join("pi")
    server = await serve(rig, member, Node())
    await server.stop(None)

    with pytest.raises(Unavailable) as error:
        await ask(links, member.number)
    assert error.value.reason == "BOARD_UNREACHABLE"
    with pytest.raises(Unavailable, match="nothing was sent"):
        await links.reach(member.number, seconds=0.3)
