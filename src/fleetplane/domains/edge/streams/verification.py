"""Whether an event on a stream is what it claims to be.

Every event carries an envelope: a token of ours, a payload, and the node's signature over it. An
event is believed if all of this holds, and each way to fail has a name (`RejectionCause`):

    the token is ours, in time, not blacklisted, and of the tenant that owns the node
    it is of the node whose stream it is
    the signature is by the key that the token is bound to: the node's current one, or on a stream
      that was open at a rotation the one before, for as long as that may go on
    the payload is of this kind of event, this node, this stream and about now
    the payload vouches for the rest of the event

How much of an event its payload vouches for depends on who made the daemon. Its hello tells, and holds
for the whole stream (`SealForm`): whoever signs in full once is held to it. A payload in a layout that is not
that of `envelope` does not say what it was signed for, and is refused; a policy that is not strict takes
it on streams that began so, if it names the stream and comes for the first time.

A hello opens one stream, once: those of this process are remembered, and of those before it the record
has the time of the last. Where several servers share a database, the daemon's presence has it for all.

An event is looked at ten thousand times in half a minute, so what cannot have changed since the
last one of its stream is not worked out again: the token's claims, the key. Whether the token was
blacklisted and the record changed is looked up every time.
"""

from __future__ import annotations

import hashlib
import secrets
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fleetplane.domains.edge.identity.tokens import EDGE_ROLE, NodeClaims, thumbprint
from fleetplane.domains.edge.kinds import EDGE_NODE, NODE_CLAIM, EdgeNode, NodeSpec, tenant_scope
from fleetplane.domains.edge.wire import envelope
from fleetplane.domains.edge.wire.envelope import Canonical, EventKind
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
from fleetplane.kernel.values.ids import check_uuid

R = TypeVar("R")

MS = 1_000_000
REPLAYS_LIMIT = 65_536
"""First messages remembered, as many as there can be streams; about 200 bytes each."""
OPEN_LIMIT = 4096
"""Payloads of one stream that are remembered because they carry no time; about 100 bytes each."""
NEVER_MS = 2**62
OUTPUT_SAMPLE = 32
"""One line of output in so many has its signature checked, of daemons that send one by one."""


LAYOUT_PAGE = "docs/edge.md#a-daemon-of-your-own"


class SealForm(StrEnum):
    """What the payloads of a stream vouch for."""

    FULL = "full"
    """All of each event, by digests."""
    SHORT = "short"
    """As daemons in the field sign: not the body of results, nor the capabilities."""
    OPEN = "open"
    """In a layout of the daemon's own."""


class RejectionCause(StrEnum):
    """Why an event was rejected; in `details["cause"]` of the error, and a label of its metric."""

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


_REFUSALS: Mapping[RejectionCause, tuple[type[FleetplaneError], str]] = {
    RejectionCause.MALFORMED: (InvalidArgument, "the message cannot be read"),
    RejectionCause.NOT_HELLO: (InvalidArgument, "the first message must be a hello"),
    RejectionCause.SECOND_HELLO: (InvalidArgument, "a stream begins with one hello, and has no other"),
    RejectionCause.NO_ENVELOPE: (InvalidArgument, "the message has no envelope"),
    RejectionCause.TOKEN: (Unauthenticated, "the token is not one of ours"),
    RejectionCause.EXPIRED: (Unauthenticated, "the token has expired"),
    RejectionCause.BLACKLISTED: (Unauthenticated, "the token was replaced or revoked"),
    RejectionCause.UNKNOWN_NODE: (NotFound, "the node is not enrolled"),
    RejectionCause.REVOKED: (FailedPrecondition, "the node was revoked"),
    RejectionCause.TENANT: (PermissionDenied, "the token is of another tenant than the node"),
    RejectionCause.BEARER: (
        Unauthenticated,
        "the token of the call and of the hello are not of the same node",
    ),
    RejectionCause.NODE: (Unauthenticated, "the envelope is of another node than its stream"),
    RejectionCause.KEY: (Unauthenticated, "the token is bound to a key that is not the node's"),
    RejectionCause.SIGNATURE: (Unauthenticated, "the signature is wrong"),
    RejectionCause.NOT_CANONICAL: (
        Unauthenticated,
        f"the signed payload does not say what it is about: sign the layout in {LAYOUT_PAGE}",
    ),
    RejectionCause.KIND: (Unauthenticated, "the envelope is of another kind of event"),
    RejectionCause.STREAM: (Unauthenticated, "the envelope is of another stream"),
    RejectionCause.STALE: (Unauthenticated, "the envelope's time is too far from now"),
    RejectionCause.BACKWARDS: (Unauthenticated, "the envelope is older than what came before it"),
    RejectionCause.CONTENT: (
        Unauthenticated,
        f"the envelope does not vouch for this message: sign its digest as in {LAYOUT_PAGE}",
    ),
    RejectionCause.REPLAYED: (Unauthenticated, "the hello was used before"),
}


def refusal(cause: RejectionCause, text: str = "") -> FleetplaneError:
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
    strict: bool = True
    """Refuse payloads in a layout that is not ours."""
    first_generation: bool = True
    """Take the short forms of daemons in the field, from those whose hello has it."""
    output_checked: bool = False
    """Check the signature of every line of output, also of daemons that do not sign for results."""
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
    form: SealForm = SealForm.FULL
    hello_ms: int = 0
    """The time that its hello was signed with; 0 if it does not say."""
    extended_until_ns: int = 0
    """Replaced credentials stay good until then on this stream, if that is later than the record says."""
    _token: str = ""
    _claims: NodeClaims | None = None
    _key: tuple[bytes, Ed25519PublicKey] | None = field(default=None, repr=False)
    _output_of: str = ""
    """The command whose output came last."""
    _unchecked: int = 0
    """Lines of it that come before the next whose signature is checked."""
    _place: bytes = b""
    """What all payloads of the stream have in common."""
    _scope: str = ""
    _seen: OrderedDict[bytes, None] = field(default_factory=OrderedDict, repr=False)
    """Digests of payloads that say nothing of their time, each of which counts once."""


class StreamTokens(Protocol):
    def verify_node(
        self, token: str, *, allow_expired: bool = False, allow_blacklisted: bool = False
    ) -> NodeClaims: ...

    def is_blacklisted(self, jti: str) -> bool: ...


class StreamVerifier:
    def __init__(self, tokens: StreamTokens, store: Store, clock: Clock, policy: SealPolicy) -> None:
        self._tokens = tokens
        self._store = store
        self._clock = clock
        self._policy = policy
        self._skew_ms = round(policy.skew_seconds * 1000)
        self._began_ms = clock.now_ns() // MS
        self._hellos: OrderedDict[bytes, int] = OrderedDict()
        """Payloads of first messages, and when they are too old to be taken anyway."""
        self.refused: dict[RejectionCause, int] = dict.fromkeys(RejectionCause, 0)

    # The first message.

    def hello(self, hello: tolerant_pb2.Hello, bearer: str | None = None) -> tuple[EdgeNode, Seal]:
        """Whose stream it is, and what the rest of it is held against."""
        return self._counted(lambda: self._hello(hello, bearer))

    def _hello(self, hello: tolerant_pb2.Hello, bearer: str | None) -> tuple[EdgeNode, Seal]:
        shown = _envelope(hello)
        claims = self._token(shown.node_security_token)
        if bearer is not None and self._token(bearer).node_id != claims.node_id:
            raise refusal(RejectionCause.BEARER)
        node = self._record(claims)
        self._in_time(claims, node.spec)
        if self._tokens.is_blacklisted(claims.jti):
            raise refusal(RejectionCause.BLACKLISTED)
        seal = Seal(
            node_id=claims.node_id,
            tenant=claims.tenant,
            stream_id=check_uuid(hello.stream_id, field="stream_id"),
            token_id=claims.jti,
            newest_ms=0,
        )
        if not _bound(claims, node.spec.public_key):
            raise refusal(RejectionCause.KEY)
        self._check_signature(seal, node.spec.public_key, shown)
        seal.form = self._form(shown.payload)
        signed = self._check_payload(seal, EventKind.HELLO, hello, shown.payload)
        seal.hello_ms = signed.timestamp_ms if signed is not None else 0
        self._take_once(node, seal, shown.payload)
        seal._token, seal._claims = shown.node_security_token, claims
        seal._place = envelope.place(seal.node_id, seal.stream_id)
        seal._scope = tenant_scope(seal.tenant)
        return node, seal

    def _token(self, token: str) -> NodeClaims:
        try:
            claims = self._tokens.verify_node(token, allow_expired=True, allow_blacklisted=True)
        except Unauthenticated as error:
            raise refusal(RejectionCause.TOKEN, error.message) from error
        if claims.role != EDGE_ROLE:
            raise refusal(RejectionCause.TOKEN, "the token is not an edge daemon's")
        return claims

    def _record(self, claims: NodeClaims) -> EdgeNode:
        node = self._store.get(EDGE_NODE, tenant_scope(claims.tenant), claims.node_id)
        if node is None:
            owner = self._store.claimed_by(EDGE_NODE, "", NODE_CLAIM, claims.node_id)
            raise refusal(RejectionCause.UNKNOWN_NODE if owner is None else RejectionCause.TENANT)
        if node.spec.revoked_at_ns is not None:
            raise refusal(RejectionCause.REVOKED)
        return node

    def _in_time(self, claims: NodeClaims, spec: NodeSpec) -> None:
        late_ns = self._clock.now_ns() - claims.expires_at_ns
        # One that is over is good for nothing unless it is the latest: the blacklist forgets those.
        tolerated_ns = self._policy.expired_seconds * 1e9 if claims.jti == spec.token_id else 0.0
        if late_ns >= tolerated_ns:
            raise refusal(RejectionCause.EXPIRED)

    def _form(self, payload: bytes) -> SealForm:
        signed = envelope.parse(payload)
        if signed is None:
            if self._policy.strict:
                raise refusal(RejectionCause.NOT_CANONICAL)
            return SealForm.OPEN
        if signed.inner:
            return SealForm.FULL
        if not self._policy.first_generation:
            raise refusal(RejectionCause.CONTENT, "the envelope does not vouch for the capabilities")
        return SealForm.SHORT

    def _take_once(self, node: EdgeNode, seal: Seal, payload: bytes) -> None:
        """Refuse a hello that was used before: a recorded one cannot be replayed."""
        now_ms = self._clock.now_ns() // MS
        if node.status is not None and (
            seal.stream_id == node.status.stream_id
            if seal.form is SealForm.OPEN
            else seal.hello_ms < self._began_ms and seal.hello_ms <= node.status.hello_ms
        ):
            raise refusal(RejectionCause.REPLAYED)
        while self._hellos:
            oldest, until_ms = next(iter(self._hellos.items()))
            if until_ms > now_ms and len(self._hellos) < REPLAYS_LIMIT:
                break
            del self._hellos[oldest]
        if payload in self._hellos:
            raise refusal(RejectionCause.REPLAYED)
        self._hellos[payload] = (seal.hello_ms or NEVER_MS) + self._skew_ms

    def replayed(self) -> FleetplaneError:
        """The refusal of a hello that another server has accepted, or a later one."""
        self.refused[RejectionCause.REPLAYED] += 1
        return refusal(RejectionCause.REPLAYED)

    # All others.

    def event(self, seal: Seal, kind: EventKind, event: Event) -> EdgeNode:
        """The node's record, once the event is verified."""
        return self._counted(lambda: self._event(seal, kind, event))

    def output(self, seal: Seal, event: tolerant_pb2.CommandProgress) -> None:
        """Verify an output event. The first generation sends one for every line.

        Its results repeat all output and are not signed for, so whoever could alter a line on its way can
        alter the result. One line in `OUTPUT_SAMPLE`, picked by chance, and the first of each command have
        their signature checked; token, kind, node, stream, time and content are looked at in every line.
        """
        if self._policy.output_checked or seal.form is not SealForm.SHORT or not self._passes(seal, event):
            self.event(seal, EventKind.COMMAND_PROGRESS, event)

    def _passes(self, seal: Seal, event: tolerant_pb2.CommandProgress) -> bool:
        """Whether a line needs no closer look: all but its signature is as it must be, and it is not its turn
        to have that checked. Whatever is wrong is found, and named, by looking closer."""
        shown = event.envelope
        claims = seal._claims
        if seal._unchecked <= 0 or seal._output_of != event.command_id or claims is None:
            seal._output_of = event.command_id
            seal._unchecked = secrets.randbelow(2 * OUTPUT_SAMPLE)
            return False
        seal._unchecked -= 1
        if shown.node_security_token != seal._token or seal._key is None:
            return False
        at_ms = envelope.short_progress_time(
            shown.payload,
            seal._place,
            event.command_id,
            sequence=event.sequence,
            stderr=event.stderr,
            chunk=event.chunk,
        )
        if at_ms is None or abs(at_ms - self._clock.now_ns() // MS) > self._skew_ms:
            return False
        if at_ms < seal.newest_ms - self._skew_ms:
            return False
        node = self._store.get(EDGE_NODE, seal._scope, seal.node_id)
        if node is None or node.spec.revoked_at_ns is not None or node.spec.token_id != claims.jti:
            return False
        if seal._key[0] != node.spec.public_key:
            return False
        seal.newest_ms = max(seal.newest_ms, at_ms)
        return True

    def _event(self, seal: Seal, kind: EventKind, event: Event) -> EdgeNode:
        shown = _envelope(event)
        token = shown.node_security_token
        claims = seal._claims if token == seal._token and seal._claims is not None else self._token(token)
        if claims.node_id != seal.node_id:
            raise refusal(RejectionCause.NODE)
        if claims.tenant != seal.tenant:
            raise refusal(RejectionCause.TENANT)
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
        replaced = claims.jti != spec.token_id and claims.jti == seal.token_id
        former = spec.former(claims.jti) if replaced else None
        if former is not None and self._clock.now_ns() < max(former.until_ns, seal.extended_until_ns):
            for key in (former.public_key, spec.public_key):
                if _bound(claims, key):
                    return key
            raise refusal(RejectionCause.KEY)
        if self._tokens.is_blacklisted(claims.jti):
            raise refusal(RejectionCause.BLACKLISTED)
        if not _bound(claims, spec.public_key):
            raise refusal(RejectionCause.KEY)
        return spec.public_key

    # What both share.

    def _check_signature(self, seal: Seal, key: bytes, shown: pb.SealNodeEnvelope) -> None:
        held = seal._key
        if held is None or held[0] != key:
            held = (key, Ed25519PublicKey.from_public_bytes(key))
        try:
            held[1].verify(shown.signature, shown.payload)
        except InvalidSignature as error:
            raise refusal(RejectionCause.SIGNATURE) from error
        seal._key = held

    def _check_payload(self, seal: Seal, kind: EventKind, event: Event, payload: bytes) -> Canonical | None:
        signed = envelope.parse(payload)
        if signed is None:
            if seal.form is not SealForm.OPEN or self._policy.strict:
                raise refusal(RejectionCause.NOT_CANONICAL)
            _take_open(seal, payload)
            return None
        cause = mismatch(
            signed, event, kind=kind, seal=seal, now_ms=self._clock.now_ns() // MS, skew_ms=self._skew_ms
        )
        if cause is not None:
            raise refusal(cause)
        return signed

    def _counted(self, check: Callable[[], R]) -> R:
        try:
            return check()
        except FleetplaneError as error:
            cause = error.details.get("cause")
            if cause in self.refused:
                self.refused[RejectionCause(cause)] += 1
            raise


def mismatch(
    signed: Canonical, event: Event, *, kind: EventKind, seal: Seal, now_ms: int, skew_ms: int
) -> RejectionCause | None:
    """What a payload says otherwise than the event that carries it. Pure."""
    if signed.kind is not kind:
        return RejectionCause.KIND
    if signed.node_id != seal.node_id:
        return RejectionCause.NODE
    if signed.stream_id != seal.stream_id:
        return RejectionCause.STREAM
    if abs(signed.timestamp_ms - now_ms) > skew_ms:
        return RejectionCause.STALE
    if signed.timestamp_ms < seal.newest_ms - skew_ms:
        return RejectionCause.BACKWARDS
    return (
        None if _covers(signed.inner, event, in_full=seal.form is SealForm.FULL) else RejectionCause.CONTENT
    )


def _take_open(seal: Seal, payload: bytes) -> None:
    """A payload in a layout of the daemon's own: of this stream and no other, and each of them once."""
    named = seal.stream_id.encode() in payload or uuid.UUID(seal.stream_id).bytes in payload
    if not named:
        raise refusal(RejectionCause.STREAM)
    digest = hashlib.sha256(payload).digest()
    if digest in seal._seen:
        raise refusal(RejectionCause.REPLAYED, "the envelope was used before")
    seal._seen[digest] = None
    if len(seal._seen) > OPEN_LIMIT:
        seal._seen.popitem(last=False)


def _covers(inner: bytes, event: Event, *, in_full: bool) -> bool:
    match event:
        case tolerant_pb2.Heartbeat():
            return not inner
        case tolerant_pb2.CommandResult():
            return envelope.covers_result(inner, event.command_id, event.result, digest_required=in_full)
        case tolerant_pb2.CommandProgress():
            return envelope.covers_progress(
                inner, event.command_id, chunk=event.chunk, sequence=event.sequence, stderr=event.stderr
            )
        case tolerant_pb2.Hello() | tolerant_pb2.CapabilityUpdate():
            return envelope.covers_capabilities(inner, event.capabilities, digest_required=in_full)


def _envelope(event: Event) -> pb.SealNodeEnvelope:
    if not event.HasField("envelope"):
        raise refusal(RejectionCause.NO_ENVELOPE)
    return event.envelope


def _bound(claims: NodeClaims, key: bytes) -> bool:
    """Whether a token may go with this key; one that names no key goes with any of its node."""
    return not claims.thumbprint or claims.thumbprint == thumbprint(key)
