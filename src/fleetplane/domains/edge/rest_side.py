"""The half of the edge domain that talks to operators, put together: everything under `/v1/edge`.

Litestar is loaded here, when this half is built, and by nobody who does not run it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import msgspec
from prometheus_client.registry import Collector

from fleetplane.domains.edge.access import Caller, Gatekeeper
from fleetplane.domains.edge.config_layers import ConfigLayers
from fleetplane.domains.edge.enrollments import Enrollments
from fleetplane.domains.edge.fleet import FleetRuns
from fleetplane.domains.edge.groups import Groups
from fleetplane.domains.edge.nodes import Nodes
from fleetplane.domains.edge.rest import BAD_REQUEST, EdgeError, Manner, envelope
from fleetplane.domains.edge.rest_config import ConfigRoutes
from fleetplane.domains.edge.rest_fleet import FleetRoutes
from fleetplane.domains.edge.rest_groups import GroupRoutes
from fleetplane.domains.edge.rest_hosts import HostRoutes
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.store import Store
from fleetplane.web import openapi
from fleetplane.web.app import application
from fleetplane.web.documents import Document, Documents
from fleetplane.web.gateway import REQUESTS_PER_MINUTE, Gateway
from fleetplane.web.idempotency import Answers
from fleetplane.web.metrics import GatewayCollector
from fleetplane.web.ops import Mount
from fleetplane.web.routes import RouteTable

PREFIX = "/v1/edge"
DOCUMENT = f"{PREFIX}/openapi.json"
TITLE = "Fleetplane edge"
ABOUT = "Daemons behind NAT, their groups, and runs across them."
SWEEP_SECONDS = 3600.0


class RestSide:
    def __init__(
        self,
        store: Store,
        master: MasterKey,
        clock: Clock,
        *,
        operators: Operators,
        nodes: Nodes,
        enrollments: Enrollments,
        groups: Groups,
        layers: ConfigLayers,
        runs: FleetRuns,
        heard_at_ns: Callable[[str], int | None],
        shipped_shapes: bool,
        deadline_seconds: float,
        version: str,
    ) -> None:
        self._clock = clock
        self._version = version
        self._gate = Gatekeeper(operators)
        self._answers = Answers(store, master, clock, namespace="edge")
        manner = Manner(shipped=shipped_shapes)
        hosts = HostRoutes(
            clock, nodes=nodes, enrollments=enrollments, runs=runs, heard_at_ns=heard_at_ns, manner=manner
        )
        fleet = FleetRoutes(runs=runs, node=nodes.lookup, manner=manner, deadline_seconds=deadline_seconds)
        self.table = RouteTable(
            PREFIX,
            (
                *hosts.routes(),
                *GroupRoutes(groups=groups, nodes=nodes, manner=manner).routes(),
                *fleet.routes(),
                *ConfigRoutes(layers=layers, nodes=nodes).routes(),
            ),
        )

    def __repr__(self) -> str:
        return f"<RestSide {self.table!r}>"

    async def prepare(self) -> None:
        await self._answers.load()

    @cached_property
    def _gateway(self) -> Gateway[Caller]:
        return application(
            self.table, gate=self._gate, answers=self._answers, clock=self._clock,
            requests_per_minute=REQUESTS_PER_MINUTE, envelope=envelope,
        )  # fmt: skip

    @cached_property
    def collectors(self) -> Sequence[Collector]:
        return (GatewayCollector(self._gateway, domain="edge"),)

    @cached_property
    def routes(self) -> Sequence[Mount]:
        pages = Documents(
            {DOCUMENT: Document(content_type="application/json", content=lambda: self._document)}
        )
        return (
            Mount(path=PREFIX, app=self._gateway, summary="REST: daemons behind NAT"),
            Mount(path=DOCUMENT, app=pages),
        )

    @cached_property
    def _document(self) -> bytes:
        made = openapi.document(
            self.table, title=TITLE, version=self._version, description=ABOUT, error=EdgeError,
            rejected=str(BAD_REQUEST), conditional=False,
        )  # fmt: skip
        return msgspec.json.encode(made)

    async def run(self) -> None:
        """Forget answers that nobody will ask for again, until cancelled."""
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            await self._answers.sweep()
