"""`/apis/v1`: the resource API of `fleet/resources` for every domain of this server, mounted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from fleetplane.fleet.explain import FleetExplanations
from fleetplane.fleet.feeds.ring import RING_EVENTS
from fleetplane.fleet.feeds.state_events import StateEvents
from fleetplane.fleet.freeze import FreezeSwitch
from fleetplane.fleet.people.door import Authenticators
from fleetplane.fleet.plans.plans import Plans
from fleetplane.fleet.plans.rest import PlanRoutes
from fleetplane.fleet.plans.verbs import WritingRoutes
from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.access import ApiDoor, ApiGate, BoundDoor
from fleetplane.fleet.resources.catalogue import Catalogue, CatalogueMember
from fleetplane.fleet.resources.changes import ChangeRing
from fleetplane.fleet.resources.computed import ComputedObservations
from fleetplane.fleet.resources.measuring import Measurements
from fleetplane.fleet.resources.rest import PREFIX, ResourceRoutes
from fleetplane.fleet.resources.watching import Watching
from fleetplane.kernel.access import Grant, Role
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.telemetry import Telemetry
from fleetplane.web.apis import problems
from fleetplane.web.apis.scope_paths import ScopePaths
from fleetplane.web.ops import Mount
from fleetplane.web.rest.family import FamilyErrors, FamilyKernel, FamilyText, RestFamily

ERRORS = FamilyErrors(
    envelope=problems.problem,
    shape=problems.ProblemDetails,
    content_type=problems.CONTENT_TYPE,
    rejected="400",
)
DESCRIPTION = """Every kind of thing that this server looks after, in one shape.

A scope may also stand in the path, before the resource: `/apis/v1/scopes/tenants/acme/instances` is
`/apis/v1/instances?scope=/tenants/acme`."""


class ApiKernel(FamilyKernel, Protocol):
    """The parts of the kernel that the resource API and `/v1/fleet` use."""

    @property
    def telemetry(self) -> Telemetry | None: ...

    @property
    def door(self) -> Authenticators: ...


class ResourceApi:
    def __init__(
        self,
        kernel: ApiKernel,
        members: Iterable[CatalogueMember],
        grants: Iterable[Mapping[Role, Iterable[Grant]]],
        *,
        version: str,
        explanations: FleetExplanations,
        switch: FreezeSwitch,
        door: ApiDoor | None = None,
        ring_events: int = RING_EVENTS,
    ) -> None:
        """`members` are the resources of every running domain, `grants` what roles of each allow."""
        self.door = door or BoundDoor(kernel.door, grants)
        members, states = tuple(members), StateEvents()
        self.catalogue = Catalogue((*members, *states.members(members)))
        self.changes = ChangeRing(kernel.store, self.catalogue, states=states, ring_events=ring_events)
        self.observations = ComputedObservations(kernel.store, self.catalogue)
        measurements = Measurements(kernel.store, self.catalogue, kernel.telemetry)
        self.watching = Watching(kernel.store, self.changes, self.observations, measurements)
        self._routes = ResourceRoutes(
            kernel.store,
            self.catalogue,
            self.door,
            self.watching,
            clock=kernel.clock,
            explanations=explanations,
            switch=switch,
        )
        self.plans = Plans(kernel.store, kernel.clock, kernel.master, self.catalogue)
        writing = WritingRoutes(kernel.store, kernel.clock, self.catalogue, self.door)
        planning = PlanRoutes(kernel.store, kernel.clock, self.catalogue, self.door, self.plans)
        self._family = RestFamily(
            kernel,
            self._routes.table((*writing.routes(), *planning.routes())),
            ApiGate(self.door),
            domain="apis",
            sweeps=(self.plans.sweep,),
            errors=ERRORS,
            text=FamilyText(
                title="Fleetplane resources",
                version=version,
                description=DESCRIPTION,
                summary="REST: every resource of every domain",
            ),
        )

    def __repr__(self) -> str:
        return f"<ResourceApi {self.catalogue!r}>"

    @property
    def routes(self) -> Iterable[Mount]:
        """The routes, with scopes in paths understood, and the document."""
        served, document = self._family.mounts
        app = ScopePaths(served.app, PREFIX, scopes.PLACES)
        return (replace(served, app=app), document)

    async def take_over(self) -> None:
        await self._family.take_over()

    async def run_here(self) -> None:
        """Follow the store for watches, until cancelled."""
        async with Boundary() as following:
            following.keep("fleetwide/changes", self.changes.run)
            following.once("fleetwide/state-events", self.changes.recall)
            following.keep("fleetwide/observations", self.observations.run)

    async def run_active(self) -> None:
        """Sweep, until cancelled."""
        await self._family.run_active()
