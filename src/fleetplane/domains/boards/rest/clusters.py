"""REST: clusters and who belongs to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.boards.access import ADMINISTER, OPERATE, READ
from fleetplane.domains.boards.inventory.boards import Boards
from fleetplane.domains.boards.inventory.clusters import Clusters
from fleetplane.domains.boards.kinds import Board, Cluster, ClusterSpec, ClusterState, number_of
from fleetplane.domains.boards.rest import views
from fleetplane.domains.boards.rest.common import (
    CREATED,
    NO_CONTENT,
    PAGING,
    BoardCall,
    actor,
    changes,
    listed,
    number_in,
)
from fleetplane.domains.boards.rest.shapes.inventory import (
    ClusterNodes,
    ClusterRows,
    NodeData,
    ShownCluster,
    ShownNode,
)
from fleetplane.domains.boards.rules import Facts
from fleetplane.kernel.errors import NotFound
from fleetplane.rpc import Needs
from fleetplane.web.rest.routes import Answer, Route

_ONE = "/clusters/{id}"
_TAG = "Clusters"


class ClusterBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str = ""
    version: str = ""
    master_endpoint: str = ""


class ClusterPatch(msgspec.Struct, forbid_unknown_fields=True):
    name: str | UnsetType | None = UNSET
    description: str | UnsetType | None = UNSET
    status: ClusterState | UnsetType | None = UNSET
    version: str | UnsetType | None = UNSET
    master_endpoint: str | UnsetType | None = UNSET


class MemberBody(msgspec.Struct, forbid_unknown_fields=True):
    node_id: int


class ClusterRoutes:
    def __init__(self, *, clusters: Clusters, boards: Boards, show: Callable[[Board], ShownNode]) -> None:
        self._clusters = clusters
        self._boards = boards
        self._show = show

    def routes(self) -> Sequence[Route]:
        return (*self._cluster_routes(), *self._member_routes())

    def _cluster_routes(self) -> Sequence[Route]:
        return (
            Route(
                method="GET",
                path="/clusters",
                handler=self.list,
                needs=Needs.STORE,
                tag=_TAG,
                summary="List clusters",
                permission=READ,
                answer=ClusterRows,
                query=PAGING,
            ),
            Route(
                method="POST",
                path="/clusters",
                needs=Needs.WRITES,
                handler=self.create,
                tag=_TAG,
                summary="Create a cluster",
                permission=OPERATE,
                body=ClusterBody,
                answer=ShownCluster,
                status=CREATED,
            ),
            Route(
                method="GET",
                path=_ONE,
                handler=self.show,
                needs=Needs.STORE,
                tag=_TAG,
                permission=READ,
                summary="Get a cluster, with its boards",
                answer=ShownCluster,
            ),
            Route(
                method="PUT",
                path=_ONE,
                needs=Needs.WRITES,
                handler=self.change,
                tag=_TAG,
                permission=OPERATE,
                summary="Change a cluster; omitted fields keep their values",
                body=ClusterPatch,
                answer=ShownCluster,
            ),
            Route(
                method="DELETE",
                path=_ONE,
                needs=Needs.WRITES,
                handler=self.delete,
                tag=_TAG,
                permission=ADMINISTER,
                summary="Delete a cluster that has no boards",
                status=NO_CONTENT,
            ),
            Route(
                method="GET",
                path=f"{_ONE}/status",
                handler=self.status,
                needs=Needs.STORE,
                tag=_TAG,
                permission=READ,
                summary="Get a cluster's status, in one word",
                answer=ClusterState,
            ),
        )

    def _member_routes(self) -> Sequence[Route]:
        return (
            Route(
                method="GET",
                path=f"{_ONE}/nodes",
                needs=Needs.STORE,
                handler=self.members,
                tag=_TAG,
                permission=READ,
                summary="List the boards of a cluster",
                answer=ClusterNodes,
            ),
            Route(
                method="POST",
                path=f"{_ONE}/nodes",
                needs=Needs.WRITES,
                handler=self.add,
                tag=_TAG,
                permission=OPERATE,
                summary="Add a board to a cluster",
                body=MemberBody,
                answer=NodeData,
            ),
            Route(
                method="DELETE",
                path=f"{_ONE}/nodes/{{node}}",
                needs=Needs.WRITES,
                handler=self.remove,
                tag=_TAG,
                permission=OPERATE,
                summary="Remove a board from a cluster",
                status=NO_CONTENT,
            ),
        )

    async def list(self, call: BoardCall) -> Answer[ClusterRows]:
        found = self._clusters.all()
        return Answer(content=listed(call, found, views.cluster, ClusterRows))

    async def create(self, call: BoardCall) -> Answer[ShownCluster]:
        body: ClusterBody = call.body
        view = call.answering(lambda made: Answer(content=views.cluster(made, ())))
        spec = ClusterSpec(
            name=body.name,
            description=body.description,
            version=body.version,
            master_endpoint=body.master_endpoint,
        )
        return view(await self._clusters.create(spec, actor=actor(call)))

    async def show(self, call: BoardCall) -> Answer[ShownCluster]:
        return Answer(content=self._shown(self._cluster(call)))

    async def change(self, call: BoardCall) -> Answer[ShownCluster]:
        said = changes(call.body)
        state = said.pop("status", None)
        changed = await self._clusters.update(number_in(call), actor=actor(call), state=state, **said)
        return Answer(content=self._shown(changed))

    async def delete(self, call: BoardCall) -> Answer[None]:
        await self._clusters.delete(number_in(call), actor=actor(call))
        return Answer(content=None)

    async def status(self, call: BoardCall) -> Answer[ClusterState]:
        return Answer(content=views.cluster_state(self._cluster(call)))

    async def members(self, call: BoardCall) -> Answer[ClusterNodes]:
        number = number_of(self._cluster(call))
        nodes = [self._show(board) for board in self._boards.in_cluster(number)]
        return Answer(content=ClusterNodes(nodes=nodes, count=len(nodes), cluster_id=number))

    async def add(self, call: BoardCall) -> Answer[NodeData]:
        body: MemberBody = call.body
        cluster = self._cluster(call)
        facts = Facts(cluster_id=number_of(cluster))
        board = await self._boards.update(body.node_id, facts, actor=actor(call))
        return Answer(content=NodeData(data=self._show(board)))

    async def remove(self, call: BoardCall) -> Answer[None]:
        number, cluster = number_in(call, "node"), number_of(self._cluster(call))
        if self._boards.require(number, field="node").spec.cluster_id != cluster:
            raise NotFound(f"board {number} does not belong to cluster {cluster}", field="node")
        await self._boards.update(number, Facts(cluster_id=0), actor=actor(call))
        return Answer(content=None)

    def _cluster(self, call: BoardCall) -> Cluster:
        return self._clusters.require(number_in(call))

    def _shown(self, cluster: Cluster) -> ShownCluster:
        members = self._boards.in_cluster(number_of(cluster))
        return views.cluster(cluster, (self._show(board) for board in members))
