"""Enrollment tokens turned against nodes that exist, and against revocations."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from support.edge.edge_identity_rig import (
    BOSS,
    OTHER,
    TENANT,
    Machine,
    Rig,
    code_of,
    identity_rig,
    new_key,
    public,
    refusal_of,
)

from fleetplane.domains.edge.identity.enrolment_tokens import check_reachable
from fleetplane.domains.edge.kinds import NodeState, credential_name
from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.errors import AlreadyExists, FailedPrecondition, InvalidArgument

DENIED = grpc.StatusCode.PERMISSION_DENIED
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with identity_rig(tmp_path) as made:
        yield made


async def _actions(rig: Rig) -> list[str]:
    return [audit.read(row).action async for row in rig.store.audit()]


def _thief(rig: Rig, victim: Machine) -> Machine:
    return rig.machine(node_id=victim.node_id)


async def test_a_token_for_a_new_node_does_not_take_over_one_that_exists(rig: Rig) -> None:
    victim = await rig.enrolled()
    token = await rig.invite()
    code, words = await refusal_of(_thief(rig, victim).join(token))
    assert code is DENIED
    assert f"--node {victim.node_id} --replace" in words
    found = rig.side.nodes.get(TENANT, victim.node_id)
    assert found.spec.public_key == public(victim.key)
    assert rig.side.tokens.verify_node(victim.token).node_id == victim.node_id
    assert (await rig.machine().join(token)).node_security_token  # it was not used up


async def test_a_token_for_one_node_lets_no_other_in(rig: Rig) -> None:
    named, other = rig.machine(), rig.machine()
    token = await rig.invite(node_id=named.node_id)
    assert await code_of(other.join(token)) is DENIED
    assert (await named.join(token)).node_security_token


async def test_taking_over_needs_a_token_that_says_so_and_is_told_in_the_audit_log(rig: Rig) -> None:
    victim = await rig.enrolled()
    with pytest.raises(AlreadyExists):
        await rig.invite(node_id=victim.node_id)
    with pytest.raises(InvalidArgument):
        await rig.invite(replace=True)
    heir = _thief(rig, victim)
    await heir.join(await rig.invite(node_id=victim.node_id, replace=True))
    assert rig.side.nodes.get(TENANT, victim.node_id).spec.public_key == public(heir.key)
    assert "edge.replace" in await _actions(rig)


async def test_the_same_key_may_enrol_again_with_any_token_of_its_tenant(rig: Rig) -> None:
    machine = await rig.enrolled()
    await machine.join(await rig.invite())
    assert rig.side.nodes.get(TENANT, machine.node_id).spec.key_version == 1
    assert await code_of(machine.join(await rig.invite(OTHER))) is DENIED


@pytest.mark.parametrize("same_key", [True, False])
async def test_enrolling_lifts_no_revocation(rig: Rig, same_key: bool) -> None:
    machine = await rig.enrolled()
    prepared = await rig.invite(node_id=machine.node_id, replace=True)
    await rig.side.nodes.revoke(TENANT, machine.node_id, reason="stolen", actor=BOSS)
    back = machine if same_key else _thief(rig, machine)
    for token in (await rig.invite(), prepared):
        assert await code_of(back.join(token)) is DENIED
    with pytest.raises(FailedPrecondition):
        await rig.invite(node_id=machine.node_id, replace=True)
    found = rig.side.nodes.get(TENANT, machine.node_id)
    assert found.status is not None
    assert found.status.state is NodeState.REVOKED
    assert rig.revocations.find(principal=credential_name(TENANT, machine.node_id)) is not None


async def test_a_readmitted_node_has_no_credentials_until_it_enrols(rig: Rig) -> None:
    machine = await rig.enrolled()
    await rig.side.nodes.revoke(TENANT, machine.node_id, reason="stolen", actor=BOSS)
    await rig.side.nodes.readmit(TENANT, machine.node_id, actor=BOSS)
    with pytest.raises(FailedPrecondition):
        await rig.side.nodes.readmit(TENANT, machine.node_id, actor=BOSS)
    for token in (None, ""):  # the stolen key renews nothing, with its token or without
        assert await code_of(machine.rotate(machine.wish(new_key(), token=token))) is UNAUTHENTICATED
    assert await code_of(machine.join(await rig.invite())) is DENIED  # for a new node, which this is not
    await machine.join(await rig.invite(node_id=machine.node_id))
    assert rig.side.tokens.verify_node(machine.token).node_id == machine.node_id
    actions = await _actions(rig)
    assert {"edge.revoke", "edge.readmit"} <= set(actions)


@pytest.mark.parametrize("endpoint", ["", "0.0.0.0:50056", "http://0.0.0.0:50056", "[::]:50056", ":50056"])
def test_a_token_that_points_nowhere_is_not_made(endpoint: str) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        check_reachable(endpoint)
    assert "edge.public_endpoint" in (caught.value.advice)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:50056", "relay.example.com", "https://relay.example.com"])
def test_a_token_that_points_somewhere_is_made(endpoint: str) -> None:
    check_reachable(endpoint)
