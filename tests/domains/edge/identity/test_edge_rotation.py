"""Replacing keys and tokens: every accepted layout, every way to be refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from support.edge.edge_identity_rig import (
    BOSS,
    OTHER,
    TENANT,
    Machine,
    Rig,
    claims_of,
    code_of,
    identity_rig,
    new_key,
    public,
    refusal_of,
)

from fleetplane.domains.edge.identity.rotation import REMEMBERED_LIMIT, names_key, remembered
from fleetplane.domains.edge.identity.tokens import thumbprint
from fleetplane.domains.edge.kinds import EDGE_NODE, EdgeNode, NodeState, UsedRequest
from fleetplane.domains.edge.wire import envelope
from fleetplane.domains.edge.wire.envelope import EventKind
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.fleetplane.edge.v1 import legacy_pb2
from fleetplane.kernel.errors import FailedPrecondition, Unauthenticated

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
OURS = (("x-aegis-edge-dialect", "documented"),)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with identity_rig(tmp_path) as made:
        yield made


def record(rig: Rig, machine: Machine) -> EdgeNode:
    return rig.side.nodes.get(TENANT, machine.node_id)


# What is accepted.


@pytest.mark.parametrize("form", [0, 1, 2], ids=["digest", "text id", "16-byte id"])
@pytest.mark.parametrize("token", [None, ""], ids=["with token", "without token"])
async def test_a_key_is_rotated_whichever_layout_the_new_key_signs(
    rig: Rig, form: int, token: str | None
) -> None:
    machine, new = await rig.enrolled(), new_key()
    former = machine.token
    answer = await machine.rotate(machine.wish(new, form=form, token=token), metadata=OURS)
    spec = record(rig, machine).spec
    assert (spec.public_key, spec.previous_public_key) == (public(new), public(machine.key))
    assert spec.key_version == 2
    claims = rig.side.tokens.verify_node(answer.node_security_token)
    assert (claims.jti, claims.thumbprint) == (spec.token_id, thumbprint(public(new)))
    assert claims_of(answer.node_security_token)["tid"] == TENANT
    assert spec.previous_token_id == claims_of(former)["jti"]
    with pytest.raises(Unauthenticated):
        rig.side.tokens.verify_node(former)


@pytest.mark.parametrize("form", [0, 1], ids=["text id", "16-byte id"])
async def test_a_request_without_a_nonce_is_accepted_in_the_documented_layouts(rig: Rig, form: int) -> None:
    machine, new = await rig.enrolled(), new_key()
    assert (await machine.rotate(machine.wish(new, form=form, nonce=b""))).node_security_token


@pytest.mark.parametrize("prefix", [b"", b"rotate "])
async def test_a_payload_of_the_clients_own_making_is_accepted_if_it_names_the_new_key(
    rig: Rig, prefix: bytes
) -> None:
    machine, new = await rig.enrolled(), new_key()
    payload = prefix + machine.node_id.encode() + public(new)
    answer = await machine.rotate(machine.wish(new, form=0, nonce=b"", inner=payload))
    assert answer.node_security_token


async def test_the_same_key_renews_the_token_and_an_expired_one_too(rig: Rig) -> None:
    machine = await rig.enrolled()
    rig.clock.ahead_seconds = 40 * 86_400
    answer = await machine.rotate(machine.wish(machine.key))
    spec = record(rig, machine).spec
    assert (spec.key_version, spec.public_key) == (1, public(machine.key))
    assert rig.side.tokens.verify_node(answer.node_security_token).jti == spec.token_id


async def test_the_former_key_is_kept_until_the_overlap_ends(rig: Rig) -> None:
    machine = await rig.enrolled()
    before_ns = rig.clock.now_ns()
    await machine.rotate(machine.wish(new_key()))
    until_ns = record(rig, machine).spec.previous_key_until_ns
    assert before_ns + 60e9 <= until_ns <= rig.clock.now_ns() + 60e9


# In which words it is answered.


async def test_callers_in_the_field_read_expiry_and_overlap_where_they_look(rig: Rig) -> None:
    machine = await rig.enrolled()
    answer = await machine.rotate(machine.wish(new_key(), token=""))
    theirs = legacy_pb2.LegacyRotateEdgeKeyResponse.FromString(answer.SerializeToString())
    assert theirs.expires_at.seconds == claims_of(theirs.node_security_token)["exp"]
    assert 0 < theirs.overlap_until.seconds - rig.clock.now_ns() // 10**9 <= 61
    assert not answer.HasField("overlap_window")


@pytest.mark.parametrize("metadata", [(), OURS])
async def test_others_are_answered_as_documented(rig: Rig, metadata: Any) -> None:
    machine = await rig.enrolled()
    token = None if not metadata else ""
    before = rig.clock.now_ns() // 10**9
    answer = await machine.rotate(machine.wish(new_key(), token=token), metadata=metadata)
    assert answer.expires_at.seconds == claims_of(answer.node_security_token)["exp"]
    assert before <= answer.issued_at.seconds <= rig.clock.now_ns() // 10**9
    assert answer.overlap_window.seconds == 60


# What is refused.


async def test_malformed_requests_are_invalid(rig: Rig) -> None:
    machine, new = await rig.enrolled(), new_key()
    good = machine.wish(new)
    bare = pb.RotateEdgeKeyRequest(new_public_key=public(new))
    short = pb.RotateEdgeKeyRequest(current_envelope=good.current_envelope, new_public_key=b"short")
    nobody = machine.wish(new, form=0, nonce=b"", token="", inner=b"x" + public(new))
    for bad in (bare, short, nobody):
        assert await code_of(machine.rotate(bad)) is INVALID


async def test_a_wrong_signature_by_the_new_key_is_invalid(rig: Rig) -> None:
    machine, new = await rig.enrolled(), new_key()
    bad = machine.wish(new)
    bad.signature_with_new_key = machine.key.sign(b"something else")
    code, text = await refusal_of(machine.rotate(bad))
    assert (code, "new key" in text) == (INVALID, True)
    assert record(rig, machine).spec.key_version == 1


async def test_a_digest_over_another_nonce_is_not_the_new_keys_consent(rig: Rig) -> None:
    machine, new = await rig.enrolled(), new_key()
    bad = machine.wish(new)
    bad.signature_with_new_key = new.sign(envelope.rotation_digest(machine.node_id, public(new), b"\7" * 32))
    assert await code_of(machine.rotate(bad)) is INVALID


async def test_an_envelope_not_signed_by_the_current_key_is_unauthenticated(rig: Rig) -> None:
    machine, new = await rig.enrolled(), new_key()
    bad = machine.wish(new)
    bad.current_envelope.signature = new.sign(bad.current_envelope.payload)
    assert await code_of(machine.rotate(bad)) is UNAUTHENTICATED


async def test_the_former_key_rotates_nothing_not_even_during_the_overlap(rig: Rig) -> None:
    machine = await rig.enrolled()
    await machine.rotate(machine.wish(new_key()))
    assert await code_of(machine.rotate(machine.wish(new_key(), token=""))) is UNAUTHENTICATED


async def test_an_unknown_node_is_refused_like_a_wrong_signature(rig: Rig) -> None:
    await rig.enrolled()
    stranger = rig.machine()
    assert await code_of(stranger.rotate(stranger.wish(new_key(), token=""))) is UNAUTHENTICATED


async def test_a_token_of_another_node_or_tenant_does_not_help(rig: Rig) -> None:
    machine, neighbour = await rig.enrolled(TENANT), await rig.enrolled(OTHER)
    wish = machine.wish(new_key(), token=neighbour.token)
    assert await code_of(machine.rotate(wish)) is UNAUTHENTICATED
    assert await code_of(machine.rotate(machine.wish(new_key(), token="a.b.c"))) is UNAUTHENTICATED


async def test_a_payload_that_names_another_key_is_refused(rig: Rig) -> None:
    machine, new, other = await rig.enrolled(), new_key(), new_key()
    inner = pb.RotateEdgeKeyInner(node_id=machine.node_id, new_public_key=public(other), nonce=b"\1" * 32)
    wish = machine.wish(new, nonce=b"\1" * 32, inner=inner.SerializeToString())
    assert await code_of(machine.rotate(wish)) is INVALID


async def test_nothing_else_that_a_daemon_signed_becomes_the_wish_for_a_strangers_key(rig: Rig) -> None:
    machine, thief = await rig.enrolled(), new_key()
    challenge = await machine.attest()
    output = envelope.short_progress_inner("c", sequence=0, stderr=False, chunk=public(thief))
    captured = [
        envelope.encode(EventKind.HELLO, 1, machine.node_id, "s"),
        envelope.encode(EventKind.COMMAND_PROGRESS, 1, machine.node_id, "s", output),
        challenge.challenge_nonce,
        machine.node_id.encode() + public(machine.key),
    ]
    for payload in captured:
        wish = machine.wish(thief, form=0, nonce=b"", inner=payload)
        assert await code_of(machine.rotate(wish)) is INVALID
    assert record(rig, machine).spec.public_key == public(machine.key)


async def test_a_revoked_daemon_may_not_rotate_with_or_without_its_token(rig: Rig) -> None:
    machine = await rig.enrolled()
    await rig.side.nodes.revoke(TENANT, machine.node_id, reason="gone", actor=BOSS)
    for token in (None, ""):
        assert await code_of(machine.rotate(machine.wish(new_key(), token=token))) is PRECONDITION


async def test_an_unhealthy_daemon_may_not_rotate_but_a_disconnected_one_may(rig: Rig) -> None:
    machine = await rig.enrolled()
    await put_state(rig, machine, NodeState.UNHEALTHY)
    assert await code_of(machine.rotate(machine.wish(new_key()))) is PRECONDITION
    await put_state(rig, machine, NodeState.DISCONNECTED)
    assert (await machine.rotate(machine.wish(new_key()))).node_security_token


async def put_state(rig: Rig, machine: Machine, state: NodeState) -> None:
    node = record(rig, machine)
    assert node.status is not None
    status = msgspec.structs.replace(node.status, state=state)
    await rig.store.transact(
        lambda draft: draft.put(EDGE_NODE, node.scope, node.name, spec=node.spec, status=status),
        actor="test",
        action="test",
        touches=[node.key],
    )


# Twice.


async def test_a_captured_request_for_the_same_key_does_not_work_again(rig: Rig) -> None:
    machine = await rig.enrolled()
    request = machine.wish(machine.key, token="")
    live = (await machine.rotate(request)).node_security_token
    for _ in range(2):
        assert await code_of(machine.rotate(request)) is UNAUTHENTICATED
    assert rig.side.tokens.verify_node(live).node_id == machine.node_id


async def test_a_captured_request_does_not_work_again_when_its_key_comes_back(rig: Rig) -> None:
    machine = await rig.enrolled()
    first, second = machine.key, new_key()
    captured = machine.wish(second, token="")
    await machine.rotate(captured)
    machine.key = second
    await machine.rotate(machine.wish(first, token=""))
    assert await code_of(machine.rotate(captured)) is UNAUTHENTICATED
    assert record(rig, machine).spec.public_key == public(first)


async def test_of_concurrent_rotations_one_happens_and_the_others_are_aborted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = await rig.enrolled()
    keys = [new_key() for _ in range(8)]
    read, all_read, transact = [], asyncio.Event(), rig.store.transact

    async def once_all_are_read(*args: Any, **options: Any) -> Any:
        read.append(options["action"])
        if len(read) >= len(keys):
            all_read.set()
        await all_read.wait()
        return await transact(*args, **options)

    monkeypatch.setattr(rig.store, "transact", once_all_are_read)
    answers = await asyncio.gather(
        *(machine.rotate(machine.wish(key, token="")) for key in keys), return_exceptions=True
    )
    done = [one for one in answers if not isinstance(one, BaseException)]
    codes = [one.code() for one in answers if isinstance(one, grpc.aio.AioRpcError)]
    assert len(done) == 1
    assert set(codes) == {grpc.StatusCode.ABORTED}
    assert record(rig, machine).spec.key_version == 2


async def test_a_request_with_a_time_is_good_only_around_it(rig: Rig) -> None:
    machine, new = await rig.enrolled(), new_key()
    inner = pb.RotateEdgeKeyInner(
        node_id=machine.node_id,
        new_public_key=public(new),
        nonce=b"\2" * 32,
        issued_at_ms=rig.clock.now_ns() // 10**6,
    )
    wish = machine.wish(new, nonce=b"\2" * 32, inner=inner.SerializeToString())
    rig.clock.ahead_seconds = 301
    assert await code_of(machine.rotate(wish)) is UNAUTHENTICATED
    rig.clock.ahead_seconds = 200
    assert (await machine.rotate(wish)).node_security_token


# The memory, by rule.


def used(count: int, *, key_version: int = 1, until_ns: int = 0) -> tuple[UsedRequest, ...]:
    return tuple(
        UsedRequest(digest=index.to_bytes(16, "big"), at_ns=index, until_ns=until_ns, key_version=key_version)
        for index in range(count)
    )


def test_requests_whose_time_has_passed_are_forgotten() -> None:
    assert remembered(used(3, until_ns=10), key_version=1, now_ns=10) == ()
    assert len(remembered(used(3, until_ns=10), key_version=1, now_ns=9)) == 3


def test_requests_of_former_keys_make_room_first() -> None:
    old, new = used(REMEMBERED_LIMIT, key_version=1), used(2, key_version=2)
    kept = remembered((*old, *new), key_version=2, now_ns=0)
    assert len(kept) == REMEMBERED_LIMIT
    assert kept == (*old[2:], *new)


def test_a_full_memory_of_one_key_refuses_rather_than_forgets() -> None:
    with pytest.raises(FailedPrecondition):
        remembered(used(REMEMBERED_LIMIT + 1), key_version=1, now_ns=0)


def test_a_payload_names_a_key_for_one_node_only() -> None:
    key, node = b"k" * 32, "11111111-2222-4333-8444-555555555555"
    inner = pb.RotateEdgeKeyInner(node_id=node, new_public_key=key, nonce=b"n" * 32).SerializeToString()
    other = "22222222-2222-4333-8444-555555555555"
    assert names_key(inner, node, key, current_key=b"c" * 32)
    assert not names_key(inner, other, key, current_key=b"c" * 32)
    assert not names_key(inner, node, b"l" * 32, current_key=b"c" * 32)
