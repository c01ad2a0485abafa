"""Joining, end to end: who gets in, once, and as whose."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
from support.edge.edge_identity_rig import (
    BOSS,
    ENDPOINT,
    OTHER,
    TENANT,
    Machine,
    Rig,
    claims_of,
    code_of,
    identity_rig,
    public,
    refusal_of,
)

from fleetplane.domains.edge.identity.enrolment_tokens import is_open
from fleetplane.domains.edge.identity.policy import IdentityPolicy
from fleetplane.domains.edge.identity.tokens import capabilities_digest, thumbprint
from fleetplane.domains.edge.kinds import NodeResources, NodeState
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.errors import FailedPrecondition, NotFound, Unauthenticated

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
DENIED = grpc.StatusCode.PERMISSION_DENIED
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with identity_rig(tmp_path) as made:
        yield made


# The good way.


async def test_a_daemon_enrols_with_a_token_and_becomes_its_tenants(rig: Rig) -> None:
    machine = await rig.enrolled(label="rack-7")
    node = rig.side.nodes.get(TENANT, machine.node_id)
    assert node.spec.display_name == "rack-7"
    assert node.spec.public_key == public(machine.key)
    assert node.status is not None
    assert node.status.state is NodeState.DISCONNECTED
    assert rig.side.tokens.verify_node(machine.token).jti == node.spec.token_id
    (record,) = rig.side.enrollments.list(TENANT)
    assert (record.spec.redeemed_by, record.spec.issued_by) == (machine.node_id, BOSS)


async def test_a_nodes_token_says_what_daemons_and_the_server_need(rig: Rig) -> None:
    machine = rig.machine()
    answer = await machine.join(await rig.invite())
    claims = claims_of(machine.token)
    assert claims["sub"] == machine.node_id
    assert (claims["role"], claims["tid"], claims["cep"]) == ("edge", TENANT, ENDPOINT)
    assert claims["cap_hash"] == "c3ea079996570c7468b480eea19d9923e19893e429020b7df6a8da7139e5b545"
    assert claims["cap_hash"] == capabilities_digest(NodeResources())
    assert claims["cnf"] == {"jkt": thumbprint(public(machine.key))}
    assert claims["exp"] == answer.expires_at.seconds
    assert "=" not in machine.token
    assert set(machine.token) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.")
    assert jwt.get_unverified_header(machine.token)["alg"] == "RS256"


async def test_the_servers_key_is_told_three_times_and_is_the_same(rig: Rig) -> None:
    token = await rig.invite()
    machine = rig.machine()
    challenge = await machine.attest()
    answer = await machine.respond(machine.answer(challenge, token))
    spoken = claims_of(token)["spk"]
    told = base64.urlsafe_b64decode(spoken + "=" * (-len(spoken) % 4))
    assert challenge.server_public_key == answer.server_public_key == told == rig.side.key.public_key
    assert len(challenge.challenge_nonce) == 32


# Tokens that are not good.


async def test_a_redeemed_token_is_refused_to_everyone_else(rig: Rig) -> None:
    token = await rig.invite()
    await rig.machine().join(token)
    assert await code_of(rig.machine().join(token)) is UNAUTHENTICATED


async def forged(rig: Rig, **changes: Any) -> str:
    """A token under the right key that says something else."""
    token = await rig.invite()
    claims = {**claims_of(token), **changes}
    return rig.side.tokens._keys.sign(claims, life_seconds=900)


@pytest.mark.parametrize(
    "changes",
    [
        {"aud": "somewhere-else"},
        {"iss": "https://someone.else"},
        {"exp": 1_700_000_000},
        {"nbf": 4_000_000_000},
        {"tid": "-bad-"},
        {"tid": OTHER},
        {"jti": "not-a-uuid"},
        {"jti": "00000000-0000-4000-8000-000000000000"},
    ],
)
async def test_a_token_that_says_something_wrong_is_refused(rig: Rig, changes: dict[str, Any]) -> None:
    machine = rig.machine()
    assert await code_of(machine.join(await forged(rig, **changes))) is UNAUTHENTICATED
    assert rig.side.nodes.find(machine.node_id) is None


async def test_a_token_under_a_strangers_key_or_tampered_with_is_refused(rig: Rig) -> None:
    token = await rig.invite()
    head, body, signature = token.split(".")
    strange = jwt.encode(claims_of(token), "s" * 32, algorithm="HS256")
    unsigned = jwt.encode(claims_of(token), "", algorithm="none")
    for bad in (f"{head}.{body}.{signature[:-6]}AAAAAA", strange, unsigned, "x", "a.b.c"):
        assert await code_of(rig.machine().join(bad)) is UNAUTHENTICATED


async def test_a_nodes_own_token_enrols_nobody_and_an_enrollment_token_is_no_nodes(rig: Rig) -> None:
    machine = await rig.enrolled()
    assert await code_of(rig.machine().join(machine.token)) is UNAUTHENTICATED
    for other in (
        await rig.invite(),
        rig.side.tokens.issue_user(subject="u", tenant=TENANT, context="c", command_id="d", life_seconds=60),
    ):
        with pytest.raises(Unauthenticated):
            rig.side.tokens.verify_node(other)


async def test_an_expired_token_is_refused(rig: Rig) -> None:
    token = await rig.invite(life_seconds=60)
    rig.clock.ahead_seconds = 70
    assert await code_of(rig.machine().join(token)) is UNAUTHENTICATED


async def test_a_revoked_token_is_refused_and_a_used_one_cannot_be_revoked(rig: Rig) -> None:
    token = await rig.invite()
    jti = claims_of(token)["jti"]
    await rig.side.enrollments.revoke(TENANT, jti, actor=BOSS)
    assert await code_of(rig.machine().join(token)) is UNAUTHENTICATED
    used = await rig.invite()
    await rig.machine().join(used)
    with pytest.raises(FailedPrecondition):
        await rig.side.enrollments.revoke(TENANT, claims_of(used)["jti"], actor=BOSS)
    with pytest.raises(NotFound):
        await rig.side.enrollments.revoke(OTHER, jti, actor=BOSS)
    assert not any(is_open(one, rig.clock.now_ns()) for one in rig.side.enrollments.list(TENANT))


async def test_a_daemon_without_a_token_is_told_which_field_it_lacks(rig: Rig) -> None:
    code, text = await refusal_of(rig.machine().join(None))
    assert code is INVALID
    assert "enrollment token" in text


# Challenges.


async def test_only_the_attested_key_answers_a_challenge(rig: Rig) -> None:
    machine, token = rig.machine(), await rig.invite()
    challenge = await machine.attest()
    stranger = Machine(rig.stub, node_id=machine.node_id)
    assert await code_of(stranger.respond(stranger.answer(challenge, token))) is UNAUTHENTICATED
    assert (await machine.respond(machine.answer(challenge, token))).node_security_token


async def test_a_challenge_is_for_its_node_and_its_time_and_a_few_tries(rig: Rig) -> None:
    machine, token = rig.machine(), await rig.invite()
    challenge = await machine.attest()
    other = rig.machine(key=machine.key)
    assert await code_of(other.respond(other.answer(challenge, token))) is UNAUTHENTICATED
    wrong = machine.answer(challenge, token, challenge_signature=b"\0" * 64)
    for _ in range(5):
        assert await code_of(machine.respond(wrong)) is UNAUTHENTICATED
    assert await code_of(machine.respond(machine.answer(challenge, token))) is UNAUTHENTICATED
    late = await machine.attest()
    rig.clock.ahead_seconds = 301
    assert await code_of(machine.respond(machine.answer(late, await rig.invite()))) is UNAUTHENTICATED


@pytest.mark.parametrize("challenge_id", ["", "x", "{11111111-2222-4333-8444-555555555555}"])
async def test_a_malformed_challenge_id_is_invalid(rig: Rig, challenge_id: str) -> None:
    request = pb.ChallengeNodeRequest(challenge_id=challenge_id, node_id=rig.machine().node_id)
    assert await code_of(rig.machine().respond(request)) is INVALID


async def test_who_lost_the_answer_gets_the_same_one_again(rig: Rig) -> None:
    machine, token = rig.machine(), await rig.invite()
    request = machine.answer(await machine.attest(), token)
    answers = await asyncio.gather(*(machine.respond(request) for _ in range(3)))
    again = await machine.respond(request)
    assert {one.node_security_token for one in (*answers, again)} == {again.node_security_token}


async def test_the_same_key_may_ask_again_with_a_new_challenge(rig: Rig) -> None:
    machine, token = rig.machine(), await rig.invite()
    await machine.join(token)
    first = machine.token
    await machine.join(token)
    assert machine.token != first
    with pytest.raises(Unauthenticated):
        rig.side.tokens.verify_node(first)
    assert rig.side.tokens.verify_node(machine.token).node_id == machine.node_id


async def test_of_64_who_show_one_token_at_once_one_gets_in(rig: Rig) -> None:
    token = await rig.invite()
    machines = [rig.machine() for _ in range(64)]
    requests = [machine.answer(await machine.attest(), token) for machine in machines]
    answers = await asyncio.gather(
        *(machine.respond(request) for machine, request in zip(machines, requests, strict=True)),
        return_exceptions=True,
    )
    winners = [one for one in answers if not isinstance(one, BaseException)]
    losers = {one.code() for one in answers if isinstance(one, grpc.aio.AioRpcError)}
    assert len(winners) == 1
    assert losers == {UNAUTHENTICATED}
    assert len(rig.side.nodes.list(TENANT)) == 1


# What may be asked for.


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"node_id": "nonsense"}, "node_id"),
        ({"role": 0}, "role"),
        ({"role": 77}, "role"),
        ({"capabilities": None}, "capabilities"),
        ({"public_key": b"short"}, "public key"),
        ({"grpc_address": "a" * 300}, "printable"),
    ],
)
async def test_a_malformed_attestation_is_invalid_and_says_why(
    rig: Rig, changes: dict[str, Any], field: str
) -> None:
    code, text = await refusal_of(rig.machine().attest(**changes))
    assert code is INVALID
    assert field in text


async def test_the_sixth_daemon_in_a_minute_from_one_address_is_turned_away(tmp_path: Path) -> None:
    async with identity_rig(tmp_path, policy=IdentityPolicy()) as rig:
        for _ in range(5):
            await rig.machine().attest()
        assert await code_of(rig.machine().attest()) is grpc.StatusCode.RESOURCE_EXHAUSTED
        # What a stranger writes about where it comes from changes nothing.
        spoofed = (("x-forwarded-for", "203.0.113.9"),)
        assert await code_of(rig.machine().attest(metadata=spoofed)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await code_of(rig.machine(role=pb.NODE_ROLE_WORKER).attest()) is DENIED
        rig.clock.ahead_seconds = 121
        await rig.machine().attest()


async def test_behind_a_trusted_proxy_each_daemon_has_its_own_allowance(tmp_path: Path) -> None:
    policy = IdentityPolicy(attests_per_minute=1, trusted_proxies=("127.0.0.0/8",))
    async with identity_rig(tmp_path, policy=policy) as rig:
        for last in range(3):
            await rig.machine().attest(metadata=(("x-forwarded-for", f"203.0.113.{last}"),))
        again = (("x-forwarded-for", "198.51.100.1, 203.0.113.1"),)
        assert await code_of(rig.machine().attest(metadata=again)) is grpc.StatusCode.RESOURCE_EXHAUSTED


# Afterwards.


async def test_what_nobody_can_use_any_more_is_swept(rig: Rig) -> None:
    machine, token = rig.machine(), await rig.invite()
    await machine.join(token)
    await machine.join(token)
    assert await rig.side.sweep() == 0
    rig.clock.ahead_seconds = 60 * 86_400
    assert await rig.side.sweep() == 2
    assert not rig.side.enrollments.list(TENANT)


async def test_a_token_is_verified_once_and_its_end_every_time(rig: Rig) -> None:
    machine = await rig.enrolled()
    before = rig.side.tokens.checked
    for _ in range(50):
        rig.side.tokens.verify_node(machine.token)
    assert rig.side.tokens.checked == before + 1
    rig.clock.ahead_seconds = 31 * 86_400
    with pytest.raises(Unauthenticated):
        rig.side.tokens.verify_node(machine.token)
    assert rig.side.tokens.verify_node(machine.token, allow_expired=True).node_id == machine.node_id
