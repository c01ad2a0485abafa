"""Workers that claim what their token does not say, and envelopes of theirs used for another purpose."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.edge.edge_identity_rig import (
    BOSS,
    OTHER,
    SECONDS,
    TENANT,
    Machine,
    Rig,
    code_of,
    identity_rig,
    refusal_of,
)

from fleetplane.domains.edge.identity.policy import IdentityPolicy
from fleetplane.domains.edge.kinds import WorkerRole, WorkerTokenSpec
from fleetplane.domains.edge.nodes.config_layers import LayerPlace
from fleetplane.domains.edge.wire import envelope
from fleetplane.domains.edge.workers import forwarding
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.errors import FailedPrecondition, SettingsError

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
DENIED = grpc.StatusCode.PERMISSION_DENIED
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with identity_rig(tmp_path) as made:
        yield made


def _sync(rig: Rig, worker: Machine, tenant: str = "", **changes: Any) -> Any:
    inner = pb.SyncConfigInner(node_id=worker.node_id, current_config_version="v0", tenant_id=tenant or None)
    request = pb.SyncConfigRequest(envelope=worker.sealed(inner, **changes))
    return rig.stub.SyncConfig(request, timeout=SECONDS)


def _push(rig: Rig, sender: Machine, target: str) -> Any:
    inner = pb.PushConfigInner(target_node_id=target, config_version="v1", config_payload=b'{"evil":true}')
    return rig.stub.PushConfig(pb.PushConfigRequest(envelope=sender.sealed(inner)), timeout=SECONDS)


# Roles and tenants.


@pytest.mark.parametrize(
    "role", [pb.NODE_ROLE_CONTROLLER, pb.NODE_ROLE_HYBRID, pb.NODE_ROLE_RELAY_COORDINATOR]
)
async def test_a_role_is_the_tokens_and_not_the_nodes_to_say(rig: Rig, role: pb.NodeRole) -> None:
    liar = rig.machine(role=role)
    token = await rig.side.worker_admission.issue(liar.node_id, life_seconds=600, actor=BOSS)
    code, words = await refusal_of(liar.attest(enrolment_token=token))
    assert (code, "worker" in words) == (DENIED, True)
    worker = await rig.worker()
    worker.role = role  # nor later, with the key that it was let in with
    assert await code_of(worker.attest()) is DENIED


async def test_a_worker_reads_no_tenants_configuration_but_its_own(rig: Rig) -> None:
    for tenant in (TENANT, OTHER):
        await rig.layers.put(LayerPlace(tenant=tenant), {"secret": tenant}, actor=BOSS)
    worker = await rig.worker(tenants=[TENANT])
    assert TENANT.encode() in (await _sync(rig, worker, TENANT)).config_delta
    assert await code_of(_sync(rig, worker, OTHER)) is DENIED
    nobodys = await rig.worker(tenants=[])
    assert await code_of(_sync(rig, nobodys, TENANT)) is DENIED


async def test_configuration_is_pushed_by_controllers_to_their_own_tenants_only(rig: Rig) -> None:
    ours, theirs = await rig.enrolled(TENANT), await rig.enrolled(OTHER)
    other_worker = await rig.worker()
    controller = await rig.worker(pb.NODE_ROLE_CONTROLLER, tenants=[TENANT])
    assert (await _push(rig, controller, ours.node_id)).accepted
    for target in (theirs.node_id, other_worker.node_id):
        assert await code_of(_push(rig, controller, target)) is DENIED
    for role in (pb.NODE_ROLE_WORKER, pb.NODE_ROLE_RELAY_COORDINATOR):
        assert await code_of(_push(rig, await rig.worker(role), ours.node_id)) is DENIED
    assert rig.layers.get(LayerPlace(tenant=OTHER, node_id=theirs.node_id)) is None


async def test_executions_stay_with_the_workers_of_their_tenant(rig: Rig) -> None:
    asker = await rig.worker(pb.NODE_ROLE_CONTROLLER, tenants=[TENANT])
    await rig.worker(tenants=[OTHER], grpc_address="10.0.0.1:1")

    def route(tenant: str) -> Any:
        inner = pb.RouteExecutionInner(execution_id="e", tenant_id=tenant)
        return rig.stub.RouteExecution(pb.RouteExecutionRequest(envelope=asker.sealed(inner)))

    assert await code_of(route(OTHER)) is DENIED
    assert await code_of(route("")) is DENIED
    assert await code_of(route(TENANT)) is grpc.StatusCode.UNAVAILABLE
    mine = await rig.worker(tenants=[TENANT], grpc_address="10.0.0.2:1")
    assert (await route(TENANT)).target_node_id == mine.node_id


# Envelopes.


async def test_an_envelope_of_one_method_is_nothing_to_another(rig: Rig) -> None:
    """As it was done: a SyncConfig was replayed as a DeregisterNode, whose message looks the same."""
    worker = await rig.worker()
    inner = pb.SyncConfigInner(node_id=worker.node_id, current_config_version="v0")
    overheard = worker.sealed(inner)
    replayed = pb.DeregisterNodeRequest(envelope=overheard)
    assert await code_of(rig.stub.DeregisterNode(replayed)) is UNAUTHENTICATED
    overheard.method = "DeregisterNode"
    assert await code_of(rig.stub.DeregisterNode(replayed)) is UNAUTHENTICATED
    assert rig.side.workers.find(worker.node_id).spec.registered_at_ns is not None  # type: ignore[union-attr]


async def test_an_envelope_is_for_one_server_about_now_and_once(rig: Rig) -> None:
    worker = await rig.worker()
    inner = pb.SyncConfigInner(node_id=worker.node_id)
    request = pb.SyncConfigRequest(envelope=worker.sealed(inner))
    await rig.stub.SyncConfig(request)
    assert await code_of(rig.stub.SyncConfig(request)) is UNAUTHENTICATED
    late = pb.SyncConfigRequest(envelope=worker.sealed(inner))
    rig.clock.ahead_seconds = 301
    assert await code_of(rig.stub.SyncConfig(late)) is UNAUTHENTICATED
    worker.server_key = b"another server's key............"
    assert await code_of(_sync(rig, worker)) is UNAUTHENTICATED


async def test_an_envelope_that_names_no_purpose_is_refused(rig: Rig) -> None:
    worker = await rig.worker()
    payload = pb.SyncConfigInner(node_id=worker.node_id).SerializeToString()
    bare = pb.SealNodeEnvelope(
        node_security_token=worker.token, signature=worker.key.sign(payload), payload=payload
    )
    code, words = await refusal_of(rig.stub.SyncConfig(pb.SyncConfigRequest(envelope=bare)))
    assert (code, "no method" in words) == (UNAUTHENTICATED, True)
    message = envelope.call_message(
        "SyncConfig",
        target=worker.server_key.hex(),
        node_id=worker.node_id,
        issued_at_ns=rig.clock.now_ns(),
        payload=payload,
    )
    assert envelope.has_purpose(message)  # and is thus never a wish for a key


# Forwarding.


async def test_executions_are_forwarded_only_where_operators_allowed(tmp_path: Path) -> None:
    policy = IdentityPolicy(attests_per_minute=0, forward_to=("10.1.0.0/16:50056",))
    async with identity_rig(tmp_path, policy=policy) as rig:
        asker = await rig.worker(pb.NODE_ROLE_CONTROLLER)
        for address in ("127.0.0.1:1", "169.254.169.254:80", "unix:/run/x.sock", "10.1.0.1:22"):
            worker = await rig.worker(grpc_address=address)
            inner = pb.ForwardExecutionInner(execution_id=address, originating_node_id=asker.node_id)
            request = pb.ForwardExecutionRequest(envelope=asker.sealed(inner))
            code, words = await refusal_of(rig.stub.ForwardExecution(request).read())
            assert (code, address in words) == (PRECONDITION, True), address
            await rig.side.workers.deregister(rig.side.workers.find(worker.node_id))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("address", "entry", "target"),
    [
        ("10.1.2.3:50056", "10.1.0.0/16", "10.1.2.3:50056"),
        ("10.1.2.3:50056", "10.1.0.0/16:50056", "10.1.2.3:50056"),
        ("http://w1.example.com:80", "*.example.com", "w1.example.com:80"),
        ("https://W1.example.com", "w1.example.com:443", "w1.example.com:443"),
        ("[fd00::1]:50056", "[fd00::]/8", "[fd00::1]:50056"),
    ],
)
def test_what_is_allowed_is_dialled(address: str, entry: str, target: str) -> None:
    assert forwarding.permitted(address, [forwarding.check_entry(entry)]).target == target


@pytest.mark.parametrize(
    ("address", "entry"),
    [
        ("evil-example.com:1", "*.example.com"),
        ("example.com:1", "*.example.com"),
        ("10.1.2.3:22", "10.1.2.3:50056"),
        ("w1.example.com:1", "10.0.0.0/8"),
        ("unix:/tmp/s", "*.s"),
        ("dns:///10.1.2.3:1", "10.0.0.0/8"),
        ("10.1.2.3:1,127.0.0.1:2", "10.0.0.0/8"),
        ("user@10.1.2.3:1", "10.0.0.0/8"),
        ("", "10.0.0.0/8"),
        ("10.1.2.3:0", "10.0.0.0/8"),
        ("10.1.2.3:99999", "10.0.0.0/8"),
        ("::ffff:10.1.2.3", "10.0.0.0/8"),
    ],
)
def test_what_is_not_allowed_is_not(address: str, entry: str) -> None:
    with pytest.raises(FailedPrecondition):
        forwarding.permitted(address, [entry])


@pytest.mark.parametrize("entry", ["", "*", "unix:/tmp/x", "a b", "http://x"])
def test_an_entry_that_is_none_is_refused_at_the_start(entry: str) -> None:
    with pytest.raises(SettingsError):
        forwarding.check_entry(entry)


def test_the_default_of_a_token_is_the_least() -> None:
    made = WorkerTokenSpec(node_id="n", secret_hash=b"", issued_by="me", issued_at_ns=0, expires_at_ns=0)
    assert (made.role, made.tenants) == (WorkerRole.WORKER, ())
