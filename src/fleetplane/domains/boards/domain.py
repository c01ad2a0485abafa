"""The boards domain: its kinds, methods, services and controllers, in one place."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.registry import Collector

from fleetplane.domains.blueprint import Blueprint, Kernel, Service
from fleetplane.domains.boards import access, node_side, provisioning_side, rest_side
from fleetplane.domains.boards.access import CONTROL_PLANE, LISTENER, PI_CONTROLLER, PLAIN_LISTENER
from fleetplane.domains.boards.cluster_service import ClusterMethods
from fleetplane.domains.boards.control_service import ControlService
from fleetplane.domains.boards.controller_service import PiControllerService
from fleetplane.domains.boards.core import BoardCore, BoardOptions
from fleetplane.domains.boards.credentials import Doorkeeper, plain
from fleetplane.domains.boards.kinds import KINDS
from fleetplane.domains.boards.node_service import NodeMethods
from fleetplane.domains.boards.node_side import NodeSide
from fleetplane.domains.boards.ports import Discard, MetricsIntake, Provisioner
from fleetplane.domains.boards.provisioning.preflight import Places
from fleetplane.domains.boards.provisioning_side import ProvisioningSide
from fleetplane.domains.boards.records import BoardRecords
from fleetplane.domains.boards.rest_side import RestSide
from fleetplane.domains.boards.sync import Synchronisation
from fleetplane.domains.boards.system_service import SystemMethods
from fleetplane.kernel.reconcile.metrics import ReconcileCollector
from fleetplane.kernel.session_metrics import SessionCollector
from fleetplane.kernel.sessions import STOPPING
from fleetplane.rpc import Authentication, Authenticator
from fleetplane.web.ops import Mount

BLUEPRINT = Blueprint(
    name="boards",
    kinds=(*KINDS, *node_side.KINDS, *provisioning_side.KINDS, *rest_side.KINDS),
    methods=access.METHODS,
    grants=access.GRANTS,
    operator_roles=access.OPERATOR_ROLES,
    keeps_telemetry=True,
)


class BoardDomain:
    def __init__(
        self,
        kernel: Kernel,
        options: BoardOptions,
        *,
        provisioner: Provisioner | None = None,
        places: Places | None = None,
    ) -> None:
        self.core = core = BoardCore(kernel, options)
        self.nodes = NodeSide(core)
        self.provisioning = ProvisioningSide(core, places=places)
        self.rest = RestSide(core, self.nodes, self.provisioning)
        provisioner = provisioner or self.provisioning.engine
        intake: MetricsIntake = Discard() if kernel.telemetry is None else BoardRecords(kernel.telemetry)
        control = self._control(provisioner, intake)
        original = PiControllerService([*self._parts(provisioner, intake), *self.nodes.methods()])
        doorkeeper = Doorkeeper(
            authority=kernel.authority,
            revocations=kernel.revocations,
            operators=kernel.operators,
            clock=kernel.clock,
            is_known=lambda number: core.boards.get(number) is not None,
        )
        self.services: Sequence[Service] = (
            Service(listener=LISTENER, descriptor=CONTROL_PLANE, servicer=control),
            Service(listener=LISTENER, descriptor=PI_CONTROLLER, servicer=original),
        )
        self.authenticators: Mapping[str, Mapping[Authentication, Authenticator]] = {
            LISTENER: {
                Authentication.CERTIFICATE: doorkeeper.certificate,
                Authentication.ANONYMOUS: doorkeeper.anyone,
            },
            PLAIN_LISTENER: {Authentication.LOCAL: plain},
        }
        if options.plain:
            self.services += (Service(listener=PLAIN_LISTENER, descriptor=PI_CONTROLLER, servicer=original),)
        self.server_names: Sequence[str] = options.server_names
        self.collectors: Sequence[Collector] = (
            SessionCollector(core.sessions, domain=BLUEPRINT.name),
            ReconcileCollector(lambda: (core.controller.reconciler,)),
            *self.nodes.collectors,
            *self.rest.collectors,
        )
        self.notices: Sequence[str] = ()

    def __repr__(self) -> str:
        return f"<BoardDomain {self.core!r}>"

    @property
    def routes(self) -> Sequence[Mount]:
        return self.rest.routes

    def _control(self, provisioner: Provisioner, intake: MetricsIntake) -> ControlService:
        core = self.core
        kernel, options = core.kernel, core.options
        return ControlService(
            boards=core.boards,
            clusters=core.clusters,
            presence=core.presence,
            enrolment=core.enrolment,
            synchronisation=Synchronisation(kernel.store, core.boards, core.clusters),
            controller=core.controller,
            provisioner=provisioner,
            intake=intake,
            authority=kernel.authority,
            view=core.view,
            clock=kernel.clock,
            controller_id=options.own_name,
            heartbeat_seconds=options.heartbeat_seconds,
            agent_port=options.agent_port,
        )

    def _parts(self, provisioner: Provisioner, intake: MetricsIntake) -> Iterable[object]:
        core = self.core
        kernel, options = core.kernel, core.options
        yield ClusterMethods(boards=core.boards, clusters=core.clusters, view=core.view)
        yield NodeMethods(
            boards=core.boards,
            callers=core.callers,
            controller=core.controller,
            view=core.view,
            provisioner=provisioner,
            revocations=kernel.revocations,
            agent_port=options.agent_port,
        )
        yield SystemMethods(
            boards=core.boards,
            callers=core.callers,
            controller=core.controller,
            intake=intake,
            sessions=core.sessions,
            clock=kernel.clock,
            version=options.version,
        )

    # Life.

    async def prepare(self) -> None:
        await self.nodes.prepare()
        await self.rest.prepare()
        self.core.controller.take_up()

    def opened(self, addresses: Mapping[str, Sequence[str]]) -> None:
        pass

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.core.controller.run(), name="boards/controller")
            tasks.create_task(self.nodes.run(), name="boards/nodes")
            tasks.create_task(self.provisioning.run(), name="boards/provisioning")
            tasks.create_task(self.rest.run(), name="boards/rest")

    def drain(self) -> None:
        self.rest.drain()
        self.core.sessions.close_all(STOPPING)
