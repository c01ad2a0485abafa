"""The workers' methods of `NodeClusterService`: open the envelope, check who it speaks of, do, answer."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from fleetplane.domains.edge.identity.policy import IdentityPolicy
from fleetplane.domains.edge.kinds import Worker, WorkerRole, WorkerState, check_tenant, tenant_of
from fleetplane.domains.edge.nodes.config_layers import ConfigLayers, LayerPlace, parsed
from fleetplane.domains.edge.nodes.registry import Nodes
from fleetplane.domains.edge.wire import messages as wire
from fleetplane.domains.edge.workers import forwarding
from fleetplane.domains.edge.workers.forwarding import WorkerReport
from fleetplane.domains.edge.workers.registry import (
    CLUSTER_ID,
    CLUSTER_NAME,
    EdgeWorkers,
    must_be,
    must_lead,
    must_serve,
)
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.aegis.runtime.v1 import runtime_pb2
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound
from fleetplane.kernel.values.ids import check_uuid
from fleetplane.kernel.values.timestamps import timestamp
from fleetplane.rpc import CallContext

ADDRESS_LIMIT = 256
TAGS_LIMIT = 64

ROLES = {
    pb.NODE_ROLE_CONTROLLER: WorkerRole.CONTROLLER,
    pb.NODE_ROLE_WORKER: WorkerRole.WORKER,
    pb.NODE_ROLE_HYBRID: WorkerRole.HYBRID,
    pb.NODE_ROLE_RELAY_COORDINATOR: WorkerRole.RELAY_COORDINATOR,
}
STATES = {
    pb.NODE_STATUS_ACTIVE: WorkerState.ACTIVE,
    pb.NODE_STATUS_DRAINING: WorkerState.DRAINING,
    pb.NODE_STATUS_UNHEALTHY: WorkerState.UNHEALTHY,
}
ROLE_NUMBERS = {role: number for number, role in ROLES.items()}
STATE_NUMBERS = {state: number for number, state in STATES.items()}


class WorkerService:
    def __init__(
        self,
        *,
        workers: EdgeWorkers,
        nodes: Nodes,
        layers: ConfigLayers,
        policy: IdentityPolicy,
        clock: Clock,
    ) -> None:
        self._workers = workers
        self._nodes = nodes
        self._layers = layers
        self._policy = policy
        self._clock = clock

    # Membership.

    async def RegisterNode(
        self, request: pb.RegisterNodeRequest, _context: CallContext
    ) -> pb.RegisterNodeResponse:
        worker, said = self._workers.open(request.envelope, pb.RegisterNodeInner, method="RegisterNode")
        must_be(worker, said.node_id)
        await self._workers.claim(worker, request.envelope)
        await self._workers.register(
            worker,
            capabilities=wire.resources_of(said.capabilities),
            tags=tags_of(said.capabilities),
            address=address_of(said.grpc_address),
        )
        return pb.RegisterNodeResponse(accepted=True, cluster_id=CLUSTER_ID, message="registered")

    async def Heartbeat(
        self, request: pb.NodeHeartbeatRequest, _context: CallContext
    ) -> pb.NodeHeartbeatResponse:
        worker, said = self._workers.registered(request.envelope, pb.NodeHeartbeatInner, method="Heartbeat")
        must_be(worker, said.node_id)
        report = WorkerReport(
            at_ns=self._clock.now_ns(),
            state=STATES.get(said.status, WorkerState.ACTIVE),
            active_executions=said.active_executions,
            memory_gb=said.available_memory_gb,
            cpu_percent=said.cpu_utilization_percent,
        )
        answer = pb.NodeHeartbeatResponse()
        if await self._workers.heartbeat(worker, report):
            answer.pending_commands.add(drain=pb.DrainCommand(drain=True))
        return answer

    async def DeregisterNode(
        self, request: pb.DeregisterNodeRequest, _context: CallContext
    ) -> pb.DeregisterNodeResponse:
        worker, said = self._workers.open(request.envelope, pb.DeregisterNodeInner, method="DeregisterNode")
        must_be(worker, said.node_id)
        await self._workers.claim(worker, request.envelope)
        await self._workers.deregister(worker)
        return pb.DeregisterNodeResponse(accepted=True)

    async def ListPeers(self, request: pb.ListPeersRequest, _context: CallContext) -> pb.ListPeersResponse:
        _, said = self._workers.registered(request.envelope, pb.ListPeersInner, method="ListPeers")
        peers = [self._info(peer) for peer in self._workers.peers()]
        return pb.ListPeersResponse(
            nodes=[
                peer
                for peer in peers
                if (not said.filter_status or peer.status in said.filter_status)
                and (not said.filter_role or peer.role in said.filter_role)
            ],
            cluster_id=CLUSTER_NAME,
        )

    def _info(self, worker: Worker) -> pb.NodeInfo:
        spec, report = worker.spec, self._workers.report(worker)
        return pb.NodeInfo(
            node_id=worker.name,
            role=ROLE_NUMBERS[spec.role],
            status=STATE_NUMBERS[self._workers.state(worker)],
            capabilities=wire.node_capabilities(spec.capabilities, spec.tags),
            grpc_address=spec.grpc_address,
            last_heartbeat_at=timestamp(report.at_ns) if report is not None else None,
            registered_at=timestamp(spec.registered_at_ns) if spec.registered_at_ns else None,
        )

    # Executions.

    async def RouteExecution(
        self, request: pb.RouteExecutionRequest, _context: CallContext
    ) -> pb.RouteExecutionResponse:
        sender, said = self._workers.registered(
            request.envelope, pb.RouteExecutionInner, method="RouteExecution"
        )
        must_serve(sender, said.tenant_id)
        needed = wire.resources_of(said.required_capabilities)
        chosen = self._workers.route(said.execution_id, needed, said.preferred_tags, tenant=said.tenant_id)
        await self._workers.tell_route(said.execution_id, chosen)
        return pb.RouteExecutionResponse(
            target_node_id=chosen.name, worker_grpc_address=chosen.spec.grpc_address
        )

    async def ForwardExecution(
        self, request: pb.ForwardExecutionRequest, context: CallContext
    ) -> AsyncIterator[runtime_pb2.ExecutionEvent]:
        if not self._policy.role.forwards:
            raise FailedPrecondition("a relay forwards no executions", hint="ask a controller")
        forwarding.refuse_second_hop(context.field(forwarding.HOP_FIELD.encode()))
        sender, said = self._workers.registered(
            request.envelope, pb.ForwardExecutionInner, method="ForwardExecution"
        )
        must_be(sender, said.originating_node_id)
        must_serve(sender, said.tenant_id)
        await self._workers.claim(sender, request.envelope)
        worker = self._workers.routed(said.execution_id, tenant=said.tenant_id)
        address = forwarding.permitted(worker.spec.grpc_address, self._policy.forward_to)
        try:
            async for event in forwarding.forward(request, address, seconds=context.time_remaining()):
                yield event
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), f"worker {worker.name}: {error.details()}")

    # Configuration.

    async def SyncConfig(self, request: pb.SyncConfigRequest, _context: CallContext) -> pb.SyncConfigResponse:
        worker, said = self._workers.registered(request.envelope, pb.SyncConfigInner, method="SyncConfig")
        must_be(worker, said.node_id)
        tenant = check_tenant(said.tenant_id, field="tenant_id") if said.tenant_id else ""
        if tenant:
            must_serve(worker, tenant)
        merged = self._layers.merged(tenant, worker.name)
        if merged is None or merged.version == said.current_config_version:
            return pb.SyncConfigResponse(up_to_date=True, latest_version=said.current_config_version)
        await self._workers.synced(worker, merged.version)
        return pb.SyncConfigResponse(latest_version=merged.version, config_delta=merged.content)

    async def PushConfig(self, request: pb.PushConfigRequest, _context: CallContext) -> pb.PushConfigResponse:
        """Replaces the target's own layer; the version in the request is its sender's name for it."""
        sender, said = self._workers.registered(request.envelope, pb.PushConfigInner, method="PushConfig")
        must_lead(sender)
        target = check_uuid(said.target_node_id, field="target_node_id")
        document = parsed(said.config_payload, field="config_payload")
        place = self._place(target)
        must_serve(sender, place.tenant)
        await self._workers.claim(sender, request.envelope)
        await self._layers.put(place, document, actor=f"worker/{sender.name}")
        return pb.PushConfigResponse(accepted=True)

    def _place(self, node_id: str) -> LayerPlace:
        node = self._nodes.find(node_id)
        if node is not None:
            return LayerPlace(tenant=tenant_of(node.scope), node_id=node_id)
        if self._workers.find(node_id) is None:
            raise NotFound(f"there is no node {node_id}")
        return LayerPlace(node_id=node_id)


def tags_of(said: pb.NodeCapabilities) -> tuple[str, ...]:
    if len(said.tags) > TAGS_LIMIT or any(len(tag) > ADDRESS_LIMIT for tag in said.tags):
        raise InvalidArgument(f"at most {TAGS_LIMIT} tags of {ADDRESS_LIMIT} characters", field="tags")
    return tuple(said.tags)


def address_of(text: str) -> str:
    if len(text) > ADDRESS_LIMIT or not text.isprintable():
        raise InvalidArgument(f"at most {ADDRESS_LIMIT} printable characters", field="grpc_address")
    return text.strip()
