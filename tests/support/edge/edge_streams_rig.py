"""Daemons' streams in this process: real store, real listener, official client, daemons made of bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from support.edge.edge_signer import BOSS, TENANT, Identity, Signer, enrolled, ok, opened_tokens, rotated

from fleetplane.domains.blueprint import prepare_both, run_both
from fleetplane.domains.edge.identity.policy import ServerKey
from fleetplane.domains.edge.identity.tokens import NodeTokens
from fleetplane.domains.edge.kinds import (
    EDGE_NODE,
    EdgeNode,
    NodeState,
    NodeStatus,
    tenant_scope,
)
from fleetplane.domains.edge.nodes.config_layers import ConfigLayers
from fleetplane.domains.edge.nodes.registry import Nodes
from fleetplane.domains.edge.streams.assembly import StreamOptions, StreamSide
from fleetplane.domains.edge.streams.call_encoding import ToolCall, ToolOutcome, decode_outcome, encode_call
from fleetplane.domains.edge.wire import envelope
from fleetplane.domains.edge.wire import envelope as userseal
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.fleetplane.edge.v1 import tolerant_pb2
from fleetplane.kernel.access import AccessTable, Principal
from fleetplane.kernel.clock import Clock, SystemClock
from fleetplane.kernel.commands import Command, CommandTarget, state_of
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.stalls import StallDetector
from fleetplane.kernel.store import Store
from fleetplane.rpc import (
    Authentication,
    CallStatistics,
    GrpcApp,
    ListenerSpec,
    MethodRow,
    MethodTable,
    open_listener,
)

DEADLINE_SECONDS = 60.0
SERVICE = "aegis.cluster.v1.NodeClusterService"
CONNECT = f"/{SERVICE}/ConnectEdge"
LISTENER = "edge"
MESSAGE_LIMIT_BYTES = 2 * 1024 * 1024
LEGACY_AGENT = ("grpc.primary_user_agent", "tonic/0.14.5")


async def until(condition: Callable[[], Any], *, seconds: float = DEADLINE_SECONDS) -> Any:
    """What the condition comes to, once that is true."""
    async with asyncio.timeout(seconds):
        while not (found := condition()):
            await asyncio.sleep(0.005)
    return found


class Daemon:
    """A daemon on the wire; what it does is up to the test."""

    def __init__(self, rig: Rig, identity: Identity, channel: grpc.aio.Channel) -> None:
        self.rig = rig
        self.identity = identity
        self.sign = Signer(identity=identity, clock=rig.clock)
        self._method: Any = channel.stream_stream(CONNECT)
        self.call: Any = None

    @property
    def node_id(self) -> str:
        return self.identity.node_id

    async def open(self, *, metadata: Any = (("x-aegis-edge-dialect", "documented"),), **wrong: Any) -> None:
        """Say hello and wait for the headers, as daemons do before they do anything else."""
        self.sign = Signer(identity=self.identity, clock=self.rig.clock)
        self.call = self._method(metadata=metadata or None)
        wrong.setdefault("digest", True)
        await self.send(hello=self.sign.hello(**wrong))
        async with asyncio.timeout(DEADLINE_SECONDS):
            await self.call.initial_metadata()

    async def open_legacy(self, **wrong: Any) -> None:
        await self.open(metadata=(), digest=False, **wrong)

    async def send(self, **event: Any) -> None:
        await self.call.write(tolerant_pb2.EdgeEvent(**event).SerializeToString())

    async def beat(self, **wrong: Any) -> None:
        await self.send(heartbeat=self.sign.heartbeat(**wrong))

    async def read_bytes(self) -> bytes:
        async with asyncio.timeout(DEADLINE_SECONDS):
            raw = await self.call.read()
        if raw is grpc.aio.EOF:
            raise EOFError(await self.call.code())
        assert isinstance(raw, bytes)
        return raw

    async def read(self) -> pb.EdgeCommand:
        return pb.EdgeCommand.FromString(await self.read_bytes())

    async def next(self, kind: str) -> Any:
        """The next command of this kind, passing over others."""
        while True:
            command = await self.read()
            if command.WhichOneof("command") == kind:
                return getattr(command, kind)

    async def ended(self) -> grpc.StatusCode:
        try:
            while True:
                await self.read_bytes()
        except (EOFError, grpc.aio.AioRpcError):
            pass
        code = await self.call.code()
        assert isinstance(code, grpc.StatusCode)
        return code

    async def refusal(self, **wrong: Any) -> tuple[grpc.StatusCode, str]:
        """How a stream was turned away, and that this was before any header."""
        metadata = wrong.pop("metadata", ())
        self.sign = Signer(identity=self.identity, clock=self.rig.clock)
        self.call = self._method(metadata=metadata or None)
        await self.send(hello=wrong.pop("hello", None) or self.sign.hello(**wrong))
        return await self.turned_away()

    async def turned_away(self) -> tuple[grpc.StatusCode, str]:
        code = await self.ended()
        assert not await self.call.initial_metadata(), "headers went out before the refusal"
        return code, await self.call.details()

    async def answer(self, command_id: str, result: bytes | None = None, **wrong: Any) -> None:
        await self.send(command_result=self.sign.result(command_id, result or ok(), **wrong))

    def leave(self) -> None:
        self.call.cancel()


@dataclass(slots=True, kw_only=True)
class Rig:
    store: Store
    clock: Clock
    side: StreamSide
    nodes: Nodes
    layers: ConfigLayers
    tokens: NodeTokens
    key: ServerKey
    address: str
    stack: AsyncExitStack

    # Records.

    async def enrol(self, tenant: str = TENANT, node_id: str = "") -> Identity:
        return await enrolled(self.store, self.tokens, self.clock, tenant=tenant, node_id=node_id)

    async def daemon(self, tenant: str = TENANT, *, legacy: bool = False) -> Daemon:
        return await self.client(await self.enrol(tenant), legacy=legacy)

    async def client(self, identity: Identity, *, legacy: bool = False) -> Daemon:
        options = [LEGACY_AGENT] if legacy else []
        options.append(("grpc.use_local_subchannel_pool", 1))  # type: ignore[arg-type]
        options.append(("grpc.max_send_message_length", 64 * 1024 * 1024))  # type: ignore[arg-type]
        channel = grpc.aio.insecure_channel(self.address, options=options)
        await self.stack.enter_async_context(channel)
        return Daemon(self, identity, channel)

    def node(self, who: Daemon | Identity) -> EdgeNode:
        identity = who.identity if isinstance(who, Daemon) else who
        found = self.store.get(EDGE_NODE, tenant_scope(identity.tenant), identity.node_id)
        assert found is not None
        return found

    def status(self, who: Daemon) -> NodeStatus:
        return self.node(who).status or NodeStatus(state=NodeState.DISCONNECTED, since_ns=0)

    def state(self, who: Daemon) -> str:
        return self.status(who).state.value

    async def rotate(self, identity: Identity, *, overlap_seconds: float) -> Identity:
        return await rotated(self.store, self.tokens, self.clock, identity, overlap_seconds=overlap_seconds)

    # Commands.

    async def issue(
        self,
        *daemons: Daemon,
        tool: str = "cmd.run",
        deadline_seconds: float = 60.0,
        args_json: bytes = b'{"command": "true", "count": 3}',
        **options: Any,
    ) -> Command:
        tenant = daemons[0].identity.tenant
        call = ToolCall(
            tool=tool,
            args_json=args_json,
            security_context="zaru-free",
            tenant=tenant,
            actor=BOSS,
            deadline_seconds=deadline_seconds,
        )
        options.setdefault("repeatable", False)
        options.setdefault("run_for_seconds", self.side.dispatcher.policy.run_for_seconds(deadline_seconds))
        return await self.side.dispatcher.ledger.issue(
            tenant_scope(tenant),
            tool,
            [daemon.node_id for daemon in daemons],
            actor=BOSS,
            payload=encode_call(call),
            **options,
        )

    def target(self, command: Command, daemon: Daemon) -> CommandTarget:
        found = self.side.dispatcher.ledger.targets(command)
        return next(one for one in found if one.spec.target == daemon.node_id)

    def outcome(self, command: Command, daemon: Daemon) -> str:
        return state_of(self.target(command, daemon)).value

    def kept(self, command: Command, daemon: Daemon) -> ToolOutcome:
        status = self.target(command, daemon).status
        assert status is not None
        return decode_outcome(status.result)

    # What the server signed.

    def check_seals(self, raw: bytes, daemon: Daemon) -> None:
        """As a daemon of ours does."""
        command = pb.EdgeCommand.FromString(raw)
        proof = command.envelope
        public = Ed25519PublicKey.from_public_bytes(self.key.public_key)
        public.verify(proof.signature, proof.payload)
        body = raw.removesuffix(pb.EdgeCommand(envelope=proof).SerializeToString())
        assert envelope.covers_command(proof.payload, daemon.node_id, daemon.sign.stream_id, body)
        if command.HasField("invoke_tool"):
            call = command.invoke_tool
            public.verify(call.seal_envelope.signature, userseal.canonical(call))


@asynccontextmanager
async def streams_rig(
    folder: Path,
    *,
    clock: Clock | None = None,
    options: StreamOptions | None = None,
    attention: StallDetector | None = None,
    runs: bool = True,
    shared: bool = False,
) -> AsyncIterator[Rig]:
    """Without `runs` the listener is open and the controllers are for the test to run, as a server starts.

    `shared`: as on one of several servers on one database, but for what is written beside the log.
    """
    clock = clock or SystemClock()
    async with opened_tokens(folder, clock) as (store, tokens, key):
        store.shared = shared
        revocations = Revocations(store, clock)
        layers = ConfigLayers(store)
        side = StreamSide(
            store,
            clock,
            tokens=tokens,
            key=key,
            revocations=revocations,
            layers=layers,
            options=options,
            attention=attention,
        )
        side.last_heard._heard = None
        await prepare_both(side)
        app = _app(side, clock)
        spec = ListenerSpec(name=LISTENER, addresses=("127.0.0.1:0",), app=app)
        async with open_listener(spec, grace_seconds=2) as listener, asyncio.TaskGroup() as tasks:
            running = None
            if runs:
                running = tasks.create_task(side.run_here() if shared else run_both(side))
            async with AsyncExitStack() as channels:
                yield Rig(
                    store=store,
                    clock=clock,
                    side=side,
                    nodes=Nodes(store, clock, revocations),
                    layers=layers,
                    tokens=tokens,
                    key=key,
                    address=listener.addresses[0].removeprefix("http://"),
                    stack=channels,
                )
                side.drain()
                await app.drain(2)
            if running is not None:
                running.cancel()


def _app(side: StreamSide, clock: Clock) -> GrpcApp:
    row = MethodRow(
        path=CONNECT,
        listener=LISTENER,
        authentication=Authentication.ANONYMOUS,
        permission=None,
        max_request_bytes=MESSAGE_LIMIT_BYTES,
        cut_oversized=True,
    )
    app = GrpcApp(
        listener=LISTENER,
        table=MethodTable([row]),
        access=AccessTable({}),
        authenticators={
            Authentication.ANONYMOUS: lambda _connection: Principal(name="anonymous", roles=frozenset())
        },
        clock=clock,
        statistics=CallStatistics(),
    )
    handler: Any = grpc.stream_stream_rpc_method_handler(side.streams.connect)
    app.add_registered_method_handlers(SERVICE, {"ConnectEdge": handler})
    app.seal()
    return app
