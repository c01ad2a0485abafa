"""Whether an event on a stream is what it claims to be.

Every event carries an envelope: a token of ours, a payload, and the node's signature over it. An
event is believed if all of this holds, and each way to fail has a name (`Cause`):

    the token is ours, in time, not blacklisted, and of the tenant that owns the node
    it is of the node whose stream it is
    the signature is by the key that the token is bound to: the node's current one, or on a stream
      that was open at a rotation the one before, for as long as that may go on
    the payload is of this kind of event, this node, this stream and about now
    the payload vouches for the rest of the event

The last two can only be asked of payloads in the layout of `envelope`. Others are taken by their
signature alone, unless the policy is strict, which also insists that results and capabilities are
signed for in full.

An event is looked at ten thousand times in half a minute, so what cannot have changed since the
last one of its stream is not worked out again: the token's claims, the key. Whether the token was
blacklisted and the record changed is looked up every time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fleetplane.domains.edge import envelope
from fleetplane.domains.edge.envelope import Canonical, EventKind
from fleetplane.domains.edge.kinds import EDGE_NODE, NODE_CLAIM, EdgeNode, NodeSpec, check_uuid, tenant_scope
from fleetplane.domains.edge.tokens import EDGE_ROLE, NodeClaims, thumbprint
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.fleetplane.edge.v1 import tolerant_pb2
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    FailedPrecondition,
    FleetplaneError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unauthenticated,
)
from fleetplane.kernel.store import Store

R = TypeVar("R")

MS = 1_000_000
REPLAYS_LIMIT = 65_536
"""First messages remembered, as many as there can be streams; about 200 bytes each."""


class Cause(StrEnum):
    """Why an event was not believed; in `details["cause"]` of the error, and counted by it."""

    MALFORMED = "malformed"
    NOT_HELLO = "not hello"
    SECOND_HELLO = "second hello"
    NO_ENVELOPE = "no envelope"
    TOKEN = "token"  # noqa: S105
    EXPIRED = "expired"
    BLACKLISTED = "blacklisted"
    UNKNOWN_NODE = "unknown node"
    REVOKED = "revoked"
    TENANT = "tenant"
    BEARER = "bearer"
    NODE = "node"
    KEY = "key"
    SIGNATURE = "signature"
    NOT_CANONICAL = "not canonical"
    KIND = "kind"
    STREAM = "stream"
    STALE = "stale"
    BACKWARDS = "backwards"
    CONTENT = "content"
    REPLAYED = "replayed"


_REFUSALS: Mapping[Cause, tuple[type[FleetplaneError], str]] = {
    Cause.MALFORMED: (InvalidArgument, "the message cannot be read"),
    Cause.NOT_HELLO: (InvalidArgument, "the first message must be a hello"),
    Cause.SECOND_HELLO: (InvalidArgument, "a stream begins with one hello, and has no other"),
    Cause.NO_ENVELOPE: (InvalidArgument, "the message has no envelope"),
    Cause.TOKEN: (Unauthenticated, "the token is not one of ours"),
    Cause.EXPIRED: (Unauthenticated, "the token has expired"),
    Cause.BLACKLISTED: (Unauthenticated, "the token was replaced or revoked"),
    Cause.UNKNOWN_NODE: (NotFound, "the node is not enrolled"),
    Cause.REVOKED: (FailedPrecondition, "the node was revoked"),
    Cause.TENANT: (PermissionDenied, "the token is of another tenant than the node"),
    Cause.BEARER: (Unauthenticated, "the token of the call and of the hello are not of the same node"),
    Cause.NODE: (Unauthenticated, "the envelope is of another node than its stream"),
    Cause.KEY: (Unauthenticated, "the token is bound to a key that is not the node's"),
    Cause.SIGNATURE: (Unauthenticated, "the signature is wrong"),
    Cause.NOT_CANONICAL: (Unauthenticated, "the signed payload does not say what it is about"),
    Cause.KIND: (Unauthenticated, "the envelope is of another kind of event"),
    Cause.STREAM: (Unauthenticated, "the envelope is of another stream"),
    Cause.STALE: (Unauthenticated, "the envelope's time is too far from now"),
    Cause.BACKWARDS: (Unauthenticated, "the envelope is older than what came before it"),
    Cause.CONTENT: (Unauthenticated, "the envelope does not vouch for this message"),
    Cause.REPLAYED: (Unauthenticated, "the hello was used before"),
}


def refusal(cause: Cause, text: str = "") -> FleetplaneError:
    kind, message = _REFUSALS[cause]
    return kind(text or message, details={"cause": cause})


Event = (
    tolerant_pb2.Hello
    | tolerant_pb2.Heartbeat
    | tolerant_pb2.CommandResult
    | tolerant_pb2.CommandProgress
    | tolerant_pb2.CapabilityUpdate
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SealPolicy:
    skew_seconds: float = 300.0
    """How far a daemon's clock may be off, and how long its output may have waited to be sent."""
    strict: bool = False
    expired_seconds: float = 0.0
    """For how long after its end a token still opens a stream. An open stream outlives its token anyway."""


@dataclass(slots=True, kw_only=True)
class Seal:
    """What later events of a stream are held against."""

    node_id: str
    tenant: str
    stream_id: str
    token_id: str
    """Of the token that the last event came with."""
    newest_ms: int
    extended_until_ns: int = 0
    """Replaced credentials stay good until then on this stream, if that is later than the record says."""
    _token: str = ""
    _claims: NodeClaims | None = None
    _key: tuple[bytes, Ed25519PublicKey] | None = field(default=None, repr=False)


class Tokens(Protocol):
    def verify_node(
        self, token: str, *, allow_expired: bool = False, allow_blacklisted: bool = False
    ) -> NodeClaims: ...

    def is_blacklisted(self, jti: str) -> bool: ...


class Verifier:
    def __init__(self, tokens: Tokens, store: Store, clock: Clock, policy: SealPolicy) -> None:
        self._tokens = tokens
        self._store = store
        self._clock = clock
        self._policy = policy
        self._skew_ms = round(policy.skew_seconds * 1000)
        self._hellos: OrderedDict[bytes, int] = OrderedDict()
        """Payloads of first messages, and when they are too old to be taken anyway."""
        self.refused: dict[Cause, int] = dict.fromkeys(Cause, 0)

    # The first message.

    def hello(self, hello: tolerant_pb2.Hello, bearer: str | None = None) -> tuple[EdgeNode, Seal]:
        """Whose stream it is, and what the rest of it is held against."""
        return self._counted(lambda: self._hello(hello, bearer))

    def _hello(self, hello: tolerant_pb2.Hello, bearer: str | None) -> tuple[EdgeNode, Seal]:
        shown = _envelope(hello)
        claims = self._token(shown.node_security_token)
        if bearer is not None and self._token(bearer).node_id != claims.node_id:
            raise refusal(Cause.BEARER)
        node = self._record(claims)
        self._in_time(claims, node.spec)
        if self._tokens.is_blacklisted(claims.jti):
            raise refusal(Cause.BLACKLISTED)
        seal = Seal(
            node_id=claims.node_id,
            tenant=claims.tenant,
            stream_id=check_uuid(hello.stream_id, field="stream_id"),
            token_id=claims.jti,
            newest_ms=0,
        )
        if not _bound(claims, node.spec.public_key):
            raise refusal(Cause.KEY)
        self._check_signature(seal, node.spec.public_key, shown)
        signed = self._check_payload(seal, EventKind.HELLO, hello, shown.payload)
        if signed is not None:
            self._take_once(shown.payload, signed)
        seal._token, seal._claims = shown.node_security_token, claims
        return node, seal

    def _token(self, token: str) -> NodeClaims:
        try:
            claims = self._tokens.verify_node(token, allow_expired=True, allow_blacklisted=True)
        except Unauthenticated as error:
            raise refusal(Cause.TOKEN, error.message) from error
        if claims.role != EDGE_ROLE:
            raise refusal(Cause.TOKEN, "the token is not an edge daemon's")
        return claims

    def _record(self, claims: NodeClaims) -> EdgeNode:
        node = self._store.get(EDGE_NODE, tenant_scope(claims.tenant), claims.node_id)
        if node is None:
            owner = self._store.claimed_by(EDGE_NODE, "", NODE_CLAIM, claims.node_id)
            raise refusal(Cause.UNKNOWN_NODE if owner is None else Cause.TENANT)
        if node.spec.revoked_at_ns is not None:
            raise refusal(Cause.REVOKED)
        return node

    def _in_time(self, claims: NodeClaims, spec: NodeSpec) -> None:
        late_ns = self._clock.now_ns() - claims.expires_at_ns
        # One that is over is good for nothing unless it is the latest: the blacklist forgets those.
        tolerated_ns = self._policy.expired_seconds * 1e9 if claims.jti == spec.token_id else 0.0
        if late_ns >= tolerated_ns:
            raise refusal(Cause.EXPIRED)

    def _take_once(self, payload: bytes, signed: Canonical) -> None:
        """The same hello does not open two streams: whoever wrote one down gets nowhere with it."""
        now_ms = self._clock.now_ns() // MS
        while self._hellos:
            oldest, until_ms = next(iter(self._hellos.items()))
            if until_ms > now_ms and len(self._hellos) < REPLAYS_LIMIT:
                break
            del self._hellos[oldest]
        if payload in self._hellos:
            raise refusal(Cause.REPLAYED)
        self._hellos[payload] = signed.timestamp_ms + self._skew_ms

    # All others.

    def event(self, seal: Seal, kind: EventKind, event: Event) -> EdgeNode:
        """The node's record, if the event is to be believed."""
        return self._counted(lambda: self._event(seal, kind, event))

    def _event(self, seal: Seal, kind: EventKind, event: Event) -> EdgeNode:
        shown = _envelope(event)
        token = shown.node_security_token
        claims = seal._claims if token == seal._token and seal._claims is not None else self._token(token)
        if claims.node_id != seal.node_id:
            raise refusal(Cause.NODE)
        if claims.tenant != seal.tenant:
            raise refusal(Cause.TENANT)
        node = self._record(claims)
        self._check_signature(seal, self._key_for(seal, node.spec, claims), shown)
        signed = self._check_payload(seal, kind, event, shown.payload)
        if signed is not None:
            seal.newest_ms = max(seal.newest_ms, signed.timestamp_ms)
        seal._token, seal._claims, seal.token_id = token, claims, claims.jti
        return node

    def _key_for(self, seal: Seal, spec: NodeSpec, claims: NodeClaims) -> bytes:
        """The key that must have signed, given the token; refuses tokens that are good for none.

        An open stream outlives its token's end. A token that was replaced by a rotation is good
        on a stream that came with it, together with its key, until the overlap is over.
        """
        replaced = claims.jti == spec.previous_token_id and claims.jti == seal.token_id
        overlap_ns = max(spec.previous_key_until_ns, seal.extended_until_ns)
        if replaced and self._clock.now_ns() < overlap_ns:
            former = spec.previous_public_key or spec.public_key
            for key in (former, spec.public_key):
                if _bound(claims, key):
                    return key
            raise refusal(Cause.KEY)
        if self._tokens.is_blacklisted(claims.jti):
            raise refusal(Cause.BLACKLISTED)
        if not _bound(claims, spec.public_key):
            raise refusal(Cause.KEY)
        return spec.public_key

    # What both share.

    def _check_signature(self, seal: Seal, key: bytes, shown: pb.SealNodeEnvelope) -> None:
        held = seal._key
        if held is None or held[0] != key:
            held = (key, Ed25519PublicKey.from_public_bytes(key))
        try:
            held[1].verify(shown.signature, shown.payload)
        except InvalidSignature as error:
            raise refusal(Cause.SIGNATURE) from error
        seal._key = held

    def _check_payload(self, seal: Seal, kind: EventKind, event: Event, payload: bytes) -> Canonical | None:
        signed = envelope.parse(payload)
        if signed is None:
            if self._policy.strict:
                raise refusal(Cause.NOT_CANONICAL)
            return None
        cause = mismatch(
            signed, event, kind=kind, seal=seal, now_ms=self._clock.now_ns() // MS,
            skew_ms=self._skew_ms, strict=self._policy.strict,
        )  # fmt: skip
        if cause is not None:
            raise refusal(cause)
        return signed

    def _counted(self, check: Callable[[], R]) -> R:
        try:
            return check()
        except FleetplaneError as error:
            cause = error.details.get("cause")
            if cause in self.refused:
                self.refused[Cause(cause)] += 1
            raise


def mismatch(
    signed: Canonical, event: Event, *, kind: EventKind, seal: Seal, now_ms: int, skew_ms: int, strict: bool
) -> Cause | None:
    """What a payload says otherwise than the event that carries it. Pure."""
    if signed.kind is not kind:
        return Cause.KIND
    if signed.node_id != seal.node_id:
        return Cause.NODE
    if signed.stream_id != seal.stream_id:
        return Cause.STREAM
    if abs(signed.timestamp_ms - now_ms) > skew_ms:
        return Cause.STALE
    if signed.timestamp_ms < seal.newest_ms - skew_ms:
        return Cause.BACKWARDS
    return None if _covers(signed.inner, event, strict=strict) else Cause.CONTENT


def _covers(inner: bytes, event: Event, *, strict: bool) -> bool:
    match event:
        case tolerant_pb2.Heartbeat():
            return not inner
        case tolerant_pb2.CommandResult():
            return envelope.covers_result(inner, event.command_id, event.result, digest_required=strict)
        case tolerant_pb2.CommandProgress():
            return envelope.covers_progress(
                inner, event.command_id, chunk=event.chunk, sequence=event.sequence, stderr=event.stderr
            )
        case tolerant_pb2.Hello() | tolerant_pb2.CapabilityUpdate():
            return envelope.covers_capabilities(inner, event.capabilities, digest_required=strict)


def _envelope(event: Event) -> pb.SealNodeEnvelope:
    if not event.HasField("envelope"):
        raise refusal(Cause.NO_ENVELOPE)
    return event.envelope


def _bound(claims: NodeClaims, key: bytes) -> bool:
    """Whether a token may go with this key; one that names no key goes with any of its node."""
    return not claims.thumbprint or claims.thumbprint == thumbprint(key)
