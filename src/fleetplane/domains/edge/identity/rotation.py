"""Replacing a daemon's key, or with the same key its token alone.

A request proves two things: that the current key wants it, by the envelope's signature, and that the
new key is there, by a signature of its own. The envelope's payload must be a wish for that key and
nothing else; otherwise anything a daemon ever signed could be turned into one. Requests in the
field carry a nonce and no time, so they are remembered for as long as the key that signed them is in
use; ours carry a time, and are remembered until that has passed.

The new key, the blacklisted token and the new token are one transaction. The stream that is open
goes on under the former key until the overlap ends, which is its own side's business.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass
from functools import partial

import msgspec
from google.protobuf.message import DecodeError

from fleetplane.domains.edge.identity.policy import IdentityPolicy
from fleetplane.domains.edge.identity.tokens import (
    EnrolmentToken,
    NodeClaims,
    NodeTokens,
    blacklist,
    thumbprint,
)
from fleetplane.domains.edge.kinds import (
    BLACKLISTED,
    EARLIER_LIMIT,
    EDGE_NODE,
    PUBLIC_KEY_BYTES,
    EdgeNode,
    Former,
    NodeSpec,
    NodeState,
    PayloadDialect,
    UsedRequest,
    principal_name,
    tenant_of,
)
from fleetplane.domains.edge.nodes.registry import Nodes
from fleetplane.domains.edge.wire import envelope
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Conflict, FailedPrecondition, InvalidArgument, Unauthenticated
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.ids import check_uuid

REMEMBERED_LIMIT = 256
"""Requests of one daemon; about 70 bytes each in its record."""
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A decoded request that is not verified yet."""

    node_id: str
    new_key: bytes
    new_signature: bytes
    payload: bytes
    signature: bytes
    claims: NodeClaims | None
    """Of the token in the envelope, which daemons in the field leave empty."""
    nonce: bytes
    issued_at_ms: int

    @property
    def looks_legacy(self) -> bool:
        return self.claims is None and len(self.nonce) == envelope.NONCE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class RotatedNode:
    issued: EnrolmentToken
    overlap_seconds: float
    wish: Wish

    def dialect(self, told: PayloadDialect | None) -> PayloadDialect:
        """To be answered in: what the call says, else what the request looks like."""
        if told is not None:
            return told
        return PayloadDialect.LEGACY if self.wish.looks_legacy else PayloadDialect.DOCUMENTED


class Rotation:
    def __init__(
        self, *, store: Store, clock: Clock, tokens: NodeTokens, nodes: Nodes, policy: IdentityPolicy
    ) -> None:
        self._store = store
        self._clock = clock
        self._tokens = tokens
        self._nodes = nodes
        self._policy = policy

    async def rotate(self, request: pb.RotateEdgeKeyRequest) -> RotatedNode:
        wish = self._read(request)
        node = self._believe(wish)
        if node.spec.revoked_at_ns is not None:
            raise FailedPrecondition("the node was revoked")
        if node.status is not None and node.status.state is NodeState.UNHEALTHY:
            raise FailedPrecondition("the node is unhealthy", hint="let it report again first")
        self._check_wish(wish, node.spec.public_key)
        issued = self._tokens.issue_node(
            node.name, tenant_of(node.scope), wish.new_key, life_seconds=self._policy.node_token_seconds
        )
        await self._store.transact(
            partial(self._replace, node=node, wish=wish, issued=issued),
            actor=principal_name(node.name),
            action="edge.refresh_token" if wish.new_key == node.spec.public_key else "edge.rotate_key",
            touches=[node.key, BLACKLISTED.key("", node.spec.token_id)],
        )
        return RotatedNode(issued=issued, overlap_seconds=self._policy.overlap_seconds, wish=wish)

    # Reading.

    def _read(self, request: pb.RotateEdgeKeyRequest) -> Wish:
        if not request.HasField("current_envelope"):
            raise InvalidArgument("the request has no envelope", field="current_envelope")
        if len(request.new_public_key) != PUBLIC_KEY_BYTES:
            raise InvalidArgument(
                f"a public key has {PUBLIC_KEY_BYTES} bytes, not {len(request.new_public_key)}",
                field="new_public_key",
            )
        shown = request.current_envelope
        claims = None
        if shown.node_security_token:
            # An expired token may be renewed, as long as its key is the node's.
            claims = self._tokens.verify_node(
                shown.node_security_token, allow_expired=True, allow_blacklisted=True
            )
        inner = _inner(shown.payload)
        if claims is not None:
            node_id = claims.node_id
        elif inner is not None and inner.node_id:
            node_id = check_uuid(inner.node_id, field="node_id")
        else:
            raise InvalidArgument("the request names no node", field="current_envelope")
        if inner is not None and inner.node_id and inner.node_id.lower() != node_id:
            raise Unauthenticated("the token and the payload are of different nodes")
        return Wish(
            node_id=node_id,
            new_key=request.new_public_key,
            new_signature=request.signature_with_new_key,
            payload=shown.payload,
            signature=shown.signature,
            claims=claims,
            nonce=inner.nonce if inner is not None else b"",
            issued_at_ms=inner.issued_at_ms if inner is not None else 0,
        )

    # Believing.

    def _believe(self, wish: Wish) -> EdgeNode:
        """The node whose current key signed. An unknown node is refused like a wrong signature."""
        claims = wish.claims
        for node in self._candidates(wish):
            key = node.spec.public_key
            if not envelope.verify(key, wish.signature, wish.payload):
                continue
            if claims is not None and claims.thumbprint != thumbprint(key):
                raise Unauthenticated("the token is bound to a key that is not the node's")
            return node
        raise Unauthenticated("the envelope is not signed with the node's current key")

    def _candidates(self, wish: Wish) -> list[EdgeNode]:
        """The node's record; where nobody owns it any more, what those who did have left of it."""
        if wish.claims is not None:
            found = self._nodes.lookup(wish.claims.tenant, wish.node_id)
            return [found] if found is not None else []
        found = self._nodes.find(wish.node_id)
        if found is not None:
            return [found]
        return [node for node in self._nodes.list() if node.name == wish.node_id]

    def _check_wish(self, wish: Wish, current_key: bytes) -> None:
        if wish.claims is not None and self._tokens.is_blacklisted(wish.claims.jti):
            raise Unauthenticated("the token was replaced", details={"cause": "blacklisted"})
        if not names_key(wish.payload, wish.node_id, wish.new_key, current_key=current_key):
            raise InvalidArgument(
                "the envelope's payload does not name the new key", field="current_envelope.payload"
            )
        if wish.issued_at_ms:
            off_ms = abs(self._clock.now_ns() // 1_000_000 - wish.issued_at_ms)
            if off_ms > self._policy.skew_seconds * 1000:
                raise Unauthenticated("the request's time is too far from now", details={"cause": "stale"})
        messages = envelope.rotation_messages(wish.node_id, wish.new_key, wish.nonce)
        if not any(envelope.verify(wish.new_key, wish.new_signature, message) for message in messages):
            raise InvalidArgument("the new key did not sign the request", field="signature_with_new_key")

    # Doing.

    def _replace(self, draft: Draft, *, node: EdgeNode, wish: Wish, issued: EnrolmentToken) -> None:
        current = draft.get(EDGE_NODE, node.scope, node.name)
        if current is None or current.spec.revoked_at_ns is not None:
            raise FailedPrecondition("the node was revoked")
        spec = current.spec
        if (spec.token_id, spec.key_version) != (node.spec.token_id, node.spec.key_version):
            raise Conflict("another rotation was faster", hint="retry with the key that is in force now")
        used = self._used_up(spec, wish, now_ns=draft.now_ns)
        blacklist(
            draft,
            spec.token_id,
            node_id=node.name,
            reason="rotated",
            expires_at_ns=spec.token_expires_at_ns,
        )
        replaced = msgspec.structs.replace(
            spec,
            public_key=wish.new_key,
            previous_public_key=spec.public_key,
            previous_token_id=spec.token_id,
            previous_key_until_ns=draft.now_ns + round(self._policy.overlap_seconds * 1e9),
            earlier=earlier(spec, now_ns=draft.now_ns),
            key_version=spec.key_version + (wish.new_key != spec.public_key),
            token_id=issued.jti,
            token_expires_at_ns=issued.expires_at_ns,
            recent_nonces=used,
        )
        draft.put(EDGE_NODE, node.scope, node.name, spec=replaced, status=current.status)

    def _used_up(self, spec: NodeSpec, wish: Wish, *, now_ns: int) -> tuple[UsedRequest, ...]:
        """The memory of requests with this one added; refuses one that is in it."""
        digest = hashlib.sha256(spec.public_key + wish.payload).digest()[:DIGEST_BYTES]
        if any(used.digest == digest for used in spec.recent_nonces):
            raise Unauthenticated("the request was used before", details={"cause": "replayed"})
        until_ns = 0
        if wish.issued_at_ms:
            until_ns = wish.issued_at_ms * 1_000_000 + round(self._policy.skew_seconds * 1e9)
        made = UsedRequest(digest=digest, at_ns=now_ns, until_ns=until_ns, key_version=spec.key_version)
        return remembered((*spec.recent_nonces, made), key_version=spec.key_version, now_ns=now_ns)


def earlier(spec: NodeSpec, *, now_ns: int) -> tuple[Former, ...]:
    """Credentials replaced before the present ones, as far as an open stream may use them. Pure."""
    kept = (one for one in (*spec.earlier, spec.previous) if one.token_id and one.until_ns > now_ns)
    return tuple(kept)[-EARLIER_LIMIT:]


def remembered(used: tuple[UsedRequest, ...], *, key_version: int, now_ns: int) -> tuple[UsedRequest, ...]:
    """What must be kept of it, within the bound: first those go that nobody could use again. Pure."""
    kept = [one for one in used if not one.until_ns or one.until_ns > now_ns]
    while len(kept) > REMEMBERED_LIMIT:
        former = next((index for index, one in enumerate(kept) if one.key_version != key_version), None)
        if former is None:
            raise FailedPrecondition(
                f"the token was renewed {REMEMBERED_LIMIT} times under the same key",
                hint="rotate to a new key",
            )
        del kept[former]
    return tuple(kept)


def names_key(payload: bytes, node_id: str, new_key: bytes, *, current_key: bytes) -> bool:
    """Whether the signed payload requests exactly that key. Pure.

    A payload is the usual message, or of the client's own making with the node's id and the key in it.
    One of the latter kind is never what a node signs for another purpose, whatever else that carries;
    and since a new key proves itself by signing such bytes, they are no wish of the key that they name.
    """
    inner = _inner(payload)
    if inner is not None and inner.node_id:
        return inner.new_public_key == new_key and inner.node_id.lower() == node_id
    names_node = node_id.encode() in payload or uuid.UUID(node_id).bytes in payload
    return names_node and new_key in payload and new_key != current_key and not envelope.has_purpose(payload)


def _inner(payload: bytes) -> pb.RotateEdgeKeyInner | None:
    """The payload as the message that it usually is."""
    try:
        inner = pb.RotateEdgeKeyInner.FromString(payload)
    except DecodeError:
        return None
    return inner if len(inner.new_public_key) == PUBLIC_KEY_BYTES else None
