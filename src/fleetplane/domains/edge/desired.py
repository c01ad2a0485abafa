"""Groups and configuration layers as objects of the resource API: what people write. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fleetplane.domains.edge import access
from fleetplane.domains.edge.kinds import EDGE_NODE, check_tenant, tenant_of, tenant_scope
from fleetplane.domains.edge.nodes import config_layers, groups
from fleetplane.domains.edge.nodes.config_layers import (
    CONFIG_LAYER,
    GLOBAL,
    TENANT,
    ConfigLayer,
    LayerPlace,
)
from fleetplane.domains.edge.nodes.groups import EDGE_GROUP, EdgeGroup, GroupSpec
from fleetplane.domains.edge.resources import MIRROR
from fleetplane.domains.edge.runs import selectors
from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.declaration import (
    Column,
    PublicResource,
    ResourceShape,
    ResourceView,
    ViewReader,
    Writable,
    WriteCall,
)
from fleetplane.kernel.access import who
from fleetplane.kernel.errors import InvalidArgument, NotFound, PermissionDenied
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.store import Draft

_NAME_CLAIM = "name"
_NODE = "node/"


def tenant_in(scope: str) -> str:
    """The tenant that a scope of the API is; raises for one that is none."""
    parts = scope.split("/")
    if len(parts) != 3 or parts[1] != scopes.TENANTS:
        raise InvalidArgument(f"{scope} is no tenant", field="scope", hint="write /tenants/NAME")
    return check_tenant(parts[2], field="scope")


# Groups.


def find_group(_domain: object, draft: Draft, scope: str, name: str) -> EdgeGroup | None:
    """By what it is called."""
    at = tenant_scope(tenant_in(scope))
    owner = draft.claimed_by(EDGE_GROUP, at, _NAME_CLAIM, name)
    return None if owner is None else draft.get(EDGE_GROUP, at, owner)


def put_group(call: WriteCall) -> EdgeGroup:
    """Create a group, or replace what it selects and pins."""
    scope = tenant_scope(tenant_in(call.scope))
    selector = MIRROR.stored(call.spec.selector)
    if selector is not None:
        selector = selectors.from_json(selectors.to_json(selector))  # with the checks of every selector
    pinned = tuple(call.spec.pinned_members)
    if call.stored is None:
        spec = GroupSpec(
            name=call.name,
            selector=selector,
            pinned_members=pinned,
            created_by=who(call.actor),
            created_at_ns=call.draft.now_ns,
        )
        return groups.make_group(call.draft, scope, call.new_id(), spec)

    def changed(before: GroupSpec) -> GroupSpec:
        return msgspec.structs.replace(before, selector=selector, pinned_members=pinned)

    return groups.change_group(call.draft, scope, call.stored.name, changed)


def delete_group(call: WriteCall) -> None:
    """Delete a group; its daemons stay."""
    assert call.stored is not None
    groups.remove_group(call.draft, call.stored.scope, call.stored.name)


# Configuration layers.


class EdgeConfigSpecView(ResourceShape, frozen=True, forbid_unknown_fields=True):
    config: dict[str, Any]
    """The layer: laid over those of everyone and of the tenant, key by key. Secrets are masked (`***`)."""


class EdgeConfigStatusView(ResourceShape, frozen=True):
    version: str
    """The digest of this layer alone."""
    set_by: str


def layer_view(
    layer: ConfigLayer, _reading: ViewReader
) -> ResourceView[EdgeConfigSpecView, EdgeConfigStatusView]:
    """What is shown of a layer."""
    spec = layer.spec
    return ResourceView(
        spec=EdgeConfigSpecView(config=config_layers.shown(spec.content)),
        status=EdgeConfigStatusView(version=spec.version, set_by=who(spec.set_by)),
    )


def layer_name(layer: AnyResource, _reading: ViewReader) -> str:
    """`global`, `tenant`, or the id of a daemon."""
    return str(layer.name.removeprefix(_NODE))


def layer_place(layer: AnyResource, _reading: ViewReader) -> str:
    """A layer of everyone, and of a node without a tenant, lies at the installation."""
    return scopes.tenant_path(tenant_of(layer.scope)) if layer.scope else scopes.ROOT


def _layer_place(scope: str, name: str) -> LayerPlace:
    tenant = "" if scope == scopes.ROOT else tenant_in(scope)
    whole = TENANT if tenant else GLOBAL
    return LayerPlace(tenant=tenant, node_id="" if name == whole else name.lower())


def find_layer(_domain: object, draft: Draft, scope: str, name: str) -> ConfigLayer | None:
    """By the daemon's id, or `tenant` or `global`."""
    _, at, stored = _layer_place(scope, name).key
    return draft.get(CONFIG_LAYER, at, stored)


def put_layer(call: WriteCall) -> ConfigLayer:
    """Replace a whole layer."""
    given: EdgeConfigSpecView = call.spec
    place = _layer_place(call.scope, call.name)
    _require_everyone(call, place)
    if call.stored is None and place.node_id:
        at = tenant_scope(place.tenant) if place.tenant else ""
        if call.draft.get(EDGE_NODE, at, place.node_id) is None:
            raise NotFound(
                f"there is no daemon {place.node_id!r} in {call.scope}",
                field="name",
                hint=f"a layer is called by the id of a daemon, or {TENANT if place.tenant else GLOBAL}",
            )
    return config_layers.put_layer(call.draft, place, given.config, actor=call.actor)


def delete_layer(call: WriteCall) -> None:
    """Delete a layer; those below it show through again."""
    place = _layer_place(call.scope, call.name)
    _require_everyone(call, place)
    config_layers.remove_layer(call.draft, place)


def _require_everyone(call: WriteCall, place: LayerPlace) -> None:
    if not place.tenant and not call.may(access.CLUSTER):
        raise PermissionDenied(
            "the configuration of everyone concerns all tenants",
            hint="have a role bound that includes it",
            details={"permission": access.CLUSTER},
        )


def layer_disturbs(
    _before: AnyResource | None, after: AnyResource | None, reading: ViewReader
) -> Sequence[str]:
    """How many daemons are sent another configuration."""
    layer = after or _before
    assert layer is not None
    if layer.name.startswith(_NODE):
        return ("the daemon is sent a new configuration",)
    count = len(reading.list(EDGE_NODE, layer.scope))
    return (f"{count} daemons are sent a new configuration",) if count else ()


EDGE_CONFIGS = PublicResource(
    name="edge-config",
    plural="edge-configs",
    short=("ec",),
    summary="A configuration layer of edge daemons: of everyone, of a tenant, or of one daemon",
    kind=CONFIG_LAYER,
    spec=EdgeConfigSpecView,
    status=EdgeConfigStatusView,
    view=layer_view,
    place=layer_place,
    named=layer_name,
    permission=access.HOSTS_READ,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="SCOPE", value=".metadata.scope"),
        Column(title="VERSION", value=".status.version", wide=True),
        Column(title="SET-BY", value=".status.setBy"),
        Column(title="AGE", value=".metadata.createdAt", type="age"),
    ),
)
WRITERS: Mapping[str, Writable] = {
    "edge-group": Writable(
        anywhere=True,
        permission=access.GROUPS_WRITE,
        find=find_group,
        put=put_group,
        delete=delete_group,
        rank=30,
    ),
    "edge-config": Writable(
        anywhere=True,
        permission=access.HOSTS_WRITE,
        find=find_layer,
        put=put_layer,
        delete=delete_layer,
        rank=31,
        exported=lambda stored: not stored.name.startswith(_NODE),
        disturbs=layer_disturbs,
    ),
}
DESIRED = (EDGE_CONFIGS,)
