"""The REST half of the edge domain, composed: everything under `/v1/edge`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client.registry import Collector

from fleetplane.domains.edge.access import GRANTS, HOSTS_WRITE, PERMISSIONS, TENANT_HEADERS
from fleetplane.domains.edge.grpc.relay import Relay
from fleetplane.domains.edge.identity.enrolment_tokens import EnrolmentTokens
from fleetplane.domains.edge.nodes.config_layers import ConfigLayers
from fleetplane.domains.edge.nodes.groups import EdgeGroups
from fleetplane.domains.edge.nodes.registry import Nodes
from fleetplane.domains.edge.rest.cluster import ClusterRoutes, ConfigRoutes
from fleetplane.domains.edge.rest.common import BAD_REQUEST, EdgeCall, EdgeError, Manner, envelope
from fleetplane.domains.edge.rest.hosts import GroupRoutes, HostRoutes
from fleetplane.domains.edge.rest.runs import FleetRoutes
from fleetplane.domains.edge.runs.channel import EdgeRuns
from fleetplane.domains.edge.workers.admission import WorkerAdmission
from fleetplane.domains.edge.workers.registry import EdgeWorkers
from fleetplane.fleet.people.door import Authenticators
from fleetplane.kernel.access import covers
from fleetplane.web.ops import Mount
from fleetplane.web.rest.family import FamilyErrors, FamilyKernel, FamilyText, RestFamily
from fleetplane.web.rest.gate import operator_gate
from fleetplane.web.rest.routes import RouteTable

PREFIX = "/v1/edge"
ERRORS = FamilyErrors(envelope=envelope, shape=EdgeError, rejected=str(BAD_REQUEST), conditional=False)


class EdgeRest:
    def __init__(
        self,
        kernel: FamilyKernel,
        *,
        door: Authenticators,
        nodes: Nodes,
        enrollments: EnrolmentTokens,
        groups: EdgeGroups,
        layers: ConfigLayers,
        workers: EdgeWorkers,
        worker_admission: WorkerAdmission,
        relay: Relay | None = None,
        runs: EdgeRuns,
        heard_at_ns: Callable[[str], int | None],
        shipped_shapes: bool,
        deadline_seconds: float,
        version: str,
    ) -> None:
        clock = kernel.clock
        gate = operator_gate(door, GRANTS, tenant_headers=TENANT_HEADERS)
        gate.require_complete(PERMISSIONS)

        def may_write(call: EdgeCall, scope: str) -> bool:
            return any(covers(at, scope) for at in gate.scopes(call.caller, HOSTS_WRITE))

        manner = Manner(shipped=shipped_shapes)
        hosts = HostRoutes(
            clock, nodes=nodes, enrollments=enrollments, runs=runs, heard_at_ns=heard_at_ns, manner=manner
        )
        fleet = FleetRoutes(runs=runs, node=nodes.lookup, manner=manner, deadline_seconds=deadline_seconds)
        of_daemons = (
            *hosts.routes(),
            *GroupRoutes(groups=groups, nodes=nodes, manner=manner).routes(),
            *fleet.routes(),
            *ConfigRoutes(layers=layers, nodes=nodes, may_write=may_write).routes(),
        )
        if relay is not None:  # which has the daemons
            of_daemons = tuple(map(relay.instead_of(PREFIX), of_daemons))
        self.table = RouteTable(
            PREFIX,
            (
                *of_daemons,
                *ClusterRoutes(
                    clock, workers=workers, admission=worker_admission, layers=layers, nodes=nodes
                ).routes(),
            ),
        )
        self.family = RestFamily(
            kernel,
            self.table,
            gate,
            domain="edge",
            errors=ERRORS,
            text=FamilyText(
                title="Fleetplane edge",
                version=version,
                description="Daemons behind NAT, their groups, and runs across them.",
                summary="REST: daemons behind NAT",
            ),
        )

    def __repr__(self) -> str:
        return f"<RestSide {self.table!r}>"

    @property
    def collectors(self) -> Sequence[Collector]:
        return self.family.collectors

    @property
    def routes(self) -> Sequence[Mount]:
        return self.family.mounts

    async def take_over(self) -> None:
        await self.family.take_over()

    async def run_active(self) -> None:
        await self.family.run_active()
