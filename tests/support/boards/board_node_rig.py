"""A board's agent in this process, on real ports with real certificates, its pins simulated."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import structlog
from support.boards.boards_rig import DEADLINE_SECONDS, BoardKey, BoardsRig, until

from fleetplane.domains.boards.agent import config as node_config
from fleetplane.domains.boards.agent.assembly import BoardAgentParts, introduced_now, run_node
from fleetplane.domains.boards.agent.config import BoardAgentConfig
from fleetplane.domains.boards.agent.gpio.drivers import SimulatedBoard
from fleetplane.domains.boards.agent.gpio.hardware_thread import HardwareThread
from fleetplane.domains.boards.agent.grpc.listeners import Ports
from fleetplane.domains.boards.agent.logs.logs import LogRing
from fleetplane.domains.boards.agent.membership import BoardIdentityFolder, Membership
from fleetplane.domains.boards.agent.registration import Joiner
from fleetplane.domains.boards.joining import credentials
from fleetplane.gen.boards import boards_pb2_grpc
from fleetplane.gen.pi_agent import pi_agent_pb2_grpc
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.identity import LeafProfile, LeafUsage
from fleetplane.rpc import Listener

LOCAL = {"addresses": ["127.0.0.1"], "port": 0}

# Simulated pins answer when their thread has its turn.
_defaults = HardwareThread.__init__.__kwdefaults__
assert _defaults is not None
assert "call_seconds" in _defaults
_defaults["call_seconds"] = DEADLINE_SECONDS


def configured(**sections: Mapping[str, Any]) -> BoardAgentConfig:
    """Loopback and free ports, and simulated pins, unless said otherwise."""
    document: dict[str, Any] = {"listen": LOCAL, "gpio": {"driver": "simulated"}, "node": {"name": "pi-1"}}
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section}
    return node_config.decode(document)


@dataclass(slots=True, kw_only=True)
class NodeRig:
    parts: BoardAgentParts
    copper: SimulatedBoard
    ports: Ports
    membership: Membership | None
    server: BoardsRig | None
    stack: contextlib.AsyncExitStack = field(repr=False)

    @property
    def folder(self) -> BoardIdentityFolder:
        return self.parts.folder

    def address(self, listener: Listener | None) -> str:
        assert listener is not None
        return listener.addresses[0].partition("://")[2]

    @property
    def plain_address(self) -> str:
        return self.address(self.ports.plain)

    async def channel(
        self, key_pem: bytes | None = None, certificate: bytes | None = None
    ) -> grpc.aio.Channel:
        assert self.server is not None
        assert self.membership is not None
        options = [
            ("grpc.ssl_target_name_override", credentials.host_of(self.membership.node_id)),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        secure = grpc.ssl_channel_credentials(self.server.kernel.authority.trust_pem, key_pem, certificate)
        made = grpc.aio.secure_channel(self.address(self.ports.tls), secure, options=options)
        return await self.stack.enter_async_context(made)

    async def controller(self, name: str = "main") -> grpc.aio.Channel:
        """As the server itself calls boards."""
        assert self.server is not None
        certificate, key = credentials.issue_to_self(self.server.kernel.authority, name, days=1)
        return await self.channel(key, certificate)

    async def operator(self, role: str, name: str = "boss") -> grpc.aio.Channel:
        return await self.certified([f"fleetplane://role/{role}"], name)

    async def certified(self, uris: list[str], name: str = "someone") -> grpc.aio.Channel:
        assert self.server is not None
        key = BoardKey()
        profile = LeafProfile(usage=LeafUsage.CLIENT, common_name=name, uri=tuple(uris), ttl_hours=1)
        issued = self.server.kernel.authority.issue_leaf(key.key.public_key(), profile)
        return await self.channel(key.pem, issued.certificate_pem)

    async def node(self) -> Any:
        return boards_pb2_grpc.NodeAgentStub(await self.controller())

    async def pi(self) -> Any:
        return pi_agent_pb2_grpc.PiAgentServiceStub(await self.controller())

    async def node_of(self, role: str) -> Any:
        return boards_pb2_grpc.NodeAgentStub(await self.operator(role))

    def audited(self) -> list[dict[str, Any]]:
        import json

        if not self.folder.audit.exists():
            return []
        return [json.loads(line) for line in self.folder.audit.read_text().splitlines()]


def make_parts(
    folder: Path, config: BoardAgentConfig, copper: SimulatedBoard, **more: Any
) -> BoardAgentParts:
    clock = more.pop("clock", None) or SystemClock()
    identity = BoardIdentityFolder(folder)
    identity.make()
    return BoardAgentParts(
        folder=identity,
        config=config,
        version="test",
        clock=clock,
        log=structlog.get_logger(),
        ring=LogRing(clock, run="test"),
        open_chip=copper.open,
        **more,
    )


async def joined(parts: BoardAgentParts, server: BoardsRig, **wanted: Any) -> Membership:
    me = introduced_now(parts, server.address)
    joiner = Joiner(parts.folder, parts.clock)
    return await joiner.join(await server.token(**wanted), server.address, me)


@contextlib.asynccontextmanager
async def node_rig(
    folder: Path,
    server: BoardsRig | None,
    *,
    config: BoardAgentConfig | None = None,
    copper: SimulatedBoard | None = None,
    parts: BoardAgentParts | None = None,
    opened: list[Ports] | None = None,
) -> AsyncIterator[NodeRig]:
    """A member of the server's fleet; without one, a node that serves its own machine in plain text."""
    if config is None:
        config = configured() if server else configured(listen={**LOCAL, "plaintext": "127.0.0.1:0"})
    copper = copper or SimulatedBoard()
    opened = [] if opened is None else opened
    parts = parts or make_parts(folder / "node", config, copper, opened=opened.append)
    membership = await asyncio.to_thread(parts.folder.load_membership)
    if server is not None and membership is None:
        membership = await joined(parts, server)
    async with asyncio.TaskGroup() as tasks, contextlib.AsyncExitStack() as stack:
        running = tasks.create_task(run_node(parts))
        try:
            await until(lambda: opened or running.done())
            if running.done():
                running.result()
            yield NodeRig(
                parts=parts, copper=copper, ports=opened[0], membership=membership, server=server, stack=stack
            )
        finally:
            await stack.aclose()
            running.cancel()
