"""What is believed of what a daemon sends, on a clock that moves when told to."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.edge.edge_signer import (
    BOSS,
    TOKEN_SECONDS,
    Identity,
    Signer,
    enrolled,
    ok,
    opened_tokens,
    rotated,
)

from fleetplane.domains.edge.identity.tokens import NodeTokens
from fleetplane.domains.edge.kinds import (
    EDGE_NODE,
    NodeResources,
    NodeState,
    NodeStatus,
    WorkerRole,
    tenant_scope,
)
from fleetplane.domains.edge.nodes.registry import Nodes
from fleetplane.domains.edge.streams.connect_edge import _parsed
from fleetplane.domains.edge.streams.verification import RejectionCause, Seal, SealPolicy, StreamVerifier
from fleetplane.domains.edge.wire import envelope
from fleetplane.domains.edge.wire.envelope import EventKind
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.fleetplane.edge.v1 import tolerant_pb2
from fleetplane.kernel.errors import (
    FailedPrecondition,
    FleetplaneError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unauthenticated,
)
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.store import Draft, Store
from fleetplane.sim.clock import VirtualClock

STRANGER = Ed25519PrivateKey.generate()
COMMAND = "cccccccc-1111-4222-8333-dddddddddddd"
OTHER_STREAM = "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee"
Make = Callable[["Ground"], tuple[EventKind, Any]]


@dataclass(slots=True, kw_only=True)
class Ground:
    store: Store
    tokens: NodeTokens
    clock: VirtualClock
    identity: Identity
    neighbour: Identity
    """Of the same tenant."""
    verifier: StreamVerifier
    sign: Signer

    def hello(self, **wrong: Any) -> Seal:
        return self.verifier.hello(self.sign.hello(**wrong))[1]

    def beat(self, seal: Seal, **wrong: Any) -> None:
        self.verifier.event(seal, EventKind.HEARTBEAT, self.sign.heartbeat(**wrong))

    def with_policy(self, **policy: bool) -> StreamVerifier:
        return StreamVerifier(self.tokens, self.store, self.clock, SealPolicy(**policy))

    def refused(self, check: Callable[[], Any]) -> tuple[RejectionCause, type[FleetplaneError]]:
        before = dict(self.verifier.refused)
        with pytest.raises(FleetplaneError) as caught:
            check()
        cause = RejectionCause(caught.value.details["cause"])
        counted = {name for name, count in self.verifier.refused.items() if count != before[name]}
        assert counted <= {cause}
        return cause, type(caught.value)


@asynccontextmanager
async def ground(folder: Path) -> AsyncIterator[Ground]:
    clock = VirtualClock()
    async with opened_tokens(folder, clock) as (store, tokens, _):
        identity = await enrolled(store, tokens, clock)
        yield Ground(
            store=store,
            tokens=tokens,
            clock=clock,
            identity=identity,
            neighbour=await enrolled(store, tokens, clock),
            verifier=StreamVerifier(tokens, store, clock, SealPolicy()),
            sign=Signer(identity=identity, clock=clock),
        )


async def test_a_stream_as_daemons_of_both_kinds_send_it_is_believed(tmp_path: Path) -> None:
    async with ground(tmp_path) as g:
        for digest in (True, False):
            seal = g.hello(digest=digest)
            g.beat(seal)
            event, sign = g.verifier.event, g.sign
            event(seal, EventKind.COMMAND_RESULT, sign.result(COMMAND, ok(), digest=digest))
            event(seal, EventKind.COMMAND_PROGRESS, sign.chunk(COMMAND, pb.Chunk(stdout=b"x")))
            event(seal, EventKind.COMMAND_PROGRESS, sign.line(COMMAND, b"x\n", sequence=0))
            event(seal, EventKind.COMMAND_PROGRESS, sign.line(COMMAND, b"y\n", sequence=7, stderr=True))
            event(seal, EventKind.CAPABILITY_UPDATE, sign.update(pb.EdgeCapabilities(os="macos")))
            await g.clock.advance(1)
        assert sum(g.verifier.refused.values()) == 0
        assert g.tokens.checked == 1, "the token's own signature is looked at once"


def _altered_result(g: Ground) -> tuple[EventKind, Any]:
    made = g.sign.result(COMMAND, ok(0))
    made.result = ok(1)
    return EventKind.COMMAND_RESULT, made


def _other_command(g: Ground) -> tuple[EventKind, Any]:
    made = g.sign.result(COMMAND, ok(0), digest=False)
    made.command_id = COMMAND.replace("c", "e")
    return EventKind.COMMAND_RESULT, made


def _altered_chunk(g: Ground) -> tuple[EventKind, Any]:
    made = g.sign.chunk(COMMAND, pb.Chunk(stdout=b"fine"))
    made.chunk = pb.Chunk(stdout=b"evil").SerializeToString()
    return EventKind.COMMAND_PROGRESS, made


def _moved_line(g: Ground) -> tuple[EventKind, Any]:
    made = g.sign.line(COMMAND, b"x\n", sequence=1)
    made.stderr = True
    return EventKind.COMMAND_PROGRESS, made


def _altered_update(g: Ground) -> tuple[EventKind, Any]:
    made = g.sign.update(pb.EdgeCapabilities(os="linux"))
    made.capabilities = pb.EdgeCapabilities(os="plan9").SerializeToString()
    return EventKind.CAPABILITY_UPDATE, made


def _no_envelope(_: Ground) -> tuple[EventKind, Any]:
    return EventKind.HEARTBEAT, tolerant_pb2.Heartbeat()


def _worker_token(g: Ground) -> tuple[EventKind, Any]:
    issued = g.tokens.issue_worker(
        g.identity.node_id,
        WorkerRole.WORKER,
        g.identity.public_key,
        capabilities=NodeResources(),
        tags=(),
        life_seconds=60,
    )
    return EventKind.HEARTBEAT, g.sign.heartbeat(token=issued.token)


def _foreign_tenant(g: Ground) -> tuple[EventKind, Any]:
    issued = g.tokens.issue_node(g.identity.node_id, "rival", g.identity.public_key, life_seconds=60)
    return EventKind.HEARTBEAT, g.sign.heartbeat(token=issued.token)


def _token_of_another_key(g: Ground) -> tuple[EventKind, Any]:
    public = STRANGER.public_key().public_bytes_raw()
    issued = g.tokens.issue_node(g.identity.node_id, g.identity.tenant, public, life_seconds=60)
    return EventKind.HEARTBEAT, g.sign.heartbeat(token=issued.token, key=STRANGER)


def _beat(**wrong: Any) -> Make:
    return lambda g: (EventKind.HEARTBEAT, g.sign.heartbeat(**wrong))


@pytest.mark.parametrize(
    ("make", "cause", "error"),
    [
        (_no_envelope, RejectionCause.NO_ENVELOPE, InvalidArgument),
        (_beat(token=""), RejectionCause.TOKEN, Unauthenticated),
        (_beat(token="a.b.c"), RejectionCause.TOKEN, Unauthenticated),
        (
            lambda g: (EventKind.HEARTBEAT, g.sign.heartbeat(token=g.identity.token[:-8])),
            RejectionCause.TOKEN,
            Unauthenticated,
        ),
        (_worker_token, RejectionCause.TOKEN, Unauthenticated),
        (
            lambda g: (EventKind.HEARTBEAT, g.sign.heartbeat(token=g.neighbour.token, key=g.neighbour.key)),
            RejectionCause.NODE,
            Unauthenticated,
        ),
        (_foreign_tenant, RejectionCause.TENANT, PermissionDenied),
        (_token_of_another_key, RejectionCause.KEY, Unauthenticated),
        (_beat(key=STRANGER), RejectionCause.SIGNATURE, Unauthenticated),
        (_beat(signature=b"\0" * 64), RejectionCause.SIGNATURE, Unauthenticated),
        (_beat(signature=b"short"), RejectionCause.SIGNATURE, Unauthenticated),
        (_beat(kind=EventKind.COMMAND_RESULT), RejectionCause.KIND, Unauthenticated),
        (_beat(kind=EventKind.COMMAND), RejectionCause.KIND, Unauthenticated),
        (
            lambda g: (EventKind.HEARTBEAT, g.sign.heartbeat(node_id=g.neighbour.node_id)),
            RejectionCause.NODE,
            Unauthenticated,
        ),
        (_beat(stream_id=OTHER_STREAM), RejectionCause.STREAM, Unauthenticated),
        (_beat(ahead_ms=300_001), RejectionCause.STALE, Unauthenticated),
        (_beat(ahead_ms=-300_001), RejectionCause.STALE, Unauthenticated),
        (_beat(inner=b"more"), RejectionCause.CONTENT, Unauthenticated),
        (_altered_result, RejectionCause.CONTENT, Unauthenticated),
        (_other_command, RejectionCause.CONTENT, Unauthenticated),
        (_altered_chunk, RejectionCause.CONTENT, Unauthenticated),
        (_moved_line, RejectionCause.CONTENT, Unauthenticated),
        (_altered_update, RejectionCause.CONTENT, Unauthenticated),
    ],
)
async def test_each_violation_is_refused_for_its_own_reason(
    tmp_path: Path, make: Make, cause: RejectionCause, error: type[FleetplaneError]
) -> None:
    async with ground(tmp_path) as g:
        seal = g.hello()
        kind, event = make(g)
        assert g.refused(lambda: g.verifier.event(seal, kind, event)) == (cause, error)
        assert g.verifier.refused[cause] == 1
        g.beat(seal)  # one bad event does not spoil what is remembered of the stream


async def test_every_flipped_or_missing_byte_of_a_heartbeat_is_noticed(tmp_path: Path) -> None:
    async with ground(tmp_path) as g:
        seal = g.hello()
        raw = tolerant_pb2.EdgeEvent(heartbeat=g.sign.heartbeat()).SerializeToString()
        for place in range(len(raw)):
            flipped = bytearray(raw)
            flipped[place] ^= 1
            for spoilt in (bytes(flipped), raw[:place]):
                with pytest.raises(FleetplaneError):
                    _as_heartbeat(g, seal, spoilt)
        _as_heartbeat(g, seal, raw)


def _as_heartbeat(g: Ground, seal: Seal, raw: bytes) -> None:
    event = _parsed(raw)
    if event.WhichOneof("event") != "heartbeat":
        raise InvalidArgument("another kind")
    g.verifier.event(seal, EventKind.HEARTBEAT, event.heartbeat)


async def test_events_out_of_order_are_taken_within_the_skew_and_no_further(tmp_path: Path) -> None:
    async with ground(tmp_path) as g:
        seal = g.hello()
        g.beat(seal, ahead_ms=200_000)
        g.beat(seal, ahead_ms=-99_000)
        assert g.refused(lambda: g.beat(seal, ahead_ms=-100_001))[0] is RejectionCause.BACKWARDS


async def test_an_event_of_one_stream_is_nothing_on_another(tmp_path: Path) -> None:
    async with ground(tmp_path) as g:
        g.hello()
        recorded = g.sign.heartbeat()
        g.sign = Signer(identity=g.identity, clock=g.clock)
        seal = g.hello()
        assert (
            g.refused(lambda: g.verifier.event(seal, EventKind.HEARTBEAT, recorded))[0]
            is RejectionCause.STREAM
        )


async def test_a_hello_opens_one_stream_only(tmp_path: Path) -> None:
    async with ground(tmp_path) as g:
        recorded = g.sign.hello()
        g.verifier.hello(recorded)
        assert g.refused(lambda: g.verifier.hello(recorded))[0] is RejectionCause.REPLAYED
        await g.clock.advance(299)
        assert g.refused(lambda: g.verifier.hello(recorded))[0] is RejectionCause.REPLAYED
        await g.clock.advance(2)
        assert g.refused(lambda: g.verifier.hello(recorded))[0] is RejectionCause.STALE
        g.hello()  # a new one of the same stream id is another one


async def test_a_payload_of_no_known_layout_is_refused_unless_not_strict(
    tmp_path: Path,
) -> None:
    async with ground(tmp_path) as g:
        g.sign.plain = f"hello on {g.sign.stream_id}".encode()
        assert g.refused(g.hello)[0] is RejectionCause.NOT_CANONICAL
        lenient = g.with_policy(strict=False)
        _, seal = lenient.hello(g.sign.hello())

        def beat(payload: bytes) -> None:
            g.sign.plain = payload
            lenient.event(seal, EventKind.HEARTBEAT, g.sign.heartbeat())

        beat(b"beat 1 on " + g.sign.stream_id.encode())
        assert (
            g.refused(lambda: beat(b"beat 1 on " + g.sign.stream_id.encode()))[0] is RejectionCause.REPLAYED
        )
        assert g.refused(lambda: beat(b"beat 2 on " + OTHER_STREAM.encode()))[0] is RejectionCause.STREAM
        beat(b"beat 2 on " + uuid.UUID(g.sign.stream_id).bytes)


async def test_who_signs_in_full_once_is_held_to_it_for_the_whole_stream(tmp_path: Path) -> None:
    async with ground(tmp_path) as g:
        seal = g.hello(digest=True)
        short = g.sign.result(COMMAND, ok(), digest=False)
        assert (
            g.refused(lambda: g.verifier.event(seal, EventKind.COMMAND_RESULT, short))[0]
            is RejectionCause.CONTENT
        )
        g.verifier.event(seal, EventKind.COMMAND_RESULT, g.sign.result(COMMAND, ok()))
        plain = Signer(identity=g.identity, clock=g.clock, stream_id=g.sign.stream_id, plain=b"whatever")
        foreign = plain.heartbeat()
        assert (
            g.refused(lambda: g.verifier.event(seal, EventKind.HEARTBEAT, foreign))[0]
            is RejectionCause.NOT_CANONICAL
        )


async def test_the_first_generation_can_be_kept_out(tmp_path: Path) -> None:
    async with ground(tmp_path) as g:
        later = g.with_policy(first_generation=False)
        assert g.refused(lambda: later.hello(g.sign.hello(digest=False)))[0] is RejectionCause.CONTENT
        later.hello(g.sign.hello(digest=True))


async def test_a_hello_from_before_a_restart_opens_nothing_after_it(tmp_path: Path) -> None:
    async with ground(tmp_path) as g:
        first, last = g.sign.hello(), g.sign.hello(ahead_ms=1)
        for recorded in (first, last):
            g.verifier.hello(recorded)

        def opened(draft: Draft) -> None:
            scope = tenant_scope(g.identity.tenant)
            node = draft.get(EDGE_NODE, scope, g.identity.node_id)
            assert node is not None
            status = NodeStatus(state=NodeState.CONNECTED, since_ns=1, hello_ms=g.clock.now_ns() // 10**6 + 1)
            draft.put(EDGE_NODE, scope, node.name, spec=node.spec, status=status)

        key = EDGE_NODE.key(tenant_scope(g.identity.tenant), g.identity.node_id)
        await g.store.transact(opened, actor=BOSS, action="edge.state", touches=[key])
        await g.clock.advance(2)
        restarted = g.with_policy()
        for recorded in (first, last):
            assert g.refused(lambda r=recorded: restarted.hello(r))[0] is RejectionCause.REPLAYED  # type: ignore[misc]
        restarted.hello(g.sign.hello())


# Who may open a stream.


async def test_an_altered_hello_is_refused(tmp_path: Path) -> None:
    async with ground(tmp_path) as g:
        hello = g.sign.hello(digest=True)
        hello.capabilities = pb.EdgeCapabilities(os="plan9").SerializeToString()
        assert g.refused(lambda: g.verifier.hello(hello))[0] is RejectionCause.CONTENT
        hello = g.sign.hello()
        hello.stream_id = OTHER_STREAM
        assert g.refused(lambda: g.verifier.hello(hello))[0] is RejectionCause.STREAM
        hello.stream_id = "not a uuid"
        with pytest.raises(InvalidArgument) as caught:
            g.verifier.hello(hello)
        assert caught.value.field == "stream_id"


async def test_the_bearer_token_must_be_of_the_same_node(tmp_path: Path) -> None:
    async with ground(tmp_path) as g:
        g.verifier.hello(g.sign.hello(), g.identity.token)
        await g.clock.advance(1)
        for bearer, cause in ((g.neighbour.token, RejectionCause.BEARER), ("nonsense", RejectionCause.TOKEN)):
            assert g.refused(lambda b=bearer: g.verifier.hello(g.sign.hello(), b))[0] is cause  # type: ignore[misc]


async def test_unknown_foreign_and_revoked_nodes_are_told_apart(tmp_path: Path) -> None:
    async with ground(tmp_path) as g:
        nowhere = "99999999-2222-4333-8444-555555555555"
        issued = g.tokens.issue_node(nowhere, "acme", g.identity.public_key, life_seconds=60)
        unknown = g.sign.hello(token=issued.token, node_id=nowhere)
        assert g.refused(lambda: g.verifier.hello(unknown)) == (RejectionCause.UNKNOWN_NODE, NotFound)
        issued = g.tokens.issue_node(g.identity.node_id, "rival", g.identity.public_key, life_seconds=60)
        foreign = g.sign.hello(token=issued.token)
        assert g.refused(lambda: g.verifier.hello(foreign)) == (RejectionCause.TENANT, PermissionDenied)

        seal = g.hello()
        nodes = Nodes(g.store, g.clock, Revocations(g.store, g.clock))
        await nodes.revoke("acme", g.identity.node_id, reason="stolen", actor=BOSS)
        assert g.refused(lambda: g.beat(seal)) == (RejectionCause.REVOKED, FailedPrecondition)
        assert g.refused(g.hello) == (RejectionCause.REVOKED, FailedPrecondition)


async def test_an_expired_token_opens_nothing_but_does_not_end_an_open_stream(tmp_path: Path) -> None:
    async with ground(tmp_path) as g:
        seal = g.hello()
        await g.clock.advance(TOKEN_SECONDS + 1)
        g.beat(seal)
        assert g.refused(g.hello)[0] is RejectionCause.EXPIRED
        patient = StreamVerifier(g.tokens, g.store, g.clock, SealPolicy(expired_seconds=3600))
        patient.hello(g.sign.hello())
        await g.clock.advance(3600)
        assert g.refused(lambda: patient.hello(g.sign.hello()))[0] is RejectionCause.EXPIRED


# Rotation.


async def test_a_stream_survives_a_rotation_until_the_overlap_ends(tmp_path: Path) -> None:
    async with ground(tmp_path) as g:
        seal = g.hello()
        await rotated(g.store, g.tokens, g.clock, g.identity, overlap_seconds=60)
        g.beat(seal)
        assert g.refused(g.hello)[0] is RejectionCause.BLACKLISTED
        await g.clock.advance(59)
        g.beat(seal)
        await g.clock.advance(1)
        assert g.refused(lambda: g.beat(seal))[0] is RejectionCause.BLACKLISTED


async def test_a_stream_with_work_to_finish_may_be_extended(tmp_path: Path) -> None:
    async with ground(tmp_path) as g:
        seal = g.hello()
        await rotated(g.store, g.tokens, g.clock, g.identity, overlap_seconds=60)
        await g.clock.advance(61)
        seal.extended_until_ns = g.clock.now_ns() + 10**9
        g.beat(seal)
        await g.clock.advance(1)
        assert g.refused(lambda: g.beat(seal))[0] is RejectionCause.BLACKLISTED


async def test_a_daemon_may_switch_to_its_new_credentials_on_the_open_stream(tmp_path: Path) -> None:
    async with ground(tmp_path) as g:
        seal = g.hello()
        new = await rotated(g.store, g.tokens, g.clock, g.identity, overlap_seconds=60)
        # Half of the new is worth nothing: a token goes with the key that it names.
        assert g.refused(lambda: g.beat(seal, token=new.token))[0] is RejectionCause.SIGNATURE
        assert g.refused(lambda: g.beat(seal, key=new.key))[0] is RejectionCause.SIGNATURE
        g.sign.identity = new
        g.beat(seal)
        # And there is no way back.
        g.sign.identity = g.identity
        assert g.refused(lambda: g.beat(seal))[0] is RejectionCause.BLACKLISTED
        g.sign.identity = new
        await g.clock.advance(3600)
        g.beat(seal)
        assert seal.token_id == new.token_id


async def test_the_overlap_of_one_rotation_survives_the_next_and_is_for_the_open_stream_only(
    tmp_path: Path,
) -> None:
    async with ground(tmp_path) as g:
        seal = g.hello()
        once = await rotated(g.store, g.tokens, g.clock, g.identity, overlap_seconds=60)
        await g.clock.advance(30)
        await rotated(g.store, g.tokens, g.clock, once, overlap_seconds=60)
        g.beat(seal)
        assert g.refused(g.hello)[0] is RejectionCause.BLACKLISTED
        borrowed = Signer(identity=once, clock=g.clock, stream_id=g.sign.stream_id).heartbeat()
        # A token that this stream never came with is no use on it.
        assert (
            g.refused(lambda: g.verifier.event(seal, EventKind.HEARTBEAT, borrowed))[0]
            is RejectionCause.BLACKLISTED
        )
        await g.clock.advance(29)
        g.beat(seal)
        await g.clock.advance(1)
        assert (
            g.refused(lambda: g.beat(seal))[0] is RejectionCause.BLACKLISTED
        )  # each overlap has its own end


def test_every_kind_of_event_has_its_own_number() -> None:
    assert len({kind.value for kind in EventKind}) == len(EventKind)
    assert envelope.parse(envelope.encode(EventKind.HELLO, 1, "n", "s")) is not None
