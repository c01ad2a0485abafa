"""A double of the server that edge daemons talk to, on our own gRPC layer, plain or with real TLS.

It holds what a test wants to know and does what a test tells it to; it has no opinions but one: every
event's envelope is checked against the key it knows of the node, since a daemon whose events a
server would not believe is of no use.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.duration_pb2 import Duration
from support.shared.free_ports import free_port
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.domains.edge.wire import envelope
from fleetplane.domains.edge.wire import envelope as userseal
from fleetplane.domains.edge.wire import messages as wire
from fleetplane.domains.edge.wire.envelope import EventKind
from fleetplane.domains.edge.wire.protobuf_types import struct_of
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.fleetplane.edge.v1 import tolerant_pb2
from fleetplane.kernel.access import AccessTable, Principal
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.values.timestamps import timestamp
from fleetplane.rpc import (
    Authentication,
    CallStatistics,
    GrpcApp,
    ListenerSpec,
    MethodRow,
    MethodTable,
    TlsFiles,
    open_listener,
)

SERVICE = "aegis.cluster.v1.NodeClusterService"
LISTENER = "edge"
TENANT = "u-test"
CONTEXT = "zaru-free"
METHODS = ("AttestNode", "ChallengeNode", "RotateEdgeKey", "ConnectEdge")
KINDS = {
    "hello": EventKind.HELLO,
    "heartbeat": EventKind.HEARTBEAT,
    "command_result": EventKind.COMMAND_RESULT,
    "command_progress": EventKind.COMMAND_PROGRESS,
    "capability_update": EventKind.CAPABILITY_UPDATE,
}


async def until(condition: Callable[[], object], *, seconds: float = 60.0) -> None:
    """Wait for a condition that nobody announces."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        await asyncio.sleep(0.01)


def jwt(claims: Mapping[str, object]) -> str:
    """A token that says this. Its signature is worth nothing: those who read it here do not verify it."""
    parts = [json.dumps(part).encode() for part in ({"alg": "RS256", "typ": "JWT"}, claims)]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in (*parts, b"signature"))


class EdgeServerDouble:
    def __init__(self, folder: Path, *, tls: bool = False) -> None:
        self.key = Ed25519PrivateKey.generate()
        self.public_key = self.key.public_key().public_bytes_raw()
        self._files: TlsFiles | None = None
        self.authority: Path | None = None
        if tls:
            folder.mkdir(exist_ok=True, parents=True)
            ca = ThrowawayCa()
            self.authority = folder / "ca.crt"
            self.authority.write_bytes(ca.pem)
            certificate, key = ca.server(folder)
            self._files = TlsFiles(certificate=certificate, key=key)
        self._port = free_port()  # it may go and come back
        self._stack = contextlib.AsyncExitStack()
        self._app: GrpcApp | None = None
        self._queues: list[asyncio.Queue[bytes | None]] = []
        self._challenges: dict[str, pb.AttestNodeRequest] = {}
        # What a test may set
        self.token_seconds = 3600.0
        self.refuse_hello: tuple[grpc.StatusCode, str] | None = None
        self.refuse_challenge: tuple[grpc.StatusCode, str] | None = None
        self.refuse_rotation: tuple[grpc.StatusCode, str] | None = None
        self.lose_rotation_answers = 0
        """So many rotations are done, and their answers lost."""
        self.names_key = True
        """Whether it tells its public key at enrolment."""
        self.signs = True
        self.silent = False
        """Answers no hello."""
        self.reads = asyncio.Event()
        """Cleared, nothing that a daemon says is read."""
        self.reads.set()
        # What a test may look at
        self.keys: dict[str, bytes] = {}
        """The public key of each node."""
        self.tokens: dict[str, str] = {}
        self.old_keys: dict[str, list[bytes]] = {}
        self.attested: list[pb.AttestNodeRequest] = []
        self.challenged: list[pb.ChallengeNodeRequest] = []
        self.rotations: list[pb.RotateEdgeKeyRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.hellos: list[tolerant_pb2.Hello] = []
        self.beats: list[tolerant_pb2.Heartbeat] = []
        self.updates: list[pb.EdgeCapabilities] = []
        self.results: list[tuple[str, wire.ToolResult]] = []
        self.chunks: list[tuple[str, wire.CommandProgress]] = []
        self.complaints: list[str] = []
        """Events that a server would not have believed."""
        self.half_closed = 0
        """Streams that the daemon ended in good order."""
        self.used_tokens: list[str] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def endpoint(self) -> str:
        return f"https://{self.address}" if self._files else self.address

    def enrollment_token(self, **claims: object) -> str:
        now = time.time()
        said: dict[str, object] = {
            "tid": TENANT,
            "cep": self.endpoint,
            "sub": "host-1",
            "jti": str(uuid.uuid4()),
            "aud": "edge-enrollment",
            "nbf": now,
            "exp": now + 900,
        }
        if self.names_key:
            said["spk"] = base64.urlsafe_b64encode(self.public_key).rstrip(b"=").decode()
        return jwt({**said, **claims})

    def result(self, command_id: str) -> wire.ToolResult | None:
        return next((result for name, result in self.results if name == command_id), None)

    def output(self, command_id: str, channel: str = "stdout") -> bytes:
        return b"".join(
            chunk.data for name, chunk in self.chunks if name == command_id and chunk.stream == channel
        )

    def statuses(self, subject: str) -> list[str]:
        return [
            chunk.status.state for name, chunk in self.chunks if name == subject and chunk.status is not None
        ]

    # Commands.

    def call(
        self,
        tool: str,
        arguments: Mapping[str, Any],
        *,
        command_id: str = "",
        context: str = CONTEXT,
        tenant: str = TENANT,
        seconds: float = 60.0,
    ) -> pb.EdgeCommand:
        made = pb.InvokeTool(
            command_id=command_id or str(uuid.uuid4()),
            security_context_name=context,
            tool_name=tool,
            args=struct_of(arguments),
            seal_envelope=pb.SealEnvelope(
                user_security_token="a.b.c", tenant_id=tenant, security_context_name=context
            ),
        )
        duration = Duration()
        duration.FromNanoseconds(round(seconds * 1e9))
        made.deadline.CopyFrom(duration)
        made.seal_envelope.signature = self.key.sign(userseal.canonical(made))
        return pb.EdgeCommand(invoke_tool=made)

    def invoke(self, tool: str, arguments: Mapping[str, Any], **options: Any) -> str:
        command = self.call(tool, arguments, **options)
        self.send(command)
        return command.invoke_tool.command_id

    async def outcome(self, tool: str, arguments: Mapping[str, Any], **options: Any) -> wire.ToolResult:
        """Have it done, and wait for what came of it."""
        command_id = self.invoke(tool, arguments, **options)
        await until(lambda: self.result(command_id) is not None)
        found = self.result(command_id)
        assert found is not None
        return found

    def send(self, command: pb.EdgeCommand) -> None:
        self.send_raw(self.sealed(command) if self.signs else command.SerializeToString())

    def sealed(self, command: pb.EdgeCommand, *, stream_id: str = "", at_ms: int = 0) -> bytes:
        raw = command.SerializeToString()
        node_id = envelope_of(self.hellos[-1]).node_id
        payload = envelope.command_payload(
            at_ms or time.time_ns() // 1_000_000, node_id, stream_id or self.hellos[-1].stream_id, raw
        )
        proof = pb.SealNodeEnvelope(signature=self.key.sign(payload), payload=payload)
        return raw + pb.EdgeCommand(envelope=proof).SerializeToString()

    def send_raw(self, raw: bytes) -> None:
        self._queues[-1].put_nowait(raw)

    def end_stream(self) -> None:
        self._queues[-1].put_nowait(None)

    # Life.

    async def start(self) -> None:
        rows = [
            MethodRow(
                path=f"/{SERVICE}/{name}",
                listener=LISTENER,
                authentication=Authentication.ANONYMOUS,
                permission=None,
            )
            for name in METHODS
        ]
        app = GrpcApp(
            listener=LISTENER,
            table=MethodTable(rows),
            access=AccessTable({}),
            authenticators={Authentication.ANONYMOUS: lambda _: Principal(name="anyone", roles=frozenset())},
            clock=SystemClock(),
            statistics=CallStatistics(),
        )
        unary = grpc.unary_unary_rpc_method_handler
        app.add_registered_method_handlers(
            SERVICE,
            {
                "AttestNode": unary(self._attest, pb.AttestNodeRequest.FromString, _serialized),
                "ChallengeNode": unary(self._challenge, pb.ChallengeNodeRequest.FromString, _serialized),
                "RotateEdgeKey": unary(self._rotate, pb.RotateEdgeKeyRequest.FromString, _serialized),
                "ConnectEdge": grpc.stream_stream_rpc_method_handler(
                    self._stream, tolerant_pb2.EdgeEvent.FromString, _as_it_is
                ),
            },
        )
        app.seal()
        spec = ListenerSpec(name=LISTENER, addresses=(self.address,), app=app, tls=self._files)
        await self._stack.enter_async_context(open_listener(spec, grace_seconds=0.2))
        self._app = app

    async def stop(self) -> None:
        """Go away like a process that was killed: streams break off."""
        if self._app is not None:
            await self._app.drain(0.0)
            self._app = None
        await self._stack.aclose()
        self._queues = []

    # Joining.

    async def _attest(self, request: pb.AttestNodeRequest, context: Any) -> pb.AttestNodeResponse:
        self.attested.append(request)
        challenge_id = str(uuid.uuid4())
        self._challenges[challenge_id] = request
        return pb.AttestNodeResponse(
            challenge_nonce=b"n" * 32,
            challenge_id=challenge_id,
            server_public_key=self.public_key if self.names_key else b"",
        )

    async def _challenge(self, request: pb.ChallengeNodeRequest, context: Any) -> pb.ChallengeNodeResponse:
        self.challenged.append(request)
        if self.refuse_challenge is not None:
            await context.abort(*self.refuse_challenge)
        attested = self._challenges.pop(request.challenge_id)
        if not envelope.verify(attested.public_key, request.challenge_signature, b"n" * 32):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the nonce is not signed")
        self.keys[request.node_id] = attested.public_key
        return pb.ChallengeNodeResponse(
            node_security_token=self._issue(request.node_id),
            server_public_key=self.public_key if self.names_key else b"",
        )

    def _issue(self, node_id: str) -> str:
        now = time.time()
        claims = {
            "sub": node_id,
            "role": "edge",
            "tid": TENANT,
            "jti": str(uuid.uuid4()),
            "iat": now,
            "exp": now + self.token_seconds,
        }
        token = self.tokens[node_id] = jwt(claims)
        return token

    async def _rotate(self, request: pb.RotateEdgeKeyRequest, context: Any) -> pb.RotateEdgeKeyResponse:
        self.rotations.append(request)
        if self.refuse_rotation is not None:
            await context.abort(*self.refuse_rotation)
        shown = request.current_envelope
        inner = pb.RotateEdgeKeyInner.FromString(shown.payload)
        key = self.keys[inner.node_id]
        if not envelope.verify(key, shown.signature, shown.payload):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "not signed with the current key")
        messages = envelope.rotation_messages(inner.node_id, request.new_public_key, inner.nonce)
        if not any(
            envelope.verify(request.new_public_key, request.signature_with_new_key, message)
            for message in messages
        ):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the new key did not sign")
        self.old_keys.setdefault(inner.node_id, []).append(key)
        self.keys[inner.node_id] = request.new_public_key
        token = self._issue(inner.node_id)
        if self.lose_rotation_answers:
            self.lose_rotation_answers -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")
        return pb.RotateEdgeKeyResponse(node_security_token=token, issued_at=timestamp(time.time_ns()))

    # The stream.

    async def _stream(self, requests: AsyncIterator[tolerant_pb2.EdgeEvent], context: Any) -> None:
        first = await anext(requests)
        self.metadata.append({name: str(value) for name, value in context.invocation_metadata()})
        self._check(first)
        if self.refuse_hello is not None:
            await context.abort(*self.refuse_hello)
        outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._queues.append(outgoing)  # who sees the hello may send a command at once
        self.hellos.append(first.hello)
        if self.silent:
            await asyncio.sleep(60)
        await context.send_initial_metadata(())
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read(requests, outgoing))
            while (raw := await outgoing.get()) is not None:
                await context.write(raw)
            reading.cancel()

    async def _read(
        self, requests: AsyncIterator[tolerant_pb2.EdgeEvent], outgoing: asyncio.Queue[bytes | None]
    ) -> None:
        await self.reads.wait()
        async for event in requests:
            self._take(event)
            await self.reads.wait()
        self.half_closed += 1
        outgoing.put_nowait(None)

    def _take(self, event: tolerant_pb2.EdgeEvent) -> None:
        self._check(event)
        match event.WhichOneof("event"):
            case "heartbeat":
                self.beats.append(event.heartbeat)
            case "command_result":
                result, _ = wire.decode_result(event.command_result.result)
                self.results.append((event.command_result.command_id, result))
            case "command_progress":
                progress, _ = wire.decode_progress(event.command_progress)
                self.chunks.append((event.command_progress.command_id, progress))
            case "capability_update":
                self.updates.append(wire.decode_capabilities(event.capability_update.capabilities))

    def _check(self, event: tolerant_pb2.EdgeEvent) -> None:
        """As a server would, with everything signed for in full."""
        name = event.WhichOneof("event") or ""
        body = getattr(event, name)
        shown = body.envelope
        signed = envelope.parse(shown.payload)
        if signed is None:
            self.complaints.append(f"{name}: the payload has another layout")
            return
        self.used_tokens.append(shown.node_security_token)
        if not envelope.verify(self.keys.get(signed.node_id, b""), shown.signature, shown.payload):
            self.complaints.append(f"{name}: not signed with the node's key")
        if shown.node_security_token != self.tokens.get(signed.node_id):
            self.complaints.append(f"{name}: not the node's token")
        if signed.kind is not KINDS[name]:
            self.complaints.append(f"{name}: signed as {signed.kind!r}")
        stream_id = body.stream_id if name == "hello" else self.hellos[-1].stream_id
        if signed.stream_id != stream_id:
            self.complaints.append(f"{name}: of another stream")
        if not self._covered(name, body, signed.inner):
            self.complaints.append(f"{name}: not signed for in full")

    def _covered(self, name: str, body: Any, inner: bytes) -> bool:
        match name:
            case "hello" | "capability_update":
                return envelope.covers_capabilities(inner, body.capabilities, digest_required=True)
            case "command_result":
                return envelope.covers_result(inner, body.command_id, body.result, digest_required=True)
            case "command_progress":
                return inner == envelope.progress_inner(body.command_id, body.chunk)
            case _:
                return inner == b""


def envelope_of(hello: tolerant_pb2.Hello) -> envelope.Canonical:
    found = envelope.parse(hello.envelope.payload)
    assert found is not None
    return found


def _serialized(message: Any) -> bytes:
    raw: bytes = message.SerializeToString()
    return raw


def _as_it_is(raw: bytes) -> bytes:
    return raw


@contextlib.asynccontextmanager
async def edge_server(folder: Path, *, tls: bool = False) -> AsyncIterator[EdgeServerDouble]:
    double = EdgeServerDouble(folder, tls=tls)
    await double.start()
    try:
        yield double
    finally:
        await double.stop()
