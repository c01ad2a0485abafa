"""What daemons have on their disks, what they sign with it, and what the server keeps of them."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetplane.domains.edge.identity.policy import ServerKey
from fleetplane.domains.edge.identity.rotation import earlier
from fleetplane.domains.edge.identity.tokens import NodeTokens, blacklist
from fleetplane.domains.edge.kinds import BLACKLISTED, EDGE_NODE, KINDS, NODE_CLAIM, NodeSpec, tenant_scope
from fleetplane.domains.edge.nodes.config_layers import CONFIG_LAYER
from fleetplane.domains.edge.wire import envelope
from fleetplane.domains.edge.wire.envelope import EventKind
from fleetplane.fleet.rollouts.records import KINDS as ROLLOUT_KINDS
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.fleetplane.edge.v1 import legacy_pb2, tolerant_pb2
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import COMMAND, COMMAND_TARGET
from fleetplane.kernel.freeze import FREEZE
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.revocation import REVOCATION
from fleetplane.kernel.presence import PRESENCE
from fleetplane.kernel.reconcile import LEASE
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Draft, Store, StoreSettings

TENANT = "acme"
BOSS = "user/boss"
TOKEN_SECONDS = 86_400.0
STORED: list[AnyKind] = [
    *KINDS,
    CONFIG_LAYER,
    *ROLLOUT_KINDS,
    COMMAND,
    COMMAND_TARGET,
    FREEZE,
    REVOCATION,
    LEASE,
    PRESENCE,
]


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
    plain: bytes = b""
    """Sign these bytes instead of a payload in the canonical layout."""

    def envelope(self, proper: EventKind, inner: bytes = b"", **wrong: Any) -> pb.SealNodeEnvelope:
        me = self.identity
        at_ms = self.clock.now_ns() // 1_000_000 + self.ahead_ms + wrong.pop("ahead_ms", 0)
        canonical = envelope.encode(
            wrong.pop("kind", proper),
            at_ms,
            wrong.pop("node_id", me.node_id),
            wrong.pop("stream_id", self.stream_id),
            inner,
        )
        payload = self.plain or canonical
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
            command_id=command_id,
            result=result,
        )

    def chunk(self, command_id: str, chunk: pb.Chunk, **wrong: Any) -> tolerant_pb2.CommandProgress:
        raw = chunk.SerializeToString()
        inner = wrong.pop("inner", envelope.progress_inner(command_id, raw))
        return tolerant_pb2.CommandProgress(
            envelope=self.envelope(EventKind.COMMAND_PROGRESS, inner, **wrong),
            command_id=command_id,
            chunk=raw,
        )

    def line(
        self, command_id: str, text: bytes, *, sequence: int, stderr: bool = False, **wrong: Any
    ) -> tolerant_pb2.CommandProgress:
        """Output as daemons in the field send it."""
        inner = envelope.short_progress_inner(command_id, sequence=sequence, stderr=stderr, chunk=text)
        made = tolerant_pb2.CommandProgress(
            envelope=self.envelope(EventKind.COMMAND_PROGRESS, wrong.pop("inner", inner), **wrong),
            command_id=command_id,
            chunk=text,
        )
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
        display_name="",
        public_key=public,
        token_id=issued.jti,
        token_expires_at_ns=issued.expires_at_ns,
        enrolled_at_ns=clock.now_ns(),
        tags=("keep",),
    )

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
            draft,
            identity.token_id,
            node_id=identity.node_id,
            reason="rotated",
            expires_at_ns=draft.now_ns + round(TOKEN_SECONDS * 1e9),
        )
        spec = msgspec.structs.replace(
            node.spec,
            public_key=public,
            token_id=issued.jti,
            previous_public_key=node.spec.public_key,
            previous_token_id=node.spec.token_id,
            key_version=node.spec.key_version + 1,
            previous_key_until_ns=draft.now_ns + round(overlap_seconds * 1e9),
            earlier=earlier(node.spec, now_ns=draft.now_ns),
        )
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
            store,
            master,
            clock,
            issuer="aegis-controller",
            endpoint=lambda: "127.0.0.1:50056",
            server_public_key=key.public_key,
        )
        yield store, tokens, key
