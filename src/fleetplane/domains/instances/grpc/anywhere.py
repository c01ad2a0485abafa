"""Agents of instances on any of several servers that share a database.

The three streams of one agent may lie on three servers. What each of them needs to know of the others is
followed in the store: keys that have come, reports, and who has left. On a database file none of this runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fleetplane.domains.instances.grpc.agents import REPORTS, InstanceAgentService
from fleetplane.domains.instances.kinds import PUBLIC_KEY, Instance
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.records.reports import InstanceReports
from fleetplane.kernel.boundary import Boundary, contained
from fleetplane.kernel.presence import PRESENCE, PresenceRegistry
from fleetplane.kernel.store import Store, follow

PLACES = "instances"
"""The channel of the streams of agents."""
Went = Callable[[Instance], None]


class AgentsAnywhere:
    def __init__(
        self,
        store: Store,
        instances: Instances,
        reports: InstanceReports,
        agents: InstanceAgentService,
        places: PresenceRegistry,
    ) -> None:
        self._store = store
        self._instances = instances
        self._reports = reports
        self._agents = agents
        self._places = places

    def __repr__(self) -> str:
        return f"<AgentsAnywhere {self._places!r}>"

    async def run_here(self) -> None:
        """What every server does, until cancelled."""
        async with Boundary() as tasks:
            tasks.keep("instances/places", self._places.run_here)
            tasks.keep("instances/reports", self._reports.run)
            tasks.keep("instances/reported", partial(self._reports.follow, self._agents.reported_anywhere))
            tasks.keep("instances/keys", self._follow_keys)

    async def run_for_all(self, went: Went) -> None:
        """What the active server does: `went` is told of agents that have left, wherever they were."""

        async def server_went(place: str, _number: int) -> None:
            self._left(place, went)

        async with Boundary() as tasks:
            tasks.keep("instances/servers-gone", partial(self._places.run_for_all, server_went))
            tasks.keep("instances/departures", partial(self._follow_departures, went))

    async def _follow_keys(self) -> None:
        async for batch in follow(self._store, PUBLIC_KEY):
            for event in batch.events:
                with contained("instances/keys", about=event.resource.name):
                    self._agents.keys_came(event.resource.spec.instance)

    async def _follow_departures(self, went: Went) -> None:
        async for batch in follow(self._store, PRESENCE, PLACES):
            for event in batch.events:
                if not event.resource.spec.is_open:
                    with contained("instances/departures", about=event.resource.name):
                        self._left(event.resource.name, went)

    def _left(self, place: str, went: Went) -> None:
        name, _, stream = place.rpartition("/")
        tenant = self._instances.tenant_of(name)
        instance = self._instances.find(tenant, name) if tenant is not None else None
        if instance is not None and stream == REPORTS:
            went(instance)
