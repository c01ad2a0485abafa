"""REST: what concerns all tenants: workers and their tokens, the configuration of everyone, a tenant's end.

Only operators whose token is of no tenant may ask for any of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fleetplane.domains.edge.access import CLUSTER, require_everyone
from fleetplane.domains.edge.kinds import Worker, WorkerRole, check_tenant
from fleetplane.domains.edge.nodes.config_layers import ConfigLayers, Place
from fleetplane.domains.edge.nodes.registry import Nodes
from fleetplane.domains.edge.rest.common import CREATED, NO_CONTENT, EdgeCall, actor
from fleetplane.domains.edge.rest.shapes import (
    IssuedWorkerToken,
    RevokedTenant,
    ShownLayer,
    ShownWorker,
    WorkerPage,
)
from fleetplane.domains.edge.workers.admission import WorkerAdmission
from fleetplane.domains.edge.workers.registry import Workers
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.values.ids import check_uuid
from fleetplane.kernel.values.times import spelled, spelled_or_null
from fleetplane.rpc import Needs
from fleetplane.web.rest.pages import BY_CURSOR, CursorPage, cursor_page
from fleetplane.web.rest.routes import Answer, Route
from fleetplane.web.rest.values import NULL, foreign

TOKEN_SECONDS = 3600.0
_WORKERS, _CONFIG, _TENANTS = "Workers", "Configuration", "Tenants"
_GLOBAL = "/config/global"


class WorkerTokenBody(msgspec.Struct, forbid_unknown_fields=True):
    node_id: str
    role: WorkerRole = WorkerRole.WORKER
    tenants: list[str] = []
    """Tenants that the worker acts for; `*` for all."""
    ttl_seconds: float = TOKEN_SECONDS


class WorkerStateBody(msgspec.Struct, forbid_unknown_fields=True):
    draining: bool


class RevokeBody(msgspec.Struct, forbid_unknown_fields=True):
    reason: str = "the tenant was closed"


class ClusterRoutes:
    def __init__(
        self,
        clock: Clock,
        *,
        workers: Workers,
        admission: WorkerAdmission,
        layers: ConfigLayers,
        nodes: Nodes,
    ) -> None:
        self._clock = clock
        self._workers = workers
        self._admission = admission
        self._layers = layers
        self._nodes = nodes

    def routes(self) -> Sequence[Route]:
        return (*self._worker_routes(), *self._config_routes(), *self._tenant_routes())

    def _worker_routes(self) -> Sequence[Route]:
        return (
            Route(
                method="POST",
                path="/worker-tokens",
                handler=self.issue,
                needs=Needs.WRITES,
                tag=_WORKERS,
                status=CREATED,
                summary="Create a single-use join token for a worker, with its role and tenants",
                permission=CLUSTER,
                body=WorkerTokenBody,
                answer=IssuedWorkerToken,
            ),
            Route(
                method="GET",
                path="/workers",
                handler=self.list,
                needs=Needs.STORE,
                tag=_WORKERS,
                permission=CLUSTER,
                summary="List workers",
                answer=WorkerPage,
                query=BY_CURSOR,
            ),
            Route(
                method="POST",
                path="/workers/{worker_id}/state",
                handler=self.steer,
                needs=Needs.WRITES,
                tag=_WORKERS,
                summary="Change a worker's state: drain it or make it active",
                permission=CLUSTER,
                body=WorkerStateBody,
                answer=ShownWorker,
            ),
        )

    def _config_routes(self) -> Sequence[Route]:
        return (
            Route(
                method="GET",
                path=_GLOBAL,
                handler=self.config,
                needs=Needs.STORE,
                tag=_CONFIG,
                permission=CLUSTER,
                summary="Get the global configuration layer",
                answer=ShownLayer,
            ),
            Route(
                method="PUT",
                path=_GLOBAL,
                handler=self.put,
                needs=Needs.WRITES,
                tag=_CONFIG,
                permission=CLUSTER,
                summary="Replace the global configuration layer",
                body=dict[str, Any],
                answer=ShownLayer,
            ),
            Route(
                method="DELETE",
                path=_GLOBAL,
                handler=self.remove,
                needs=Needs.WRITES,
                tag=_CONFIG,
                permission=CLUSTER,
                summary="Delete the global configuration layer",
                status=NO_CONTENT,
            ),
        )

    def _tenant_routes(self) -> Sequence[Route]:
        return (
            Route(
                method="POST",
                path="/tenants/{tenant_id}/revoke",
                handler=self.revoke,
                needs=Needs.WRITES,
                tag=_TENANTS,
                summary="Revoke all daemons of a tenant, in one transaction",
                permission=CLUSTER,
                body=RevokeBody,
                answer=RevokedTenant,
            ),
        )

    # Workers.

    async def issue(self, call: EdgeCall) -> Answer[IssuedWorkerToken]:
        require_everyone(call.caller)
        body: WorkerTokenBody = call.body
        node_id = check_uuid(body.node_id, field="node_id")
        token = await self._admission.issue(
            node_id, role=body.role, tenants=body.tenants, life_seconds=body.ttl_seconds, actor=actor(call)
        )
        expires_at_ns = self._clock.now_ns() + round(body.ttl_seconds * 1e9)
        return Answer(
            content=IssuedWorkerToken(
                token=token,
                node_id=node_id,
                role=body.role,
                tenants=body.tenants,
                expires_at=spelled(expires_at_ns),
            )
        )

    async def list(self, call: EdgeCall) -> Answer[CursorPage[ShownWorker]]:
        require_everyone(call.caller)
        return Answer(content=cursor_page(call, self._workers.peers(), self._shown))

    async def steer(self, call: EdgeCall) -> Answer[ShownWorker]:
        require_everyone(call.caller)
        body: WorkerStateBody = call.body
        worker_id = call.path["worker_id"].lower()
        worker = await self._workers.set_draining(worker_id, body.draining, actor=actor(call))
        return Answer(content=self._shown(worker))

    def _shown(self, worker: Worker) -> ShownWorker:
        report = self._workers.report(worker)
        return ShownWorker(
            node_id=worker.name,
            role=worker.spec.role,
            tenants=list(worker.spec.tenants),
            status=self._workers.state(worker),
            draining=worker.spec.draining,
            grpc_address=worker.spec.grpc_address,
            tags=list(worker.spec.tags),
            last_heartbeat_at=spelled_or_null(report.at_ns if report is not None else None),
        )

    # The configuration of everyone.

    async def config(self, call: EdgeCall) -> Answer[ShownLayer]:
        require_everyone(call.caller)
        return Answer(content=self._layer())

    async def put(self, call: EdgeCall) -> Answer[ShownLayer]:
        require_everyone(call.caller)
        await self._layers.put(Place(), call.body, actor=actor(call))
        return Answer(content=self._layer())

    async def remove(self, call: EdgeCall) -> Answer[None]:
        require_everyone(call.caller)
        await self._layers.remove(Place(), actor=actor(call))
        return Answer(content=None)

    def _layer(self) -> ShownLayer:
        layer = self._layers.get(Place())
        return ShownLayer(
            layer=foreign(layer.spec.content) if layer is not None else NULL,
            set_by=layer.spec.set_by if layer is not None else None,
            version=layer.spec.version if layer is not None else None,
        )

    # Tenants.

    async def revoke(self, call: EdgeCall) -> Answer[RevokedTenant]:
        require_everyone(call.caller)
        body: RevokeBody = call.body
        tenant = check_tenant(call.path["tenant_id"], field="tenant_id")
        number = await self._nodes.revoke_tenant(tenant, reason=body.reason, actor=actor(call))
        return Answer(content=RevokedTenant(tenant_id=tenant, revoked=number))
