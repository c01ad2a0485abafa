"""Workers: who may join, what an envelope must prove, where executions go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
    new_key,
    refusal_of,
)

from fleetplane.domains.edge.explain import WorkerExplainer
from fleetplane.domains.edge.identity.policy import IdentityPolicy, ServerRole
from fleetplane.domains.edge.kinds import WORKER
from fleetplane.domains.edge.nodes.config_layers import LayerPlace
from fleetplane.domains.edge.workers.registry import CLUSTER_ID
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2_grpc
from fleetplane.gen.aegis.runtime.v1 import runtime_pb2
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.freeze import freeze, lift

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
DENIED = grpc.StatusCode.PERMISSION_DENIED
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with identity_rig(tmp_path) as made:
        yield made


async def beat(
    rig: Rig, worker: Machine, status: pb.NodeStatus = pb.NODE_STATUS_ACTIVE, **changes: Any
) -> pb.NodeHeartbeatResponse:
    inner = pb.NodeHeartbeatInner(node_id=worker.node_id, status=status, active_executions=1)
    request = pb.NodeHeartbeatRequest(envelope=worker.sealed(inner, **changes))
    answer: pb.NodeHeartbeatResponse = await rig.stub.Heartbeat(request, timeout=SECONDS)
    return answer


async def peers(rig: Rig, worker: Machine, **filters: Any) -> dict[str, pb.NodeInfo]:
    request = pb.ListPeersRequest(envelope=worker.sealed(pb.ListPeersInner(**filters)))
    answer = await rig.stub.ListPeers(request)
    assert answer.cluster_id == "aegis-cluster"
    return {node.node_id: node for node in answer.nodes}


async def route(rig: Rig, worker: Machine, execution_id: str = "e-1", **said: Any) -> Any:
    inner = pb.RouteExecutionInner(execution_id=execution_id, **said)
    return await rig.stub.RouteExecution(pb.RouteExecutionRequest(envelope=worker.sealed(inner)))


# Joining.


async def test_a_worker_joins_with_a_token_made_for_it_once(rig: Rig) -> None:
    worker = rig.machine(role=pb.NODE_ROLE_WORKER)
    token = await rig.side.worker_admission.issue(worker.node_id, life_seconds=600, actor=BOSS)
    await worker.join(enrolment_token=token)
    claims = rig.side.tokens.verify_node(worker.token)
    assert (claims.role, claims.tenant, claims.node_id) == ("worker", "", worker.node_id)
    thief = Machine(rig.stub, role=worker.role, node_id=worker.node_id)
    code, text = await refusal_of(thief.attest(enrolment_token=token))
    assert code is DENIED
    assert text.startswith("Cluster admission denied")


@pytest.mark.parametrize("token", ["", "nonsense", "11111111-2222-4333-8444-555555555555.secret"])
async def test_a_worker_without_a_good_token_is_denied_admission(rig: Rig, token: str) -> None:
    code, text = await refusal_of(rig.machine(role=pb.NODE_ROLE_HYBRID).attest(enrolment_token=token))
    assert code is DENIED
    assert text.startswith("Cluster admission denied")


async def test_a_workers_token_is_bound_to_its_id_its_secret_and_its_time(rig: Rig) -> None:
    worker, other = rig.machine(role=pb.NODE_ROLE_WORKER), rig.machine(role=pb.NODE_ROLE_WORKER)
    token = await rig.side.worker_admission.issue(worker.node_id, life_seconds=600, actor=BOSS)
    assert await code_of(other.attest(enrolment_token=token)) is DENIED
    assert await code_of(worker.attest(enrolment_token=token[:-1] + "0" * 2)) is DENIED
    rig.clock.ahead_seconds = 601
    assert await code_of(worker.attest(enrolment_token=token)) is DENIED


async def test_a_known_worker_attests_again_on_its_pinned_key_alone(rig: Rig) -> None:
    worker = await rig.worker()
    rig.clock.ahead_seconds = 3700
    assert await code_of(beat(rig, worker)) is UNAUTHENTICATED
    await worker.join()
    assert await beat(rig, worker) == pb.NodeHeartbeatResponse()


async def test_a_worker_gets_a_new_key_only_with_a_new_token(rig: Rig) -> None:
    worker = await rig.worker()
    former = worker.token
    worker.key = new_key()
    assert await code_of(worker.attest()) is DENIED
    token = await rig.side.worker_admission.issue(worker.node_id, life_seconds=600, actor=BOSS)
    await worker.join(enrolment_token=token)
    assert await code_of(beat(rig, worker, node_security_token=former)) is UNAUTHENTICATED
    await beat(rig, worker)


async def test_of_many_answers_at_once_with_one_workers_token_one_key_gets_in(rig: Rig) -> None:
    node_id = rig.machine().node_id
    token = await rig.side.worker_admission.issue(node_id, life_seconds=600, actor=BOSS)
    rivals = [Machine(rig.stub, role=pb.NODE_ROLE_WORKER, node_id=node_id) for _ in range(16)]
    requests = [rival.answer(await rival.attest(enrolment_token=token), None) for rival in rivals]
    answers = await asyncio.gather(
        *(rival.respond(request) for rival, request in zip(rivals, requests, strict=True)),
        return_exceptions=True,
    )
    assert sum(not isinstance(answer, BaseException) for answer in answers) == 1


# What an envelope must prove.


async def test_registering_names_the_cluster_and_lists_the_node(rig: Rig) -> None:
    worker = await rig.worker(grpc_address="10.0.0.5:50056", capabilities=pb.NodeCapabilities(cpu_cores=8))
    inner = pb.RegisterNodeInner(node_id=worker.node_id, capabilities=pb.NodeCapabilities(cpu_cores=16))
    answer = await rig.stub.RegisterNode(pb.RegisterNodeRequest(envelope=worker.sealed(inner)))
    assert (answer.accepted, answer.cluster_id) == (True, CLUSTER_ID)
    assert CLUSTER_ID == "d0e35960-8490-5694-864a-4e78cd93bbc3"
    info = (await peers(rig, worker))[worker.node_id]
    assert (info.role, info.status) == (pb.NODE_ROLE_WORKER, pb.NODE_STATUS_ACTIVE)
    assert (info.grpc_address, info.capabilities.cpu_cores) == ("10.0.0.5:50056", 16)
    assert info.HasField("last_heartbeat_at")
    assert info.HasField("registered_at")


async def test_a_wrong_signature_token_or_sender_is_refused(rig: Rig) -> None:
    worker, other = await rig.worker(), await rig.worker()
    assert await code_of(beat(rig, worker, signature=b"\0" * 64)) is UNAUTHENTICATED
    assert await code_of(beat(rig, worker, signature=b"")) is UNAUTHENTICATED
    assert await code_of(beat(rig, worker, node_security_token="")) is UNAUTHENTICATED
    assert await code_of(beat(rig, worker, node_security_token=other.token)) is UNAUTHENTICATED
    assert await code_of(beat(rig, worker, payload=b"\xff\xff")) is UNAUTHENTICATED
    broken = pb.NodeHeartbeatRequest(envelope=worker.sealed(b"\xff\xff"))
    assert await code_of(rig.stub.Heartbeat(broken)) is INVALID
    assert await code_of(rig.stub.Heartbeat(pb.NodeHeartbeatRequest())) is INVALID
    about_other = pb.NodeHeartbeatInner(node_id=other.node_id)
    spoofed = pb.NodeHeartbeatRequest(envelope=worker.sealed(about_other))
    assert await code_of(rig.stub.Heartbeat(spoofed)) is DENIED


async def test_an_edge_daemon_is_no_worker(rig: Rig) -> None:
    machine = await rig.enrolled()
    code, text = await refusal_of(beat(rig, machine))
    assert code is UNAUTHENTICATED
    assert text.startswith("Node not registered")


async def test_a_worker_that_has_not_registered_or_left_is_not_registered(rig: Rig) -> None:
    worker = rig.machine(role=pb.NODE_ROLE_WORKER)
    token = await rig.side.worker_admission.issue(worker.node_id, life_seconds=600, actor=BOSS)
    await worker.join(enrolment_token=token)
    assert await code_of(beat(rig, worker)) is UNAUTHENTICATED
    member = await rig.worker()
    inner = pb.DeregisterNodeInner(node_id=member.node_id, reason="upgrade")
    request = pb.DeregisterNodeRequest(envelope=member.sealed(inner))
    assert (await rig.stub.DeregisterNode(request)).accepted
    assert await code_of(beat(rig, member)) is UNAUTHENTICATED


# Heartbeats and peers.


async def test_a_worker_that_should_drain_is_told_so_until_it_says_it_does(rig: Rig) -> None:
    worker = await rig.worker()
    await rig.side.workers.set_draining(worker.node_id, True, actor=BOSS)
    answer = await beat(rig, worker)
    assert [command.drain.drain for command in answer.pending_commands] == [True]
    assert not (await beat(rig, worker, pb.NODE_STATUS_DRAINING)).pending_commands
    found = await peers(rig, worker, filter_status=[pb.NODE_STATUS_DRAINING])
    assert set(found) == {worker.node_id}


async def test_a_frozen_worker_is_told_to_drain_once_the_freeze_is_lifted(rig: Rig) -> None:
    worker = await rig.worker()
    explainer = WorkerExplainer(rig.store, rig.side.workers, rig.clock)
    await rig.side.workers.set_draining(worker.node_id, True, actor=BOSS)
    scope = explainer.locate("", worker.node_id)
    await freeze(rig.store, scope, reason="works", actor="ada", domains=("edge",))

    assert not (await beat(rig, worker)).pending_commands
    found = explainer.explain(scope, worker.node_id)
    assert [one.code for finding in found for one in finding.explanation.reasons] == ["DRAINING"]
    assert await lift(rig.store, scope, actor="ada", domains=("edge",))
    assert [command.drain.drain for command in (await beat(rig, worker)).pending_commands] == [True]
    for within, name in (("tenant/acme", worker.node_id), ("", "nobody")):
        with pytest.raises(NotFound):
            explainer.locate(within, name)


async def test_heartbeats_write_nothing_down_unless_the_state_changes(rig: Rig) -> None:
    worker = await rig.worker()
    before = rig.store.revision
    for _ in range(5):
        await beat(rig, worker)
    assert rig.store.revision == before
    await beat(rig, worker, pb.NODE_STATUS_UNHEALTHY)
    assert rig.store.revision == before + 1


async def test_peers_are_filtered_by_status_and_role_and_silent_ones_are_unhealthy(rig: Rig) -> None:
    worker, lead = await rig.worker(), await rig.worker(pb.NODE_ROLE_CONTROLLER)
    assert set(await peers(rig, worker)) == {worker.node_id, lead.node_id}
    assert set(await peers(rig, worker, filter_role=[pb.NODE_ROLE_CONTROLLER])) == {lead.node_id}
    rig.clock.ahead_seconds = 95
    await beat(rig, worker)
    unhealthy = await peers(rig, worker, filter_status=[pb.NODE_STATUS_UNHEALTHY])
    assert set(unhealthy) == {lead.node_id}


# Executions.


async def test_executions_go_round_the_workers_that_can_take_them(rig: Rig) -> None:
    big = pb.NodeCapabilities(cpu_cores=32, gpu_count=1, supported_runtimes=["wasm"], tags=["ssd"])
    asker = await rig.worker(pb.NODE_ROLE_CONTROLLER)
    workers = [await rig.worker(capabilities=big, grpc_address=f"10.0.0.{n}:1") for n in range(3)]
    small = await rig.worker(grpc_address="10.0.1.1:1")
    needed = pb.NodeCapabilities(cpu_cores=16, supported_runtimes=["wasm"])
    got = [await route(rig, asker, f"e-{n}", required_capabilities=needed) for n in range(6)]
    assert {answer.target_node_id for answer in got} == {worker.node_id for worker in workers}
    assert all(answer.worker_grpc_address.startswith("10.0.0.") for answer in got)
    anyone = {(await route(rig, asker, f"a-{n}")).target_node_id for n in range(8)}
    assert small.node_id in anyone
    assert asker.node_id not in anyone
    tagged = {(await route(rig, asker, f"t-{n}", preferred_tags=["ssd"])).target_node_id for n in range(8)}
    assert small.node_id not in tagged


async def test_nothing_is_routed_to_workers_that_are_silent_draining_or_too_small(rig: Rig) -> None:
    asker, worker = await rig.worker(pb.NODE_ROLE_CONTROLLER), await rig.worker()
    unavailable = grpc.StatusCode.UNAVAILABLE
    too_much = pb.NodeCapabilities(gpu_count=1)
    assert await code_of(route(rig, asker, required_capabilities=too_much)) is unavailable
    await rig.side.workers.set_draining(worker.node_id, True, actor=BOSS)
    assert await code_of(route(rig, asker)) is unavailable
    await rig.side.workers.set_draining(worker.node_id, False, actor=BOSS)
    assert (await route(rig, asker)).target_node_id == worker.node_id
    rig.clock.ahead_seconds = 61
    assert await code_of(route(rig, asker)) is unavailable


class Runtime(cluster_pb2_grpc.NodeClusterServiceServicer):
    """A worker that runs what it is sent; the official server."""

    def __init__(self) -> None:
        self.seen: list[pb.ForwardExecutionInner] = []
        self.left = asyncio.Event()

    async def ForwardExecution(
        self, request: pb.ForwardExecutionRequest, context: Any
    ) -> AsyncIterator[runtime_pb2.ExecutionEvent]:
        inner = pb.ForwardExecutionInner.FromString(request.envelope.payload)
        self.seen.append(inner)
        started = runtime_pb2.ExecutionStarted(execution_id=inner.execution_id, agent_id=inner.agent_id)
        yield runtime_pb2.ExecutionEvent(execution_started=started)
        if inner.input == "fail":
            await context.abort(grpc.StatusCode.DATA_LOSS, "the disk is gone")
        if inner.input == "hang":
            try:
                await asyncio.sleep(SECONDS)
            finally:
                self.left.set()
        done = runtime_pb2.ExecutionCompleted(execution_id=inner.execution_id, final_output=inner.input)
        yield runtime_pb2.ExecutionEvent(execution_completed=done)


@asynccontextmanager
async def runtime() -> AsyncIterator[tuple[Runtime, str]]:
    server, servicer = grpc.aio.server(), Runtime()
    cluster_pb2_grpc.add_NodeClusterServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def forwarded(rig: Rig, sender: Machine, text: str, **options: Any) -> Any:
    inner = pb.ForwardExecutionInner(
        execution_id="e-9", agent_id="a-1", input=text, originating_node_id=sender.node_id
    )
    request = pb.ForwardExecutionRequest(envelope=sender.sealed(inner))
    return rig.stub.ForwardExecution(request, timeout=SECONDS, **options)


async def test_an_execution_is_forwarded_to_the_worker_it_was_routed_to(rig: Rig) -> None:
    async with runtime() as (servicer, address), runtime() as (_, elsewhere):
        asker = await rig.worker(pb.NODE_ROLE_CONTROLLER)
        worker = await rig.worker(grpc_address=address)
        await rig.worker(grpc_address=elsewhere)
        targets = [(await route(rig, asker, "e-9")).target_node_id for _ in range(2)]
        assert worker.node_id in targets
        if targets[-1] != worker.node_id:
            await route(rig, asker, "e-9")
        events = [event async for event in forwarded(rig, asker, "hello")]
        assert [event.WhichOneof("event") for event in events] == ["execution_started", "execution_completed"]
        assert events[1].execution_completed.final_output == "hello"
        assert [inner.agent_id for inner in servicer.seen] == ["a-1"]


async def test_a_workers_own_failure_reaches_who_asked(rig: Rig) -> None:
    async with runtime() as (_, address):
        asker = await rig.worker(pb.NODE_ROLE_CONTROLLER)
        worker = await rig.worker(grpc_address=address)
        call = forwarded(rig, asker, "fail")
        assert (await call.read()).HasField("execution_started")
        code, text = await refusal_of(call.read())
        assert code is grpc.StatusCode.DATA_LOSS
        assert text == f"worker {worker.node_id}: the disk is gone"


async def test_who_stops_listening_ends_the_execution_at_its_worker(rig: Rig) -> None:
    async with runtime() as (servicer, address):
        asker = await rig.worker(pb.NODE_ROLE_CONTROLLER)
        await rig.worker(grpc_address=address)
        call = forwarded(rig, asker, "hang")
        assert (await call.read()).HasField("execution_started")
        call.cancel()
        await asyncio.wait_for(servicer.left.wait(), SECONDS)


async def test_an_unreachable_worker_and_a_second_hop_are_said_to_be_so(rig: Rig) -> None:
    asker = await rig.worker(pb.NODE_ROLE_CONTROLLER)
    await rig.worker(grpc_address="127.0.0.1:1")
    assert await code_of(forwarded(rig, asker, "x").read()) is grpc.StatusCode.UNAVAILABLE
    hop = (("x-fleetplane-forwarded", "1"),)
    again = forwarded(rig, asker, "x", metadata=hop)
    assert await code_of(again.read()) is grpc.StatusCode.FAILED_PRECONDITION


async def test_an_execution_is_forwarded_only_for_who_it_says_it_is_from(rig: Rig) -> None:
    asker, other = await rig.worker(pb.NODE_ROLE_CONTROLLER), await rig.worker()
    inner = pb.ForwardExecutionInner(execution_id="e", originating_node_id=other.node_id)
    call = rig.stub.ForwardExecution(pb.ForwardExecutionRequest(envelope=asker.sealed(inner)))
    assert await code_of(call.read()) is DENIED


async def test_a_relay_forwards_no_executions(tmp_path: Path) -> None:
    async with identity_rig(tmp_path, policy=IdentityPolicy(role=ServerRole.RELAY_COORDINATOR)) as rig:
        asker = await rig.worker(pb.NODE_ROLE_CONTROLLER)
        call = forwarded(rig, asker, "x")
        assert await code_of(call.read()) is grpc.StatusCode.FAILED_PRECONDITION


# Configuration.


async def sync(rig: Rig, worker: Machine, version: str = "", **more: Any) -> pb.SyncConfigResponse:
    inner = pb.SyncConfigInner(node_id=worker.node_id, current_config_version=version, **more)
    answer: pb.SyncConfigResponse = await rig.stub.SyncConfig(
        pb.SyncConfigRequest(envelope=worker.sealed(inner))
    )
    return answer


async def push(rig: Rig, sender: Machine, target: str, content: bytes) -> pb.PushConfigResponse:
    inner = pb.PushConfigInner(target_node_id=target, config_version="v", config_payload=content)
    answer: pb.PushConfigResponse = await rig.stub.PushConfig(
        pb.PushConfigRequest(envelope=sender.sealed(inner))
    )
    return answer


async def test_a_worker_is_sent_the_merged_configuration_until_it_has_it(rig: Rig) -> None:
    lead, worker = await rig.worker(pb.NODE_ROLE_CONTROLLER), await rig.worker()
    assert (await sync(rig, worker)).up_to_date
    await rig.layers.put(LayerPlace(), {"a": {"x": 1, "y": 1}}, actor=BOSS)
    assert (await push(rig, lead, worker.node_id, b'{"a": {"y": 2}}')).accepted
    answer = await sync(rig, worker)
    assert (answer.up_to_date, answer.config_delta) == (False, b'{"a":{"x":1,"y":2}}')
    assert (await sync(rig, worker, answer.latest_version)).up_to_date
    stored = rig.store.get(WORKER, "", worker.node_id)
    assert stored is not None
    assert stored.status is not None
    assert stored.status.config_version == answer.latest_version
    await rig.layers.put(LayerPlace(tenant=TENANT), {"b": 3}, actor=BOSS)
    assert b'"b":3' in (await sync(rig, worker, tenant_id=TENANT)).config_delta
    assert b'"b"' not in (await sync(rig, worker, tenant_id=OTHER)).config_delta


async def test_a_configuration_pushed_to_an_edge_daemon_is_its_tenants(rig: Rig) -> None:
    lead, machine = await rig.worker(pb.NODE_ROLE_HYBRID), await rig.enrolled()
    await push(rig, lead, machine.node_id, b'{"z": 1}')
    layer = rig.layers.get(LayerPlace(tenant=TENANT, node_id=machine.node_id))
    assert layer is not None
    assert layer.spec.content == b'{"z":1}'


async def test_configurations_are_pushed_by_leaders_to_nodes_that_exist_and_as_json(rig: Rig) -> None:
    lead, worker = await rig.worker(pb.NODE_ROLE_CONTROLLER), await rig.worker()
    assert await code_of(push(rig, worker, lead.node_id, b"{}")) is DENIED
    assert await code_of(push(rig, lead, worker.node_id, b"[1]")) is INVALID
    assert await code_of(push(rig, lead, worker.node_id, b"not json")) is INVALID
    nobody = rig.machine().node_id
    assert await code_of(push(rig, lead, nobody, b"{}")) is grpc.StatusCode.NOT_FOUND
    assert await code_of(push(rig, lead, "x", b"{}")) is INVALID
