"""A log stream that nobody reads makes its board wait, and nothing piles up at the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
from support.boards.boards_rig import BoardsRig, Member

from fleetplane.domains.boards.calls.channels import CallOrigin, NodeLinks
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.boards import boards_pb2_grpc

LINE_BYTES = 4096
READ_LINES = 4000
"""Read at full speed first: that is when a window would grow."""
HELD_LIMIT_BYTES = 512 * 1024
"""On both sides: the window, and what the board's library has taken over for sending."""
QUIET_SECONDS = 0.5


class Chatterbox(boards_pb2_grpc.NodeAgentServicer):
    """Logs as fast as it is let."""

    def __init__(self) -> None:
        self.sent = 0

    async def StreamLogs(self, _filter: pb.LogFilter, _context: object) -> AsyncIterator[pb.LogEntry]:
        while True:
            yield pb.LogEntry(message="x" * LINE_BYTES)
            self.sent += 1


async def serving(rig: BoardsRig, member: Member, servicer: Chatterbox) -> None:
    server = grpc.aio.server()
    boards_pb2_grpc.add_NodeAgentServicer_to_server(servicer, server)
    own = grpc.ssl_server_credentials(
        [(member.key.pem, member.certificate)], rig.kernel.authority.trust_pem, require_client_auth=True
    )
    port = server.add_secure_port("127.0.0.1:0", own)
    await server.start()
    rig.stack.push_async_callback(server.stop, None)
    await member.control.RegisterNode(pb.NodeRegistration(name="chatterbox", agent_port=port))


async def test_a_log_that_nobody_reads_waits_at_the_board(rig: BoardsRig) -> None:
    member, servicer = await rig.join("chatterbox"), Chatterbox()
    await serving(rig, member, servicer)
    links = NodeLinks(
        boards=rig.core.boards,
        authority=rig.kernel.authority,
        revocations=rig.kernel.revocations,
        clock=rig.kernel.clock,
        own_name="test",
        plain=False,
    )
    rig.stack.push_async_callback(links.close)
    entries = links.stream(
        member.number,
        lambda link: link.node.StreamLogs,
        pb.LogFilter(follow=True),
        pb.LogEntry,
        asked=CallOrigin(actor="operator/boss"),
    )
    async with aclosing(entries):
        for _ in range(READ_LINES):
            await anext(entries)

        sent = -1
        async with asyncio.timeout(60):
            while sent != servicer.sent:
                sent = servicer.sent
                await asyncio.sleep(QUIET_SECONDS)

    assert (sent - READ_LINES) * LINE_BYTES < HELD_LIMIT_BYTES
