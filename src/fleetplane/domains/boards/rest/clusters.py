"""REST: clusters, their nodes, and the secrets of provisioning.

SSH credentials are written and never read. Join token and kubeconfig of a cluster are shown to administrators
only; each disclosure is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.boards.access import ADMINISTER, OPERATE, READ
from fleetplane.domains.boards.inventory.boards import Boards
from fleetplane.domains.boards.inventory.clusters import Clusters
from fleetplane.domains.boards.kinds import Board, Cluster, ClusterSpec, ClusterState, number_of
from fleetplane.domains.boards.provisioning.secrets import (
    ClusterSecrets,
    Disclosures,
    SshCredential,
    SshCredentials,
    check_name,
)
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
    provisioning_envelope,
)
from fleetplane.domains.boards.rest.shapes.people import (
    ClusterToken,
    CredentialName,
    CredentialNames,
    KeptCredential,
    Kubeconfig,
)
from fleetplane.domains.boards.rest.views import (
    ClusterNodes,
    ClusterRows,
    NodeData,
    ShownCluster,
    ShownNode,
)
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.kernel.errors import FailedPrecondition, NotFound
from fleetplane.web.rest.routes import Answer, Route, RouteGroup

_SECRETS_ROUTES = RouteGroup("Credentials")
_TOKEN_FAILED, _KUBECONFIG_FAILED = "TOKEN_RETRIEVAL_FAILED", "KUBECONFIG_RETRIEVAL_FAILED"


class CredentialBody(msgspec.Struct, forbid_unknown_fields=True):
    known_hosts: str
    username: str = "pi"
    port: int = 22
    private_key: str = ""
    password: str = ""


@dataclass(kw_only=True, slots=True, eq=False, repr=False)
class SecretRoutes:
    boards: Boards
    credentials: SshCredentials
    secrets: ClusterSecrets
    disclosures: Disclosures

    def routes(self) -> Sequence[Route]:
        return (
            _SECRETS_ROUTES.get("/credentials", self.list, ADMINISTER),
            _SECRETS_ROUTES.put("/credentials/{name}", self.put, ADMINISTER, body=CredentialBody),
            _SECRETS_ROUTES.delete("/credentials/{name}", self.delete, ADMINISTER, status=NO_CONTENT),
            *(
                _SECRETS_ROUTES.post(
                    path,
                    handler,
                    ADMINISTER,
                    summary=summary,
                    answer=shape,
                    envelope=provisioning_envelope(failure),
                    streams=True,  # so that no copy of the answer is kept for a repeated request
                )
                for path, handler, summary, shape, failure in (
                    (
                        "/clusters/{id}/cluster-token",
                        self.token,
                        "Get a cluster's join token",
                        ClusterToken,
                        _TOKEN_FAILED,
                    ),
                    (
                        "/nodes/{id}/cluster-token",
                        self.token_of_node,
                        "Get the join token of a node's cluster",
                        ClusterToken,
                        _TOKEN_FAILED,
                    ),
                    (
                        "/clusters/{id}/kubeconfig",
                        self.kubeconfig,
                        "Get a cluster's kubeconfig",
                        Kubeconfig,
                        _KUBECONFIG_FAILED,
                    ),
                    (
                        "/nodes/{id}/kubeconfig",
                        self.kubeconfig_of_node,
                        "Get the kubeconfig of a node's cluster",
                        Kubeconfig,
                        _KUBECONFIG_FAILED,
                    ),
                )
            ),
        )

    async def list(self, _call: BoardCall) -> Answer[CredentialNames]:
        """List stored SSH credentials, by name."""
        names = await self.credentials.names()
        return Answer(
            content=CredentialNames(
                credentials=[CredentialName(name=name) for name in names], count=len(names)
            )
        )

    async def put(self, call: BoardCall) -> Answer[KeptCredential]:
        """Store an SSH credential; it is never returned."""
        body: CredentialBody = call.body
        name = check_name(call.path["name"])
        credential = SshCredential(
            user=body.username,
            port=body.port,
            private_key=body.private_key,
            password=body.password,
            known_hosts=body.known_hosts,
        )
        await self.credentials.put(name, credential, actor=actor(call))
        return Answer(content=KeptCredential(name=name, message="kept"))

    async def delete(self, call: BoardCall) -> Answer[None]:
        """Delete an SSH credential."""
        await self.credentials.delete(call.path["name"], actor=actor(call))
        return Answer(content=None)

    async def token(self, call: BoardCall) -> Answer[ClusterToken]:
        return await self._show_token(call, number_in(call))

    async def token_of_node(self, call: BoardCall) -> Answer[ClusterToken]:
        return await self._show_token(call, self._cluster_of(number_in(call)))

    async def kubeconfig(self, call: BoardCall) -> Answer[Kubeconfig]:
        return await self._show_kubeconfig(call, number_in(call))

    async def kubeconfig_of_node(self, call: BoardCall) -> Answer[Kubeconfig]:
        return await self._show_kubeconfig(call, self._cluster_of(number_in(call)))

    async def _show_token(self, call: BoardCall, cluster: int) -> Answer[ClusterToken]:
        await self.disclosures.note(cluster, "cluster_token", actor=call.caller.name)
        return Answer(content=ClusterToken(cluster_token=await self.secrets.token(cluster)))

    async def _show_kubeconfig(self, call: BoardCall, cluster: int) -> Answer[Kubeconfig]:
        await self.disclosures.note(cluster, "kubeconfig", actor=call.caller.name)
        return Answer(content=Kubeconfig(kubeconfig=await self.secrets.kubeconfig(cluster)))

    def _cluster_of(self, board: int) -> int:
        cluster = self.boards.require(board).spec.cluster_id
        if cluster is None:
            raise FailedPrecondition(f"board {board} belongs to no cluster")
        return cluster


_ONE = "/clusters/{id}"
_ROUTES = RouteGroup("Clusters")


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
            _ROUTES.get("/clusters", self.list, READ, query=PAGING),
            _ROUTES.post("/clusters", self.create, OPERATE, body=ClusterBody, status=CREATED),
            _ROUTES.get(_ONE, self.show, READ),
            _ROUTES.put(_ONE, self.change, OPERATE, body=ClusterPatch),
            _ROUTES.delete(_ONE, self.delete, ADMINISTER, status=NO_CONTENT),
            _ROUTES.get(f"{_ONE}/status", self.status, READ),
        )

    def _member_routes(self) -> Sequence[Route]:
        return (
            _ROUTES.get(f"{_ONE}/nodes", self.members, READ),
            _ROUTES.post(f"{_ONE}/nodes", self.add, OPERATE, body=MemberBody),
            _ROUTES.delete(f"{_ONE}/nodes/{{node}}", self.remove, OPERATE, status=NO_CONTENT),
        )

    async def list(self, call: BoardCall) -> Answer[ClusterRows]:
        """List clusters."""
        found = self._clusters.all()
        return Answer(content=listed(call, found, views.cluster, ClusterRows))

    async def create(self, call: BoardCall) -> Answer[ShownCluster]:
        """Create a cluster."""
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
        """Get a cluster, with its boards."""
        return Answer(content=self._shown(self._cluster(call)))

    async def change(self, call: BoardCall) -> Answer[ShownCluster]:
        """Change a cluster; omitted fields keep their values."""
        said = changes(call.body)
        state = said.pop("status", None)
        changed = await self._clusters.update(number_in(call), actor=actor(call), state=state, **said)
        return Answer(content=self._shown(changed))

    async def delete(self, call: BoardCall) -> Answer[None]:
        """Delete a cluster that has no boards; one that does not exist is deleted already."""
        with suppress(NotFound):
            await self._clusters.delete(number_in(call), actor=actor(call))
        return Answer(content=None)

    async def status(self, call: BoardCall) -> Answer[ClusterState]:
        """Get a cluster's status, in one word."""
        return Answer(content=views.cluster_state(self._cluster(call)))

    async def members(self, call: BoardCall) -> Answer[ClusterNodes]:
        """List the boards of a cluster."""
        number = number_of(self._cluster(call))
        nodes = [self._show(board) for board in self._boards.in_cluster(number)]
        return Answer(content=ClusterNodes(nodes=nodes, count=len(nodes), cluster_id=number))

    async def add(self, call: BoardCall) -> Answer[NodeData]:
        """Add a board to a cluster."""
        body: MemberBody = call.body
        cluster = self._cluster(call)
        facts = BoardFacts(cluster_id=number_of(cluster))
        board = await self._boards.update(body.node_id, facts, actor=actor(call))
        return Answer(content=NodeData(data=self._show(board)))

    async def remove(self, call: BoardCall) -> Answer[None]:
        """Remove a board from a cluster."""
        number, cluster = number_in(call, "node"), number_of(self._cluster(call))
        if self._boards.require(number, field="node").spec.cluster_id != cluster:
            raise NotFound(f"board {number} does not belong to cluster {cluster}", field="node")
        await self._boards.update(number, BoardFacts(cluster_id=0), actor=actor(call))
        return Answer(content=None)

    def _cluster(self, call: BoardCall) -> Cluster:
        return self._clusters.require(number_in(call))

    def _shown(self, cluster: Cluster) -> ShownCluster:
        members = self._boards.in_cluster(number_of(cluster))
        return views.cluster(cluster, (self._show(board) for board in members))
