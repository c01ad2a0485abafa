"""The REST half of the boards domain, composed: all of `/api/v1`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from prometheus_client.registry import Collector

from fleetplane.domains.boards.access import GRANTS
from fleetplane.domains.boards.calls.assembly import NodeSide
from fleetplane.domains.boards.core import BoardCore
from fleetplane.domains.boards.inventory.clusters import BoardPlaces
from fleetplane.domains.boards.inventory.last_seen import BOARD_SERVICE
from fleetplane.domains.boards.joining.credentials import as_board_caller
from fleetplane.domains.boards.kinds import SCOPE
from fleetplane.domains.boards.live import socket as events_app
from fleetplane.domains.boards.live.socket import BoardEventsApp, BoardSocketParts, EventFeed
from fleetplane.domains.boards.provisioning.assembly import ProvisioningSide
from fleetplane.domains.boards.provisioning.secrets import DISCLOSURE, Disclosures
from fleetplane.domains.boards.rest.certificates import CertificateRoutes
from fleetplane.domains.boards.rest.clusters import ClusterRoutes, SecretRoutes
from fleetplane.domains.boards.rest.commands import CommandRoutes, run_routes
from fleetplane.domains.boards.rest.common import BoardError, envelope
from fleetplane.domains.boards.rest.nodes import JoiningRoutes, NodeRoutes, NodeShow
from fleetplane.domains.boards.rest.pins import GpioRoutes
from fleetplane.domains.boards.rest.provisioning import ProvisioningRoutes
from fleetplane.domains.boards.rest.system import ProbeRoutes, SystemRoutes
from fleetplane.domains.boards.rest.telemetry import TelemetryRoutes
from fleetplane.domains.boards.rest.users import LOGIN, BoardBearers, PeopleRoutes, logins_of
from fleetplane.domains.boards.users import FAMILY, PERSON, PERSON_RULES, ROLES, People
from fleetplane.fleet.people.account_kind import subject_of
from fleetplane.fleet.people.account_migration import migrate
from fleetplane.fleet.people.directory import LoginDirectory
from fleetplane.fleet.people.door import Admitted
from fleetplane.rpc import Needs
from fleetplane.web.ops import Mount
from fleetplane.web.rest.family import FamilyErrors, FamilyText, RestFamily
from fleetplane.web.rest.gate import RoleGate
from fleetplane.web.rest.routes import Route, RouteTable

PREFIX = "/api/v1"
ERRORS = FamilyErrors(envelope=envelope, shape=BoardError, rejected="400", conditional=False)
KINDS = (PERSON, LOGIN, DISCLOSURE, BOARD_SERVICE)


class BoardRest:
    def __init__(
        self,
        core: BoardCore,
        nodes: NodeSide,
        provisioning: ProvisioningSide,
    ) -> None:
        kernel = core.kernel
        store, master, clock = kernel.store, kernel.master, kernel.clock
        self._core = core
        self._clock = clock
        self.logins = logins_of(store, master, clock)
        self._door = kernel.door
        self.people = People(store, master, clock, self.logins, kernel.door.linked, self._bound_role)
        kernel.door.tree.add(BoardPlaces(store))
        kernel.door.directories.add(
            LoginDirectory(
                FAMILY, store, PERSON_RULES, self.logins, shown=lambda person: person.spec.username
            )
        )
        bearers = BoardBearers(store, self.logins, kernel.door)
        self.gate = RoleGate(lambda headers: bearers.of_header(headers.credential), GRANTS, scope=SCOPE)
        self._system = SystemRoutes(
            clock, is_writable=lambda: store.statistics().writable, services=core.service_reports
        )
        self.show = NodeShow(core.presence, nodes.devices)
        self.table = RouteTable(
            PREFIX, (*self._own_routes(), *self._node_routes(nodes), *self._provisioning_routes(provisioning))
        )
        self.gate.require_complete(self.table.permissions)
        self.family = RestFamily(
            kernel,
            self.table,
            self.gate,
            domain="boards",
            errors=ERRORS,
            requests_per_minute=core.options.requests_per_minute,
            sweeps=(self.logins.sweep,),
            text=FamilyText(
                title="Fleetplane boards",
                version=core.options.version,
                description="Raspberry-Pi-class boards: metrics, GPIO, commands, logs and provisioning.",
                summary="REST: boards",
            ),
        )
        self.feed = EventFeed(store, clock)
        self.events = BoardEventsApp(
            BoardSocketParts(
                feed=self.feed,
                logs=nodes.logs,
                gate=self.gate,
                authenticate=bearers.of_token,
                clock=clock,
            )
        )

    def __repr__(self) -> str:
        return f"<RestSide {self.table!r}>"

    def _own_routes(self) -> Iterable[Route]:
        core = self._core
        yield from self._system.routes()
        yield from PeopleRoutes(people=self.people, logins=self.logins, door=self._door).routes()
        yield from ClusterRoutes(clusters=core.clusters, boards=core.boards, show=self.show).routes()
        yield from NodeRoutes(
            boards=core.boards, revocations=core.kernel.revocations, show=self.show
        ).routes()
        yield from JoiningRoutes(
            tokens=core.join_tokens, approvals=core.approvals, gate=self.gate, clock=self._clock
        ).routes()

    def _node_routes(self, nodes: NodeSide) -> Iterable[Route]:
        """Routes whose answers come from boards."""
        core, clock = self._core, self._clock
        yield from GpioRoutes(
            boards=core.boards, devices=nodes.devices, driver=nodes.driver, clock=clock
        ).routes()
        yield from CommandRoutes(
            core.kernel.store, boards=core.boards, commander=nodes.commander, runs=nodes.runs
        ).routes()
        yield from run_routes(nodes.runs, nodes.commander).routes()
        yield from TelemetryRoutes(
            boards=core.boards, history=nodes.history, logs=nodes.logs, clock=clock
        ).routes()
        yield from CertificateRoutes(
            methods=nodes.certificate_methods,
            certificates=core.certificates,
            requests=nodes.requests,
            clock=clock,
        ).routes()

    def _provisioning_routes(self, provisioning: ProvisioningSide) -> Iterable[Route]:
        core = self._core
        yield from ProvisioningRoutes(
            engine=provisioning.engine, operations=provisioning.operations, clock=self._clock
        ).routes()
        yield from SecretRoutes(
            boards=core.boards,
            credentials=provisioning.credentials,
            secrets=provisioning.secrets,
            disclosures=Disclosures(core.kernel.store),
        ).routes()

    def _bound_role(self, account: str) -> str | None:
        """The highest role that was given to an account where boards lie, in the API's words."""
        subject = subject_of(account)
        held = as_board_caller(self._door.principal(Admitted(name=subject, subject=subject, family=FAMILY)))
        return next((word for word, role in reversed(ROLES.items()) if role in held.roles), None)

    async def prepare_here(self) -> None:
        """Load what recognises users."""
        await self.logins.load()

    async def take_over(self) -> None:
        """Bring what an earlier version wrote up to date."""
        await self.family.take_over()
        await migrate(self._core.kernel.store, self._core.kernel.master, PERSON_RULES)

    @property
    def collectors(self) -> Sequence[Collector]:
        return self.family.collectors

    @cached_property
    def routes(self) -> Sequence[Mount]:
        probes = ProbeRoutes(self._system)
        return (
            *self.family.mounts,
            Mount(
                path=events_app.PATH,
                app=self.events,
                summary="events of boards, over WebSocket",
                needs=Needs.STORE,
            ),
            Mount(path="/health", app=probes, needs=Needs.NOTHING),
            Mount(path="/ready", app=probes, needs=Needs.STORE),
        )

    async def run_here(self) -> None:
        """Tell what happens, until cancelled."""
        await self.feed.run()

    async def run_active(self) -> None:
        """Sweep, until cancelled."""
        await self.family.run_active()

    def drain(self) -> None:
        self.events.drain()
