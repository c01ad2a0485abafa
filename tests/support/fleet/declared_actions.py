"""Carries out declared actions on what a rig runs, for a caller who may do everything."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from fleetplane.fleet.freeze import FreezeSwitch
from fleetplane.fleet.resources.access import Sight
from fleetplane.fleet.resources.acting import ActionAnswer, act
from fleetplane.fleet.resources.catalogue import Catalogue, CatalogueMember
from fleetplane.fleet.resources.declaration import AnyPublicResource
from fleetplane.kernel.access import Permission, Principal
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.store import Store
from fleetplane.web.rest.gate import OperatorCaller, PrincipalCaller
from fleetplane.web.rest.routes import Call, Headers

CALLER = OperatorCaller(principal=Principal(name="alice", roles=frozenset(), scope=""))


class OpenDoor:
    """Everybody may do everything, everywhere."""

    def authenticate(self, _headers: Headers) -> PrincipalCaller:
        return CALLER

    def granted(self, _caller: PrincipalCaller, _permission: Permission) -> Collection[str]:
        return ("/",)

    def bound(self, _caller: PrincipalCaller) -> Collection[str]:
        return ("/",)


async def carried_out(
    resource: AnyPublicResource,
    running: Any,
    store: Store,
    clock: Clock,
    name: str,
    action: str,
    body: Mapping[str, Any] | None = None,
) -> ActionAnswer:
    """Do a declared action to the object of that name, as a request would that is let in."""
    catalogue = Catalogue([CatalogueMember(resource=resource, domain="", running=running)])
    sight = Sight(OpenDoor(), CALLER)
    found = catalogue.named(resource.plural).find(store, name, "/", sight)
    declared = next(one for one in resource.actions if one.name == action)
    given = None if declared.body is None else msgspec.convert(body or {}, declared.body)
    switch = FreezeSwitch(store, clock, {})
    request: Call[Any] = Call(
        request_id="", address="", scope="", path={}, query={}, headers=Headers({}), body=given
    )
    return (await act(action, found, given, request=request, sight=sight, switch=switch)).content
