"""A board's agent that takes commands and answers when it is let."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import grpc
from support.boards.boards_rig import BoardsRig, Member

from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.boards import boards_pb2_grpc


class SlowNode(boards_pb2_grpc.NodeAgentServicer):
    """Takes commands and answers when it is let."""

    def __init__(self) -> None:
        self.under_way = 0
        self.most = 0
        self.seen: list[tuple[pb.CommandRequest, dict[str, str]]] = []
        self.let_go = asyncio.Event()
        self.answer = pb.CommandResponse(success=True, stdout=b"ok")

    async def ExecuteCommand(self, request: pb.CommandRequest, context: Any) -> pb.CommandResponse:
        self.seen.append((request, dict(context.invocation_metadata())))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.let_go.wait()
        finally:
            self.under_way -= 1
        return self.answer


async def served(
    rig: BoardsRig, member: Member, servicer: SlowNode, *, stack: AsyncExitStack | None = None
) -> None:
    """Until the rig ends, or the stack that is given: an agent outlives its server."""
    server = grpc.aio.server()
    boards_pb2_grpc.add_NodeAgentServicer_to_server(servicer, server)
    own = grpc.ssl_server_credentials(
        [(member.key.pem, member.certificate)], rig.kernel.authority.trust_pem, require_client_auth=True
    )
    port = server.add_secure_port("127.0.0.1:0", own)
    await server.start()
    (stack or rig.stack).push_async_callback(server.stop, None)
    name = rig.board(member.number).spec.name
    await member.control.RegisterNode(pb.NodeRegistration(name=name, agent_port=port))
