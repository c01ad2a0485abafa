"""REST of instances: `/v1/instances`, and the former page, which leads to the console."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from prometheus_client.registry import Collector

from fleetplane.domains.blueprint import Kernel
from fleetplane.domains.instances.access import GRANTS, TENANT_HEADER
from fleetplane.domains.instances.live.errors import ErrorFeed
from fleetplane.domains.instances.rest.overview import Overview
from fleetplane.domains.instances.rest.remote import RemoteCalls
from fleetplane.domains.instances.rest.routes import ViewRoutes
from fleetplane.rpc import Needs
from fleetplane.web.documents import moved_to
from fleetplane.web.ops import CONSOLE, Mount
from fleetplane.web.rest.family import FamilyText, RestFamily
from fleetplane.web.rest.gate import operator_gate
from fleetplane.web.rest.routes import RouteTable

PREFIX = "/v1/instances"
PAGE = f"{CONSOLE}/instances"


class InstanceRest:
    def __init__(
        self, kernel: Kernel, *, overview: Overview, errors: ErrorFeed, remote: RemoteCalls, version: str
    ) -> None:
        gate = operator_gate(kernel.door, GRANTS, tenant_headers=(TENANT_HEADER,))
        views = ViewRoutes(overview=overview, errors=errors, gate=gate)
        self.table = RouteTable(PREFIX, (*views.routes(), *remote.routes(gate)))
        gate.require_complete(self.table.permissions)
        self.family = RestFamily(
            kernel,
            self.table,
            gate,
            domain="instances",
            text=FamilyText(
                title="Fleetplane instances",
                version=version,
                description="Groups of machines and their instances: to look at, and what operators do.",
                summary="REST: groups and instances",
            ),
        )

    def __repr__(self) -> str:
        return f"<InstanceRest {PREFIX}>"

    @property
    def collectors(self) -> Sequence[Collector]:
        return self.family.collectors

    @cached_property
    def routes(self) -> Sequence[Mount]:
        # Browsers keep what stands behind `#`: an old link with a token signs in to the console.
        return *self.family.mounts, Mount(path=PAGE, app=moved_to(f"{CONSOLE}/"), needs=Needs.NOTHING)
