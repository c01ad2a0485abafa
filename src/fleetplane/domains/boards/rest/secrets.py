"""REST: what provisioning keeps sealed. Logins are written and never read; what clusters told is shown
to administrators only, and never without a trace."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetplane.domains.boards.access import ADMINISTER
from fleetplane.domains.boards.inventory.boards import Boards
from fleetplane.domains.boards.provisioning.credentials import SshCredential, SshCredentials, check_name
from fleetplane.domains.boards.provisioning.disclosures import Disclosures
from fleetplane.domains.boards.provisioning.secrets import ClusterSecrets
from fleetplane.domains.boards.rest.common import (
    NO_CONTENT,
    BoardCall,
    actor,
    number_in,
    provisioning_envelope,
)
from fleetplane.domains.boards.rest.shapes.work import (
    ClusterToken,
    CredentialName,
    CredentialNames,
    KeptCredential,
    Kubeconfig,
)
from fleetplane.kernel.errors import FailedPrecondition
from fleetplane.web.rest.routes import Answer, Route, RouteGroup

_ROUTES = RouteGroup("Credentials")
_TOKEN_FAILED, _KUBECONFIG_FAILED = "TOKEN_RETRIEVAL_FAILED", "KUBECONFIG_RETRIEVAL_FAILED"


class CredentialBody(msgspec.Struct, forbid_unknown_fields=True):
    known_hosts: str
    username: str = "pi"
    port: int = 22
    private_key: str = ""
    password: str = ""


class SecretRoutes:
    def __init__(
        self,
        *,
        boards: Boards,
        credentials: SshCredentials,
        secrets: ClusterSecrets,
        disclosures: Disclosures,
    ) -> None:
        self._boards = boards
        self._credentials = credentials
        self._secrets = secrets
        self._disclosures = disclosures

    def routes(self) -> Sequence[Route]:
        return (
            _ROUTES.get("/credentials", self.list, ADMINISTER),
            _ROUTES.put("/credentials/{name}", self.put, ADMINISTER, body=CredentialBody),
            _ROUTES.delete("/credentials/{name}", self.delete, ADMINISTER, status=NO_CONTENT),
            *(
                _ROUTES.post(
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
        names = await self._credentials.names()
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
        await self._credentials.put(name, credential, actor=actor(call))
        return Answer(content=KeptCredential(name=name, message="kept"))

    async def delete(self, call: BoardCall) -> Answer[None]:
        """Delete an SSH credential."""
        await self._credentials.delete(call.path["name"], actor=actor(call))
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
        await self._disclosures.note(cluster, "cluster_token", actor=call.caller.name)
        return Answer(content=ClusterToken(cluster_token=await self._secrets.token(cluster)))

    async def _show_kubeconfig(self, call: BoardCall, cluster: int) -> Answer[Kubeconfig]:
        await self._disclosures.note(cluster, "kubeconfig", actor=call.caller.name)
        return Answer(content=Kubeconfig(kubeconfig=await self._secrets.kubeconfig(cluster)))

    def _cluster_of(self, board: int) -> int:
        cluster = self._boards.require(board).spec.cluster_id
        if cluster is None:
            raise FailedPrecondition(f"board {board} belongs to no cluster")
        return cluster
