"""The methods of `pi_controller.PiControllerService` about clusters."""

from __future__ import annotations

from collections import defaultdict

from fleetplane.domains.boards.grpc.nodes import NodeView
from fleetplane.domains.boards.inventory.boards import Boards
from fleetplane.domains.boards.inventory.clusters import Clusters
from fleetplane.domains.boards.kinds import Cluster, number_of
from fleetplane.domains.boards.wire import boards as wire
from fleetplane.domains.boards.wire.paging import page_of
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.errors import InvalidArgument, ResourceExhausted
from fleetplane.rpc import CallContext

ANSWER_LIMIT_BYTES = 4 * 1024 * 1024 - 64 * 1024
"""What the original programs take in one message, with room for its frame."""


class ClusterMethods:
    def __init__(self, *, boards: Boards, clusters: Clusters, view: NodeView) -> None:
        self._boards = boards
        self._clusters = clusters
        self._view = view

    async def CreateCluster(self, request: pi.CreateClusterRequest, context: CallContext) -> pi.Cluster:
        made = await self._clusters.create(wire.cluster_spec(request), actor=context.principal.name)
        return wire.cluster(made, ())

    async def GetCluster(self, request: pi.GetClusterRequest, _context: CallContext) -> pi.Cluster:
        await self._settled()
        return self._shown(self._clusters.require(request.id))

    async def ListClusters(
        self, request: pi.ListClustersRequest, _context: CallContext
    ) -> pi.ListClustersResponse:
        await self._settled()
        found = self._clusters.all()
        members = defaultdict(list)
        for board in self._boards.all():
            members[board.spec.cluster_id].append(board)
        response = pi.ListClustersResponse(total_count=len(found))
        for cluster in page_of(found, page=request.page, page_size=request.page_size):
            nodes = [self._view.node(board) for board in members[number_of(cluster)]]
            response.clusters.append(wire.cluster(cluster, nodes))
        if response.ByteSize() > ANSWER_LIMIT_BYTES:
            raise ResourceExhausted(
                "the page is too large for one message", hint="ask for a smaller page_size"
            )
        return response

    async def UpdateCluster(self, request: pi.UpdateClusterRequest, context: CallContext) -> pi.Cluster:
        _require_id(request.id)
        state = wire.cluster_state(request.status) if request.HasField("status") else None
        changed = await self._clusters.update(
            request.id, actor=context.principal.name, state=state, **wire.cluster_changes(request)
        )
        return self._shown(changed)

    async def DeleteCluster(
        self, request: pi.DeleteClusterRequest, context: CallContext
    ) -> pi.DeleteClusterResponse:
        _require_id(request.id)
        await self._clusters.delete(request.id, actor=context.principal.name)
        return pi.DeleteClusterResponse(success=True)

    def _shown(self, cluster: Cluster) -> pi.Cluster:
        members = self._boards.in_cluster(number_of(cluster))
        return wire.cluster(cluster, [self._view.node(board) for board in members])

    async def _settled(self) -> None:
        await self._clusters.up_to_date()
        await self._boards.up_to_date()


def _require_id(number: int) -> None:
    if not number:
        raise InvalidArgument("id is required", field="id")
