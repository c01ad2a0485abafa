"""REST: what daemons should be configured with, for a whole tenant and for one daemon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from fleetplane.domains.edge.access import HOSTS_READ, HOSTS_WRITE
from fleetplane.domains.edge.kinds import tenant_scope
from fleetplane.domains.edge.nodes.config_layers import ConfigLayers, LayerPlace, shown
from fleetplane.domains.edge.nodes.registry import Nodes
from fleetplane.domains.edge.rest.common import NO_CONTENT, EdgeCall, actor, tenant
from fleetplane.domains.edge.rest.shapes import ShownConfig
from fleetplane.web.rest.routes import Answer, Route, RouteGroup
from fleetplane.web.rest.values import NULL, foreign

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
