"""Whose a node is, who may issue tokens for whom, and which servers take daemons at all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from support.edge.edge_identity_rig import (
    BOSS,
    ENDPOINT,
    ISSUER,
    OTHER,
    TENANT,
    Rig,
    claims_of,
    code_of,
    identity_rig,
    new_key,
    public,
    refusal_of,
)

from fleetplane.domains.edge.identity.policy import IdentityPolicy, ServerRole
from fleetplane.domains.edge.kinds import NodeState, credential_name
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.errors import FailedPrecondition, NotFound, Unauthenticated

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
DENIED = grpc.StatusCode.PERMISSION_DENIED
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with identity_rig(tmp_path) as made:
        yield made


# Whose node it is.


async def test_a_node_of_one_tenant_is_not_taken_by_a_token_of_another(rig: Rig) -> None:
    machine = await rig.enrolled(TENANT)
    token = await rig.invite(OTHER)
    thief = rig.machine(node_id=machine.node_id)
    assert await code_of(thief.join(token)) is DENIED
    node = rig.side.nodes.find(machine.node_id)
    assert node is not None
    assert node.spec.public_key == public(machine.key)
    assert rig.side.nodes.lookup(OTHER, machine.node_id) is None
    assert (await rig.machine().join(token)).node_security_token  # the token itself was not used up


async def test_a_machine_enrols_again_in_its_tenant_and_keeps_its_tags(rig: Rig) -> None:
    machine = await rig.enrolled(label="first")
    await rig.side.nodes.set_tags(TENANT, machine.node_id, ["prod"], actor=BOSS)
    former, machine.key = machine.token, new_key()
    await machine.join(await rig.invite(node_id=machine.node_id, replace=True))
    node = rig.side.nodes.get(TENANT, machine.node_id)
    assert (node.spec.tags, node.spec.display_name, node.spec.key_version) == (("prod",), "first", 2)
    with pytest.raises(Unauthenticated):
        rig.side.tokens.verify_node(former)


async def test_another_tenant_may_have_a_node_after_it_was_revoked(rig: Rig) -> None:
    machine = await rig.enrolled(TENANT)
    await rig.side.nodes.revoke(TENANT, machine.node_id, reason="sold", actor=BOSS)
    await machine.join(await rig.invite(OTHER))
    node = rig.side.nodes.find(machine.node_id)
    assert node is not None
    assert node.scope == f"tenant/{OTHER}"
    assert rig.side.nodes.get(TENANT, machine.node_id).spec.revoked_at_ns is not None
    await rig.side.nodes.revoke(TENANT, machine.node_id, reason="again", actor=BOSS)
    assert rig.side.tokens.verify_node(machine.token).tenant == OTHER
    assert rig.revocations.find(principal=credential_name(OTHER, machine.node_id)) is None
    assert rig.revocations.find(principal=credential_name(TENANT, machine.node_id)) is not None
    with pytest.raises(FailedPrecondition):
        await rig.side.nodes.readmit(TENANT, machine.node_id, actor=BOSS)  # it is another's by now


async def test_a_revoked_daemon_does_not_come_back_with_the_token_it_came_with(rig: Rig) -> None:
    machine, token = rig.machine(), await rig.invite()
    await machine.join(token)
    await rig.side.nodes.revoke(TENANT, machine.node_id, reason="stolen", actor=BOSS)
    assert await code_of(machine.join(token)) is UNAUTHENTICATED
    assert rig.side.nodes.find(machine.node_id) is None
    await rig.side.nodes.readmit(TENANT, machine.node_id, actor=BOSS)
    assert await code_of(machine.join(token)) is UNAUTHENTICATED
    await machine.join(await rig.invite(node_id=machine.node_id))
    assert rig.side.nodes.find(machine.node_id) is not None
    assert rig.revocations.find(principal=credential_name(TENANT, machine.node_id)) is None


async def test_a_replaced_key_does_not_come_back_with_the_token_it_came_with(rig: Rig) -> None:
    machine, token = rig.machine(), await rig.invite()
    await machine.join(token)
    former, new = machine.key, new_key()
    await machine.rotate(machine.wish(new))
    machine.key = former
    assert await code_of(machine.join(token)) is UNAUTHENTICATED
    node = rig.side.nodes.find(machine.node_id)
    assert node is not None
    assert node.spec.public_key == public(new)


async def test_revoking_blacklists_the_token_and_tells_who_holds_the_stream(rig: Rig) -> None:
    machine = await rig.enrolled()
    told: list[str | None] = []
    rig.revocations.subscribe(lambda revoked: told.append(revoked.principal))
    node = await rig.side.nodes.revoke(TENANT, machine.node_id, reason="lost", actor=BOSS)
    assert told == [credential_name(TENANT, machine.node_id)]
    assert node.status is not None
    assert node.status.state is NodeState.REVOKED
    with pytest.raises(Unauthenticated):
        rig.side.tokens.verify_node(machine.token)
    with pytest.raises(NotFound):
        await rig.side.nodes.revoke(OTHER, machine.node_id, reason="not mine", actor=BOSS)


async def test_all_daemons_of_a_tenant_are_revoked_together_and_no_others(rig: Rig) -> None:
    machines = [await rig.enrolled(TENANT) for _ in range(3)]
    neighbour = await rig.enrolled(OTHER)
    assert await rig.side.nodes.revoke_tenant(TENANT, reason="closed", actor=BOSS) == 3
    assert all(rig.side.nodes.find(machine.node_id) is None for machine in machines)
    assert rig.side.nodes.find(neighbour.node_id) is not None
    assert await rig.side.nodes.revoke_tenant(TENANT, reason="closed", actor=BOSS) == 0


# Operators.


async def test_an_operator_with_the_permission_issues_a_token_for_its_tenant(rig: Rig) -> None:
    metadata = await rig.bearer("aegis.edge.enroll", scope=f"tenant/{TENANT}")
    request = pb.IssueEnrollmentTokenRequest(issued_to="lab")
    made = await rig.stub.IssueEnrollmentToken(request, metadata=metadata)
    claims = claims_of(made.token)
    assert (claims["tid"], claims["sub"], claims["iss"]) == (TENANT, "lab", ISSUER)
    assert made.controller_endpoint == claims["cep"] == ENDPOINT
    assert made.command_hint == made.qr_payload == f"aegis edge enroll {made.token}"
    assert made.expires_at.endswith("Z")
    assert (await rig.machine().join(made.token)).node_security_token


async def test_tokens_are_issued_only_to_those_who_may_and_for_whom_they_may(rig: Rig) -> None:
    request = pb.IssueEnrollmentTokenRequest()
    issue = rig.stub.IssueEnrollmentToken
    assert await code_of(issue(request)) is UNAUTHENTICATED
    assert await code_of(issue(request, metadata=(("authorization", "Bearer nope"),))) is UNAUTHENTICATED
    reader = await rig.bearer("aegis.edge.hosts.read", scope=f"tenant/{TENANT}")
    assert await code_of(issue(request, metadata=reader)) is DENIED
    bound = await rig.bearer("aegis.edge.enroll", scope=f"tenant/{TENANT}")
    elsewhere = (*bound, ("x-aegis-tenant", OTHER))
    assert await code_of(issue(request, metadata=elsewhere)) is DENIED
    free = await rig.bearer("edge.admin")
    assert await code_of(issue(request, metadata=free)) is INVALID
    made = await issue(request, metadata=(*free, ("x-aegis-tenant", OTHER)))
    assert claims_of(made.token)["tid"] == OTHER


# Roles of the server.


async def test_a_worker_takes_no_edge_daemons(tmp_path: Path) -> None:
    async with identity_rig(tmp_path, policy=IdentityPolicy(role=ServerRole.WORKER)) as rig:
        code, text = await refusal_of(rig.machine().attest())
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert text.startswith("edge mode disabled on this node")
        machine = rig.machine()
        assert await code_of(machine.rotate(machine.wish(new_key()))) is code
        metadata = await rig.bearer("edge.admin", scope=f"tenant/{TENANT}")
        issue = rig.stub.IssueEnrollmentToken(pb.IssueEnrollmentTokenRequest(), metadata=metadata)
        assert await code_of(issue) is code
        # Before it says anything: the official client may make INTERNAL of a write that comes too late.
        assert await rig.stub.ConnectEdge().code() is code
        assert rig.ear.heard == []


@pytest.mark.parametrize("role", [ServerRole.CONTROLLER, ServerRole.HYBRID, ServerRole.RELAY_COORDINATOR])
async def test_every_other_role_takes_edge_daemons_and_passes_their_bytes_on(
    tmp_path: Path, role: ServerRole
) -> None:
    async with identity_rig(tmp_path, policy=IdentityPolicy(role=role)) as rig:
        assert (await rig.enrolled()).token
        event = pb.EdgeEvent(hello=pb.Hello(stream_id="s"))
        stream = rig.stub.ConnectEdge(iter([event]))
        assert [answer async for answer in stream] == []
        assert rig.ear.heard == [event.SerializeToString()]
