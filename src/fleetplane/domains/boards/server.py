"""The boards domain: its kinds, methods, services and controllers, in one place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.registry import Collector

from fleetplane.domains.blueprint import Blueprint, Domain, Kernel, ServerContext, Service
from fleetplane.domains.boards import access
from fleetplane.domains.boards.access import CONTROL_PLANE, LISTENER, PI_CONTROLLER, PLAIN_LISTENER
from fleetplane.domains.boards.calls import assembly as node_side
from fleetplane.domains.boards.calls.assembly import NodeSide
from fleetplane.domains.boards.core import BoardCore, BoardOptions
from fleetplane.domains.boards.desired import WRITERS
from fleetplane.domains.boards.explain import BoardExplainer, BoardReaders, PinExplainer
from fleetplane.domains.boards.grpc.control_plane import ControlService
from fleetplane.domains.boards.grpc.nodes import ClusterMethods, NodeMethods
from fleetplane.domains.boards.grpc.pins import PiControllerService
from fleetplane.domains.boards.grpc.system import SystemMethods
from fleetplane.domains.boards.inventory.sync import Synchronisation
from fleetplane.domains.boards.joining.credentials import Doorkeeper, plain
from fleetplane.domains.boards.kinds import KINDS
from fleetplane.domains.boards.metrics.history import BoardRecords, OriginalMetrics
from fleetplane.domains.boards.ports import DiscardMeasurements, MetricsIntake, Provisioner
from fleetplane.domains.boards.provisioning import assembly as provisioning_side
from fleetplane.domains.boards.provisioning import policy
from fleetplane.domains.boards.provisioning.assembly import ProvisioningSide
from fleetplane.domains.boards.provisioning.preflight import BoardPaths
from fleetplane.domains.boards.resources import RESOURCES
from fleetplane.domains.boards.rest import assembly as rest_side
from fleetplane.domains.boards.rest.assembly import BoardRest
from fleetplane.domains.boards.sets.resources import AUDIENCE, BOARD_SETS, SET_WRITERS, BoardPrograms
from fleetplane.domains.boards.sets.rules import BOARD_SET
from fleetplane.domains.boards.sets.rules import KINDS as SET_KINDS
from fleetplane.domains.boards.settings import BoardSettings, PlainBoardsSettings
from fleetplane.fleet.explain import ExplainedKind, Explainer
from fleetplane.fleet.freeze import Freezable
from fleetplane.fleet.people.account_kind import ACCOUNT
from fleetplane.fleet.plans.records import with_writing
from fleetplane.fleet.rollouts.records import KINDS as ROLLOUT_KINDS
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.reconcile.reconciler import ReconcileCollector
from fleetplane.kernel.sessions import STOPPING, SessionCollector
from fleetplane.rpc import Authentication, Authenticator
from fleetplane.web.ops import Mount

BLUEPRINT = Blueprint(
    name="boards",
    kinds=(
        *KINDS,
        *SET_KINDS,
        *ROLLOUT_KINDS,
        ACCOUNT,
        *node_side.KINDS,
        *provisioning_side.KINDS,
        *rest_side.KINDS,
    ),
    methods=access.METHODS,
    grants=access.GRANTS,
    operator_roles=access.OPERATOR_ROLES,
    keeps_telemetry=True,
    explain={
        "board": ExplainedKind(
            summary="why a board is not ready",
            permission=access.READ,
            explainer=lambda domain: domain.explainers["board"],
        ),
        "pin": ExplainedKind(
            summary="why a pin is not what it should be",
            permission=access.READ,
            explainer=lambda domain: domain.explainers["pin"],
        ),
    },
    readers=lambda domain: domain.readers,
    resources=with_writing((*RESOURCES, BOARD_SETS), {**WRITERS, **SET_WRITERS}),
    rollouts=lambda domain: (domain.programs,),
    releases=AUDIENCE,
    freeze=Freezable(
        stops="bringing pins back to what they should be; what people write, and the end of a reservation, "
        "go on",
        scopes=("boards", "boards/board/{number}"),
    ),
)


class BoardDomain:
    def __init__(
        self,
        kernel: Kernel,
        options: BoardOptions,
        *,
        provisioner: Provisioner | None = None,
        places: BoardPaths | None = None,
    ) -> None:
        self.core = core = BoardCore(kernel, options)
        self.clusters = core.clusters
        self.nodes = NodeSide(core)
        self.programs = BoardPrograms(kernel.store, core.sets, self.nodes.commander)
        kernel.store.add_hook(core.sets.commit_hook, BOARD_SET)
        self.provisioning = ProvisioningSide(core, places=places)
        self.rest = BoardRest(core, self.nodes, self.provisioning)
        self.readers = BoardReaders(self.rest.gate)
        self.explainers: Mapping[str, Explainer] = {
            "board": BoardExplainer(core.boards, core.controller, kernel.clock),
            "pin": PinExplainer(self.nodes.devices, self.nodes.gpio, kernel.clock),
        }
        provisioner = provisioner or self.provisioning.engine
        intake: MetricsIntake = (
            DiscardMeasurements() if kernel.telemetry is None else BoardRecords(kernel.telemetry)
        )
        self._original_metrics = OriginalMetrics(
            boards=core.boards,
            links=self.nodes.links,
            history=self.nodes.history,
            intake=intake,
            clock=kernel.clock,
            every_seconds=options.heartbeat_seconds,
        )
        control = self._control(provisioner, intake)
        original = PiControllerService([*self._parts(provisioner, intake), *self.nodes.methods()])
        doorkeeper = Doorkeeper(
            authority=kernel.authority,
            revocations=kernel.revocations,
            door=kernel.door,
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
            revocation_lists=core.revocation_lists,
            service_reports=core.service_reports,
            sets=core.sets,
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
            plain_limit=options.plain_boards,
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

    async def prepare_here(self) -> None:
        await self.nodes.prepare_here()
        await self.rest.prepare_here()

    async def take_over(self) -> None:
        await self.nodes.take_over()
        await self.rest.take_over()
        self.core.controller.take_over()

    async def run_here(self) -> None:
        """Note who is heard, and tell what happens."""
        async with Boundary() as tasks:
            tasks.keep("boards/heard", self.core.controller.run_here)
            tasks.keep("boards/nodes", self.nodes.run_here)
            tasks.keep("boards/events", self.rest.run_here)

    def opened(self, addresses: Mapping[str, Sequence[str]]) -> None:
        pass

    async def run_active(self) -> None:
        """Call boards, declare silences, provision, and sweep."""
        async with Boundary() as tasks:
            tasks.keep("boards/controller", self.core.controller.run_active)
            tasks.keep("boards/calls", self.nodes.run_active)
            tasks.keep("boards/sets", self.core.sets.run)
            tasks.keep("boards/provisioning", self.provisioning.run)
            tasks.keep("boards/rest", self.rest.run_active)
            if self.core.options.plain:
                tasks.keep("boards/original-metrics", self._original_metrics.run)

    def drain(self) -> None:
        self.rest.drain()
        self.core.sessions.close_all(STOPPING)


async def build(wanted: BoardSettings, context: ServerContext, kernel: Kernel) -> Domain:
    options = BoardOptions(
        heartbeat_seconds=wanted.heartbeat_seconds,
        certificate_days=wanted.certificate_days,
        agent_port=wanted.agent_port,
        plain=bool(context.listener("boards-plain", PlainBoardsSettings).addresses),
        plain_boards=wanted.plain_boards,
        server_names=wanted.server_names,
        controller_id=wanted.controller_id,
        unprotected_pins=frozenset(wanted.unprotected_pins),
        certificate_domains=wanted.certificate_domains,
        requests_per_minute=wanted.requests_per_minute,
        provisioning=policy.from_settings(
            installers=wanted.k3s_installers,
            paths=wanted.k3s_paths,
            servers=wanted.k3s_servers,
            arguments=wanted.k3s_arguments,
        ),
    )
    return BoardDomain(kernel, options)
