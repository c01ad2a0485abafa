"""The identity side of the edge domain in this process: real store, real listener, official client."""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetplane.domains.edge.grpc.workers import ROLES
from fleetplane.domains.edge.identity import assembly as identity_side
from fleetplane.domains.edge.identity.assembly import IdentitySide
from fleetplane.domains.edge.identity.policy import IdentityPolicy
from fleetplane.domains.edge.nodes.config_layers import CONFIG_LAYER, ConfigLayers
from fleetplane.domains.edge.wire import envelope
from fleetplane.fleet.people.door import Authenticators
from fleetplane.fleet.rollouts.records import KINDS as ROLLOUT_KINDS
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2_grpc
from fleetplane.kernel.access import AccessTable, Principal, Role
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.rpc import (
    Authentication,
    CallContext,
    CallStatistics,
    GrpcApp,
    ListenerSpec,
    MethodTable,
    open_listener,
)

ISSUER = "https://fleet.example"
ENDPOINT = "127.0.0.1:50056"
TENANT, OTHER = "acme", "umbrella"
BOSS = "operator/boss"
SECONDS = 60.0
UNLIMITED = IdentityPolicy(attests_per_minute=0, forward_to=("127.0.0.1",))


class MovableClock(SystemClock):
    """The machine's, which a test may put forward."""

    def __init__(self) -> None:
        self.ahead_seconds = 0.0

    def now_ns(self) -> int:
        return time.time_ns() + round(self.ahead_seconds * 1e9)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_seconds


class OpenEar:
    """Holds no streams: takes the first message of each and lets it go."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    async def connect(self, requests: AsyncIterator[bytes], context: CallContext) -> None:
        self.heard.append(await anext(requests))
        await context.send_initial_metadata(())


def new_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def claims_of(token: str) -> dict[str, Any]:
    """As daemons read them: by decoding the middle segment, without padding."""
    segment = token.split(".")[1]
    found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4)))
    return found


def _method_of(inner: Any) -> str:
    name: str = type(inner).__name__.removesuffix("Inner")
    return "Heartbeat" if name == "NodeHeartbeat" else name


@dataclass(slots=True)
class Machine:
    """A node as the server sees it: an id, a key, and what it calls."""

    stub: Any
    role: int = pb.NODE_ROLE_EDGE
    node_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    key: Ed25519PrivateKey = field(default_factory=new_key)
    token: str = ""
    clock: SystemClock = field(default_factory=SystemClock)
    server_key: bytes = b""

    async def attest(self, **changes: Any) -> pb.AttestNodeResponse:
        metadata = changes.pop("metadata", None)
        said: dict[str, Any] = {
            "node_id": self.node_id,
            "role": self.role,
            "public_key": public(self.key),
            "capabilities": pb.NodeCapabilities(),
            **changes,
        }
        request = pb.AttestNodeRequest(**{name: value for name, value in said.items() if value is not None})
        answer: pb.AttestNodeResponse = await self.stub.AttestNode(
            request, metadata=metadata, timeout=SECONDS
        )
        return answer

    def answer(
        self, challenge: pb.AttestNodeResponse, token: str | None, **changes: Any
    ) -> pb.ChallengeNodeRequest:
        said: dict[str, Any] = {
            "challenge_id": challenge.challenge_id,
            "node_id": self.node_id,
            "challenge_signature": self.key.sign(challenge.challenge_nonce),
            **changes,
        }
        if token is not None:
            said["enrollment_token"] = token
        return pb.ChallengeNodeRequest(**said)

    async def respond(self, request: pb.ChallengeNodeRequest) -> pb.ChallengeNodeResponse:
        answer: pb.ChallengeNodeResponse = await self.stub.ChallengeNode(request, timeout=SECONDS)
        return answer

    async def join(self, token: str | None = None, **attesting: Any) -> pb.ChallengeNodeResponse:
        challenge = await self.attest(**attesting)
        answer = await self.respond(self.answer(challenge, token))
        self.token, self.server_key = answer.node_security_token, answer.server_public_key
        return answer

    def sealed(self, inner: Any, **changes: Any) -> pb.SealNodeEnvelope:
        """A worker's envelope, for the method whose message it is."""
        payload = inner if isinstance(inner, bytes) else inner.SerializeToString()
        about: dict[str, Any] = {
            "method": "Heartbeat" if isinstance(inner, bytes) else _method_of(inner),
            "target": self.server_key.hex(),
            "issued_at_ns": self.clock.now_ns(),
        }
        message = envelope.call_message(
            about["method"],
            target=about["target"],
            node_id=self.node_id,
            issued_at_ns=about["issued_at_ns"],
            payload=payload,
        )
        said: dict[str, Any] = {
            "node_security_token": self.token,
            "signature": self.key.sign(message),
            "payload": payload,
            **about,
            **changes,
        }
        return pb.SealNodeEnvelope(**said)

    def wish(
        self,
        new: Ed25519PrivateKey,
        *,
        form: int = 0,
        nonce: bytes | None = None,
        token: str | None = None,
        inner: bytes | None = None,
    ) -> pb.RotateEdgeKeyRequest:
        """A request for a new key; `form` picks the bytes that it signs."""
        nonce = uuid.uuid4().bytes * 2 if nonce is None else nonce
        payload = inner
        if payload is None:
            payload = pb.RotateEdgeKeyInner(
                node_id=self.node_id, new_public_key=public(new), nonce=nonce
            ).SerializeToString()
        message = envelope.rotation_messages(self.node_id, public(new), nonce)[form]
        return pb.RotateEdgeKeyRequest(
            current_envelope=pb.SealNodeEnvelope(
                node_security_token=self.token if token is None else token,
                signature=self.key.sign(payload),
                payload=payload,
            ),
            new_public_key=public(new),
            signature_with_new_key=new.sign(message),
        )

    async def rotate(self, request: pb.RotateEdgeKeyRequest, **options: Any) -> Any:
        return await self.stub.RotateEdgeKey(request, timeout=SECONDS, **options)


@dataclass(slots=True, kw_only=True)
class Rig:
    store: Store
    side: IdentitySide
    revocations: Revocations
    operators: Operators
    layers: ConfigLayers
    clock: MovableClock
    ear: OpenEar
    address: str
    stub: Any
    stack: AsyncExitStack

    def machine(self, **about: Any) -> Machine:
        return Machine(self.stub, clock=self.clock, **about)

    async def invite(self, tenant: str = TENANT, label: str = "", **options: Any) -> str:
        return (await self.side.enrollments.issue(tenant, label, actor=BOSS, **options)).token

    async def enrolled(self, tenant: str = TENANT, label: str = "", **about: Any) -> Machine:
        machine = self.machine(**about)
        await machine.join(await self.invite(tenant, label))
        return machine

    async def worker(
        self, role: int = pb.NODE_ROLE_WORKER, *, tenants: Sequence[str] = ("*",), **attesting: Any
    ) -> Machine:
        """Admitted and registered."""
        machine = self.machine(role=role)
        token = await self.side.worker_admission.issue(
            machine.node_id,
            role=next(kind for number, kind in ROLES.items() if number == role),
            tenants=tenants,
            life_seconds=600,
            actor=BOSS,
        )
        await machine.join(enrolment_token=token, **attesting)
        inner = pb.RegisterNodeInner(
            node_id=machine.node_id,
            grpc_address=attesting.get("grpc_address", "127.0.0.1:1"),
            capabilities=attesting.get("capabilities", pb.NodeCapabilities()),
        )
        await self.stub.RegisterNode(pb.RegisterNodeRequest(envelope=machine.sealed(inner)), timeout=SECONDS)
        return machine

    async def bearer(self, *roles: str, scope: str = "") -> tuple[tuple[str, str], ...]:
        token = await self.operators.tokens.create(
            f"t{uuid.uuid4()}", roles=frozenset(map(Role, roles)), scope=scope, actor=BOSS
        )
        return (("authorization", f"Bearer {token}"),)


async def code_of(call: Any) -> grpc.StatusCode:
    """How a call that must fail does."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        code = error.code()
        assert isinstance(code, grpc.StatusCode)
        return code
    raise AssertionError(f"it did not fail: {answer}")


async def refusal_of(call: Any) -> tuple[grpc.StatusCode, str]:
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError(f"it did not fail: {answer}")


@asynccontextmanager
async def identity_rig(
    folder: Path, *, policy: IdentityPolicy = UNLIMITED, client_options: Any = None
) -> AsyncIterator[Rig]:
    clock = MovableClock()
    kinds = [*KERNEL_KINDS, *identity_side.KINDS, CONFIG_LAYER, *ROLLOUT_KINDS]
    async with (
        Store.open(StoreSettings(path=folder / "state.db"), kinds=kinds, clock=clock) as store,
        serving(store, clock, policy, client_options) as rig,
    ):
        yield rig


@asynccontextmanager
async def two_servers(folder: Path, *, policy: IdentityPolicy = UNLIMITED) -> AsyncIterator[tuple[Rig, Rig]]:
    """Two of them on one database, each with a listener and a memory of its own for what is not stored."""
    clock = MovableClock()
    kinds = [*KERNEL_KINDS, *identity_side.KINDS, CONFIG_LAYER, *ROLLOUT_KINDS]
    async with Store.open(StoreSettings(path=folder / "state.db"), kinds=kinds, clock=clock) as store:
        store.shared = True
        async with serving(store, clock, policy) as one, serving(store, clock, policy) as other:
            yield one, other


@asynccontextmanager
async def serving(
    store: Store, clock: MovableClock, policy: IdentityPolicy, client_options: Any = None
) -> AsyncIterator[Rig]:
    master = MasterKey(b"k" * 32, SystemClock())
    async with AsyncExitStack() as stack:
        revocations, operators = Revocations(store, clock), await Operators.load(store, master, clock)
        layers, ear = ConfigLayers(store), OpenEar()
        side = await IdentitySide.load(
            store,
            master,
            clock,
            revocations=revocations,
            door=Authenticators(operators, revocations),
            layers=layers,
            policy=policy,
            issuer=ISSUER,
            endpoint=lambda: ENDPOINT,
        )
        app = _app(side, ear)
        spec = ListenerSpec(name=identity_side.LISTENER, addresses=("127.0.0.1:0",), app=app)
        listener = await stack.enter_async_context(open_listener(spec, grace_seconds=2))
        address = listener.addresses[0].removeprefix("http://")
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=client_options))
        yield Rig(
            store=store,
            side=side,
            revocations=revocations,
            operators=operators,
            layers=layers,
            clock=clock,
            ear=ear,
            address=address,
            stub=cluster_pb2_grpc.NodeClusterServiceStub(channel),
            stack=stack,
        )
        await app.drain(2)


def _app(side: IdentitySide, ear: OpenEar) -> GrpcApp:
    app = GrpcApp(
        listener=identity_side.LISTENER,
        table=MethodTable(identity_side.METHODS),
        access=AccessTable(identity_side.GRANTS),
        authenticators={
            Authentication.ANONYMOUS: lambda _connection: Principal(name="anonymous", roles=frozenset()),
            **side.authenticators[identity_side.LISTENER],
        },
        clock=SystemClock(),
        statistics=CallStatistics(),
    )
    service = side.service(ear)
    app.add_service(service.descriptor, service.servicer, raw_requests=service.raw_requests)
    app.seal()
    return app
