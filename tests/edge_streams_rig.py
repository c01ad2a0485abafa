"""Daemons' streams in this process: real store, real listener, official client, daemons made of bytes."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fleetplane.domains.edge import envelope, userseal
from fleetplane.domains.edge.calls import ToolCall, ToolOutcome, decode_outcome, encode_call
from fleetplane.domains.edge.config_layers import CONFIG_LAYER, ConfigLayers
from fleetplane.domains.edge.envelope import EventKind
from fleetplane.domains.edge.kinds import (
    BLACKLISTED,
    EDGE_NODE,
    KINDS,
    NODE_CLAIM,
    EdgeNode,
    NodeSpec,
    NodeState,
    NodeStatus,
    tenant_scope,
)
from fleetplane.domains.edge.nodes import Nodes
from fleetplane.domains.edge.server_key import ServerKey
from fleetplane.domains.edge.stream_side import StreamOptions, StreamSide
from fleetplane.domains.edge.tokens import NodeTokens, blacklist
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.fleetplane.edge.v1 import legacy_pb2, tolerant_pb2
from fleetplane.kernel.access import AccessTable, Principal
from fleetplane.kernel.clock import Clock, SystemClock
from fleetplane.kernel.commands import COMMAND, COMMAND_TARGET, Command, CommandTarget, state_of
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.revocation import REVOCATION, Revocations
from fleetplane.kernel.reconcile import LEASE
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Draft, Store, StoreSettings
from fleetplane.rpc import (
    Authentication,
    CallStatistics,
    GrpcApp,
    ListenerSpec,
    MethodRow,
    MethodTable,
    open_listener,
)

DEADLINE_SECONDS = 15.0
SERVICE = "aegis.cluster.v1.NodeClusterService"
CONNECT = f"/{SERVICE}/ConnectEdge"
LISTENER = "edge"
MESSAGE_LIMIT_BYTES = 16 * 1024 * 1024
TENANT = "acme"
BOSS = "user/boss"
TOKEN_SECONDS = 86_400.0
STORED: list[AnyKind] = [*KINDS, CONFIG_LAYER, COMMAND, COMMAND_TARGET, REVOCATION, LEASE]
LEGACY_AGENT = ("grpc.primary_user_agent", "tonic/0.14.5")


async def until(condition: Callable[[], Any], *, seconds: float = DEADLINE_SECONDS) -> Any:
    """What the condition comes to, once that is true."""
    async with asyncio.timeout(seconds):
        while not (found := condition()):
            await asyncio.sleep(0.005)
    return found


@dataclass(slots=True, kw_only=True)
class Identity:
    """What a daemon has on its disk."""

    node_id: str
    tenant: str
    key: Ed25519PrivateKey
    token: str
    token_id: str

    @property
    def public_key(self) -> bytes:
        return self.key.public_key().public_bytes_raw()


@dataclass(slots=True, kw_only=True)
class Signer:
    """Makes events of one stream; everything about them can be wrong on request."""

    identity: Identity
    clock: Clock
    stream_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    ahead_ms: int = 0
    plain: bool = False
    """Sign payloads that are not in the canonical layout."""

    def envelope(self, proper: EventKind, inner: bytes = b"", **wrong: Any) -> pb.SealNodeEnvelope:
        me = self.identity
        at_ms = self.clock.now_ns() // 1_000_000 + self.ahead_ms + wrong.pop("ahead_ms", 0)
        canonical = envelope.encode(
            wrong.pop("kind", proper), at_ms, wrong.pop("node_id", me.node_id),
            wrong.pop("stream_id", self.stream_id), inner,
        )  # fmt: skip
        payload = b"whatever" if self.plain else canonical
        key = wrong.pop("key", me.key)
        signature = wrong.pop("signature", None) or key.sign(payload)
        token = wrong.pop("token", me.token)
        assert not wrong, wrong
        return pb.SealNodeEnvelope(node_security_token=token, signature=signature, payload=payload)

    def hello(
        self, *, digest: bool = False, capabilities: bytes | None = None, **wrong: Any
    ) -> tolerant_pb2.Hello:
        said = CAPABILITIES.SerializeToString() if capabilities is None else capabilities
        inner = wrong.pop("inner", envelope.capabilities_inner(said) if digest else b"")
        return tolerant_pb2.Hello(
            envelope=self.envelope(EventKind.HELLO, inner, **wrong),
            capabilities=said,
            stream_id=self.stream_id,
        )

    def heartbeat(self, inner: bytes = b"", **wrong: Any) -> tolerant_pb2.Heartbeat:
        return tolerant_pb2.Heartbeat(envelope=self.envelope(EventKind.HEARTBEAT, inner, **wrong))

    def result(
        self, command_id: str, result: bytes, *, digest: bool = True, **wrong: Any
    ) -> tolerant_pb2.CommandResult:
        inner = wrong.pop("inner", envelope.result_inner(command_id, result if digest else None))
        return tolerant_pb2.CommandResult(
            envelope=self.envelope(EventKind.COMMAND_RESULT, inner, **wrong),
            command_id=command_id, result=result,
        )  # fmt: skip

    def chunk(self, command_id: str, chunk: pb.Chunk, **wrong: Any) -> tolerant_pb2.CommandProgress:
        raw = chunk.SerializeToString()
        inner = wrong.pop("inner", envelope.progress_inner(command_id, raw))
        return tolerant_pb2.CommandProgress(
            envelope=self.envelope(EventKind.COMMAND_PROGRESS, inner, **wrong),
            command_id=command_id, chunk=raw,
        )  # fmt: skip

    def line(
        self, command_id: str, text: bytes, *, sequence: int, stderr: bool = False, **wrong: Any
    ) -> tolerant_pb2.CommandProgress:
        """Output as daemons in the field send it."""
        inner = envelope.short_progress_inner(command_id, sequence=sequence, stderr=stderr, chunk=text)
        made = tolerant_pb2.CommandProgress(
            envelope=self.envelope(EventKind.COMMAND_PROGRESS, wrong.pop("inner", inner), **wrong),
            command_id=command_id, chunk=text,
        )  # fmt: skip
        if sequence:
            made.sequence = sequence
        if stderr:
            made.stderr = True
        return made

    def update(self, capabilities: pb.EdgeCapabilities, **wrong: Any) -> tolerant_pb2.CapabilityUpdate:
        said = capabilities.SerializeToString()
        inner = wrong.pop("inner", envelope.capabilities_inner(said))
        return tolerant_pb2.CapabilityUpdate(
            envelope=self.envelope(EventKind.CAPABILITY_UPDATE, inner, **wrong), capabilities=said
        )


CAPABILITIES = pb.EdgeCapabilities(os="linux", arch="x86_64", local_tools=["shell", "git"])


def ok(exit_code: int = 0, stdout: bytes = b"") -> bytes:
    made = pb.EdgeResult(ok=pb.EdgeResult.Ok(exit_code=exit_code))
    if stdout:
        made.ok.payload.Pack(tolerant_pb2.ToolOutput(stdout=stdout))
    return made.SerializeToString()


def legacy(**fields: Any) -> bytes:
    return legacy_pb2.LegacyEdgeResult(**fields).SerializeToString()


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

    async def open(self, *, metadata: Any = (("x-aegis-edge-dialect", "seed"),), **wrong: Any) -> None:
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
        self, *daemons: Daemon, tool: str = "cmd.run", deadline_seconds: float = 60.0, **options: Any
    ) -> Command:
        tenant = daemons[0].identity.tenant
        call = ToolCall(
            tool=tool, args_json=json.dumps({"command": "true", "count": 3}).encode(),
            security_context="zaru-free", tenant=tenant, actor=BOSS, deadline_seconds=deadline_seconds,
        )  # fmt: skip
        options.setdefault("repeatable", False)
        options.setdefault("run_for_seconds", self.side.dispatcher.policy.run_for_seconds(deadline_seconds))
        return await self.side.dispatcher.ledger.issue(
            tenant_scope(tenant), tool, [daemon.node_id for daemon in daemons], actor=BOSS,
            payload=encode_call(call), **options,
        )  # fmt: skip

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


async def enrolled(
    store: Store, tokens: NodeTokens, clock: Clock, *, tenant: str = TENANT, node_id: str = ""
) -> Identity:
    """As enrolment leaves it behind."""
    node_id = node_id or str(uuid.uuid4())
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes_raw()
    issued = tokens.issue_node(node_id, tenant, public, life_seconds=TOKEN_SECONDS)
    scope = tenant_scope(tenant)
    spec = NodeSpec(
        display_name="", public_key=public, token_id=issued.jti, token_expires_at_ns=issued.expires_at_ns,
        enrolled_at_ns=clock.now_ns(), tags=("keep",),
    )  # fmt: skip

    def change(draft: Draft) -> None:
        draft.claim(EDGE_NODE, "", NODE_CLAIM, node_id, scope)
        draft.put(EDGE_NODE, scope, node_id, spec=spec)

    await store.transact(change, actor=BOSS, action="edge.enrol", touches=[EDGE_NODE.key(scope, node_id)])
    return Identity(node_id=node_id, tenant=tenant, key=key, token=issued.token, token_id=issued.jti)


async def rotated(
    store: Store, tokens: NodeTokens, clock: Clock, identity: Identity, *, overlap_seconds: float
) -> Identity:
    """As a rotation leaves it behind: another key, another token, the former blacklisted."""
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes_raw()
    issued = tokens.issue_node(identity.node_id, identity.tenant, public, life_seconds=TOKEN_SECONDS)
    scope = tenant_scope(identity.tenant)

    def change(draft: Draft) -> None:
        node = draft.get(EDGE_NODE, scope, identity.node_id)
        assert node is not None
        blacklist(
            draft, identity.token_id, node_id=identity.node_id, reason="rotated",
            expires_at_ns=draft.now_ns + round(TOKEN_SECONDS * 1e9),
        )  # fmt: skip
        spec = msgspec.structs.replace(
            node.spec, public_key=public, token_id=issued.jti, previous_public_key=node.spec.public_key,
            previous_token_id=node.spec.token_id, key_version=node.spec.key_version + 1,
            previous_key_until_ns=draft.now_ns + round(overlap_seconds * 1e9),
        )  # fmt: skip
        draft.put(EDGE_NODE, scope, identity.node_id, spec=spec, status=node.status)

    touches = [EDGE_NODE.key(scope, identity.node_id), BLACKLISTED.key("", identity.token_id)]
    await store.transact(change, actor=BOSS, action="edge.rotate", touches=touches)
    return Identity(
        node_id=identity.node_id, tenant=identity.tenant, key=key, token=issued.token, token_id=issued.jti
    )


@asynccontextmanager
async def opened_tokens(folder: Path, clock: Clock) -> AsyncIterator[tuple[Store, NodeTokens, ServerKey]]:
    settings = StoreSettings(path=folder / "state.db")
    async with Store.open(settings, kinds=STORED, clock=clock) as store:
        master = MasterKey(b"k" * 32, clock)
        key = await ServerKey.load_or_create(store, master)
        tokens = await NodeTokens.load(
            store, master, clock, issuer="aegis-controller", endpoint=lambda: "127.0.0.1:50056",
            server_public_key=key.public_key,
        )  # fmt: skip
        yield store, tokens, key


@asynccontextmanager
async def streams_rig(
    folder: Path, *, clock: Clock | None = None, options: StreamOptions | None = None
) -> AsyncIterator[Rig]:
    clock = clock or SystemClock()
    async with opened_tokens(folder, clock) as (store, tokens, key):
        revocations = Revocations(store, clock)
        layers = ConfigLayers(store)
        side = StreamSide(
            store, clock, tokens=tokens, key=key, revocations=revocations, layers=layers, options=options
        )
        await side.prepare()
        app = _app(side, clock)
        spec = ListenerSpec(name=LISTENER, addresses=("127.0.0.1:0",), app=app)
        async with open_listener(spec, grace_seconds=2) as listener, asyncio.TaskGroup() as tasks:
            running = tasks.create_task(side.run())
            async with AsyncExitStack() as channels:
                yield Rig(
                    store=store, clock=clock, side=side, nodes=Nodes(store, clock, revocations),
                    layers=layers, tokens=tokens, key=key,
                    address=listener.addresses[0].removeprefix("http://"), stack=channels,
                )  # fmt: skip
                side.drain()
                await app.drain(2)
            running.cancel()


def _app(side: StreamSide, clock: Clock) -> GrpcApp:
    row = MethodRow(
        path=CONNECT, listener=LISTENER, authentication=Authentication.ANONYMOUS, permission=None,
        max_request_bytes=MESSAGE_LIMIT_BYTES,
    )  # fmt: skip
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
