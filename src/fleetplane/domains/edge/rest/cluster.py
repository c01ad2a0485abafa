"""REST: workers and their tokens, revoking a tenant, and layers of configuration.

All but the configuration of a tenant and of its daemons is refused to operators whose token is of one
tenant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from fleetplane.domains.edge.access import CLUSTER, HOSTS_READ, HOSTS_WRITE, require_everyone
from fleetplane.domains.edge.kinds import Worker, WorkerRole, check_tenant, tenant_scope
from fleetplane.domains.edge.nodes.config_layers import ConfigLayers, LayerPlace, shown
from fleetplane.domains.edge.nodes.registry import Nodes
from fleetplane.domains.edge.rest.common import CREATED, NO_CONTENT, EdgeCall, actor, tenant
from fleetplane.domains.edge.rest.shapes import (
    IssuedWorkerToken,
    RevokedTenant,
    ShownConfig,
    ShownLayer,
    ShownWorker,
    WorkerPage,
)
from fleetplane.domains.edge.workers.admission import WorkerAdmission
from fleetplane.domains.edge.workers.registry import EdgeWorkers
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.values.ids import check_uuid
from fleetplane.kernel.values.times import spelled, spelled_or_null
from fleetplane.web.rest.bodies import NULL, foreign
from fleetplane.web.rest.pages import BY_CURSOR, CursorPage, cursor_page
from fleetplane.web.rest.routes import Answer, Route, RouteGroup

_TENANT, _NODE = "/config", "/hosts/{node_id}/config"
_ROUTES = RouteGroup("Configuration")


class ConfigRoutes:
    def __init__(
        self, *, layers: ConfigLayers, nodes: Nodes, may_write: Callable[[EdgeCall, str], bool]
    ) -> None:
        """`may_write` tells whether a caller may write layers at a scope, and so reads secrets in them."""
        self._may_write = may_write
        self._layers = layers
        self._nodes = nodes

    def routes(self) -> Sequence[Route]:
        return (*self._at(_TENANT, "all of a tenant's daemons"), *self._at(_NODE, "one daemon"))

    def _at(self, path: str, whose: str) -> Sequence[Route]:
        return (
            _ROUTES.get(
                path,
                self.show,
                HOSTS_READ,
                summary=f"Get the configuration layer of {whose}, and the merged result of all layers",
                shares_handler=True,
            ),
            _ROUTES.put(
                path,
                self.put,
                HOSTS_WRITE,
                summary=f"Replace the configuration layer of {whose}",
                body=dict[str, Any],
                shares_handler=True,
            ),
            _ROUTES.delete(
                path,
                self.remove,
                HOSTS_WRITE,
                summary=f"Delete the configuration layer of {whose}",
                status=NO_CONTENT,
                shares_handler=True,
            ),
        )

    async def show(self, call: EdgeCall) -> Answer[ShownConfig]:
        return Answer(content=self._shown(self._place(call), call))

    async def put(self, call: EdgeCall) -> Answer[ShownConfig]:
        place = self._place(call)
        await self._layers.put(place, call.body, actor=actor(call))
        return Answer(content=self._shown(place, call))

    async def remove(self, call: EdgeCall) -> Answer[None]:
        await self._layers.remove(self._place(call), actor=actor(call))
        return Answer(content=None)

    def _place(self, call: EdgeCall) -> LayerPlace:
        """Where the layer stands; another tenant's daemon is not there."""
        of, node_id = tenant(call), call.path.get("node_id", "").lower()
        return LayerPlace(tenant=of, node_id=self._nodes.get(of, node_id).name if node_id else "")

    def _shown(self, place: LayerPlace, call: EdgeCall) -> ShownConfig:
        told = foreign if self._may_write(call, tenant_scope(place.tenant)) else _masked
        layer = self._layers.get(place)
        merged = self._layers.merged(place.tenant, place.node_id)
        applied = None
        if place.node_id:
            status = self._nodes.get(place.tenant, place.node_id).status
            applied = status.config_version or None if status is not None else None
        return ShownConfig(
            layer=told(layer.spec.content) if layer is not None else NULL,
            set_by=layer.spec.set_by if layer is not None else None,
            merged=told(merged.content) if merged is not None else NULL,
            version=merged.version if merged is not None else None,
            applied_version=applied,
            acknowledged=applied is not None and merged is not None and applied == merged.version,
        )


def _masked(content: bytes) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(shown(content)))


TOKEN_SECONDS = 3600.0
_WORKERS = RouteGroup("Workers")
_CONFIG = RouteGroup("Configuration")
_TENANTS = RouteGroup("Tenants")
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
        workers: EdgeWorkers,
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
            _WORKERS.post("/worker-tokens", self.issue, CLUSTER, status=CREATED, body=WorkerTokenBody),
            _WORKERS.get("/workers", self.list, CLUSTER, answer=WorkerPage, query=BY_CURSOR),
            _WORKERS.post("/workers/{worker_id}/state", self.steer, CLUSTER, body=WorkerStateBody),
        )

    def _config_routes(self) -> Sequence[Route]:
        return (
            _CONFIG.get(_GLOBAL, self.config, CLUSTER),
            _CONFIG.put(_GLOBAL, self.put, CLUSTER, body=dict[str, Any]),
            _CONFIG.delete(_GLOBAL, self.remove, CLUSTER, status=NO_CONTENT),
        )

    def _tenant_routes(self) -> Sequence[Route]:
        return (_TENANTS.post("/tenants/{tenant_id}/revoke", self.revoke, CLUSTER, body=RevokeBody),)

    # Workers.

    async def issue(self, call: EdgeCall) -> Answer[IssuedWorkerToken]:
        """Create a single-use join token for a worker, with its role and tenants."""
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
        """List workers."""
        require_everyone(call.caller)
        return Answer(content=cursor_page(call, self._workers.peers(), self._shown))

    async def steer(self, call: EdgeCall) -> Answer[ShownWorker]:
        """Change a worker's state: drain it or make it active."""
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
        """Get the global configuration layer."""
        require_everyone(call.caller)
        return Answer(content=self._layer())

    async def put(self, call: EdgeCall) -> Answer[ShownLayer]:
        """Replace the global configuration layer."""
        require_everyone(call.caller)
        await self._layers.put(LayerPlace(), call.body, actor=actor(call))
        return Answer(content=self._layer())

    async def remove(self, call: EdgeCall) -> Answer[None]:
        """Delete the global configuration layer."""
        require_everyone(call.caller)
        await self._layers.remove(LayerPlace(), actor=actor(call))
        return Answer(content=None)

    def _layer(self) -> ShownLayer:
        layer = self._layers.get(LayerPlace())
        return ShownLayer(
            layer=foreign(layer.spec.content) if layer is not None else NULL,
            set_by=layer.spec.set_by if layer is not None else None,
            version=layer.spec.version if layer is not None else None,
        )

    # Tenants.

    async def revoke(self, call: EdgeCall) -> Answer[RevokedTenant]:
        """Revoke all daemons of a tenant, in one transaction."""
        require_everyone(call.caller)
        body: RevokeBody = call.body
        tenant = check_tenant(call.path["tenant_id"], field="tenant_id")
        number = await self._nodes.revoke_tenant(tenant, reason=body.reason, actor=actor(call))
        return Answer(content=RevokedTenant(tenant_id=tenant, revoked=number))
