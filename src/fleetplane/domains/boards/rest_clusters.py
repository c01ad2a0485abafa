"""REST: clusters and who belongs to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.boards import views
from fleetplane.domains.boards.access import ADMINISTER, OPERATE, READ
from fleetplane.domains.boards.clusters import Clusters
from fleetplane.domains.boards.kinds import Board, Cluster, ClusterSpec, ClusterState, number_of
from fleetplane.domains.boards.registry import Boards
from fleetplane.domains.boards.rest import (
    CREATED,
    NO_CONTENT,
    PAGING,
    BoardCall,
    Json,
    actor,
    listed,
    number_in,
)  # fmt: skip
from fleetplane.domains.boards.rules import Facts
from fleetplane.kernel.errors import NotFound
from fleetplane.web.bodies import given
from fleetplane.web.routes import Answer, Route

_ONE = "/clusters/{id}"
_TAG = "Clusters"


class ClusterBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    description: str = ""
    version: str = ""
    master_endpoint: str = ""


class ClusterPatch(msgspec.Struct, forbid_unknown_fields=True):
    name: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    status: ClusterState | UnsetType = UNSET
    version: str | UnsetType = UNSET
    master_endpoint: str | UnsetType = UNSET


class MemberBody(msgspec.Struct, forbid_unknown_fields=True):
    node_id: int


class ClusterRoutes:
    def __init__(self, *, clusters: Clusters, boards: Boards, show: Callable[[Board], Json]) -> None:
        self._clusters = clusters
        self._boards = boards
        self._show = show

    def routes(self) -> Sequence[Route]:
        return (*self._cluster_routes(), *self._member_routes())

    def _cluster_routes(self) -> Sequence[Route]:
        return (
            Route(
                method="GET", path="/clusters", handler=self.list, tag=_TAG, summary="Clusters",
                permission=READ, answer=dict[str, Any], query=PAGING,
            ),
            Route(
                method="POST", path="/clusters", handler=self.create, tag=_TAG, summary="Make a cluster",
                permission=OPERATE, body=ClusterBody, answer=dict[str, Any], status=CREATED,
            ),
            Route(
                method="GET", path=_ONE, handler=self.show, tag=_TAG, permission=READ,
                summary="One cluster, with its boards", answer=dict[str, Any],
            ),
            Route(
                method="PUT", path=_ONE, handler=self.change, tag=_TAG, permission=OPERATE,
                summary="Change a cluster; what is left out stays", body=ClusterPatch,
                answer=dict[str, Any],
            ),
            Route(
                method="DELETE", path=_ONE, handler=self.delete, tag=_TAG, permission=ADMINISTER,
                summary="Forget a cluster without boards", status=NO_CONTENT,
            ),
            Route(
                method="GET", path=f"{_ONE}/status", handler=self.status, tag=_TAG, permission=READ,
                summary="How a cluster is, in one word", answer=str,
            ),
        )  # fmt: skip

    def _member_routes(self) -> Sequence[Route]:
        return (
            Route(
                method="GET", path=f"{_ONE}/nodes", handler=self.members, tag=_TAG, permission=READ,
                summary="The boards of a cluster", answer=dict[str, Any],
            ),
            Route(
                method="POST", path=f"{_ONE}/nodes", handler=self.add, tag=_TAG, permission=OPERATE,
                summary="Count a board to a cluster", body=MemberBody, answer=dict[str, Any],
            ),
            Route(
                method="DELETE", path=f"{_ONE}/nodes/{{node}}", handler=self.remove, tag=_TAG,
                permission=OPERATE, summary="Count a board to it no more", status=NO_CONTENT,
            ),
        )  # fmt: skip

    async def list(self, call: BoardCall) -> Answer[Json]:
        found = self._clusters.all()
        return Answer(content=listed(call, found, views.cluster, name="clusters"))

    async def create(self, call: BoardCall) -> Answer[Json]:
        body: ClusterBody = call.body
        view = call.answering(lambda made: Answer(content=views.cluster(made, ())))
        spec = ClusterSpec(
            name=body.name, description=body.description, version=body.version,
            master_endpoint=body.master_endpoint,
        )  # fmt: skip
        return view(await self._clusters.create(spec, actor=actor(call)))

    async def show(self, call: BoardCall) -> Answer[Json]:
        return Answer(content=self._shown(self._cluster(call)))

    async def change(self, call: BoardCall) -> Answer[Json]:
        changes = given(call.body)
        state = changes.pop("status", None)
        changed = await self._clusters.update(number_in(call), actor=actor(call), state=state, **changes)
        return Answer(content=self._shown(changed))

    async def delete(self, call: BoardCall) -> Answer[None]:
        await self._clusters.delete(number_in(call), actor=actor(call))
        return Answer(content=None)

    async def status(self, call: BoardCall) -> Answer[str]:
        return Answer(content=views.cluster_state(self._cluster(call)))

    async def members(self, call: BoardCall) -> Answer[Json]:
        number = number_of(self._cluster(call))
        nodes = [self._show(board) for board in self._boards.in_cluster(number)]
        return Answer(content={"nodes": nodes, "count": len(nodes), "cluster_id": number})

    async def add(self, call: BoardCall) -> Answer[Json]:
        body: MemberBody = call.body
        cluster = self._cluster(call)
        facts = Facts(cluster_id=number_of(cluster))
        board = await self._boards.update(body.node_id, facts, actor=actor(call))
        return Answer(content={"data": self._show(board)})

    async def remove(self, call: BoardCall) -> Answer[None]:
        number, cluster = number_in(call, "node"), number_of(self._cluster(call))
        if self._boards.require(number, field="node").spec.cluster_id != cluster:
            raise NotFound(f"board {number} does not belong to cluster {cluster}", field="node")
        await self._boards.update(number, Facts(cluster_id=0), actor=actor(call))
        return Answer(content=None)

    def _cluster(self, call: BoardCall) -> Cluster:
        return self._clusters.require(number_in(call))

    def _shown(self, cluster: Cluster) -> Json:
        members = self._boards.in_cluster(number_of(cluster))
        return views.cluster(cluster, (self._show(board) for board in members))
