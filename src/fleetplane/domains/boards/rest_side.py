"""The half of the boards domain that talks to people and programs, put together: all of `/api/v1`.

Litestar is loaded here, when this half is built, and by nobody who does not run it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import cached_property

import msgspec
from prometheus_client.registry import Collector

from fleetplane.domains.boards import events_app
from fleetplane.domains.boards.core import BoardCore
from fleetplane.domains.boards.disclosures import DISCLOSURE, Disclosures
from fleetplane.domains.boards.event_feed import EventFeed
from fleetplane.domains.boards.events_app import EventsApp
from fleetplane.domains.boards.events_socket import Ground
from fleetplane.domains.boards.logins import LOGIN, Logins
from fleetplane.domains.boards.node_side import NodeSide
from fleetplane.domains.boards.people import PERSON, People
from fleetplane.domains.boards.provisioning_side import ProvisioningSide
from fleetplane.domains.boards.rest import Caller, Gatekeeper, envelope
from fleetplane.domains.boards.rest_ca import CertificateRoutes
from fleetplane.domains.boards.rest_clusters import ClusterRoutes
from fleetplane.domains.boards.rest_commands import CommandRoutes
from fleetplane.domains.boards.rest_gpio import GpioRoutes
from fleetplane.domains.boards.rest_joining import JoiningRoutes
from fleetplane.domains.boards.rest_nodes import NodeRoutes, NodeShow
from fleetplane.domains.boards.rest_people import PeopleRoutes
from fleetplane.domains.boards.rest_provisioning import ProvisioningRoutes
from fleetplane.domains.boards.rest_secrets import SecretRoutes
from fleetplane.domains.boards.rest_system import Probes, SystemRoutes
from fleetplane.domains.boards.rest_telemetry import TelemetryRoutes
from fleetplane.web import openapi
from fleetplane.web.app import application
from fleetplane.web.documents import Document, Documents
from fleetplane.web.gateway import Gateway
from fleetplane.web.idempotency import Answers
from fleetplane.web.metrics import GatewayCollector
from fleetplane.web.ops import Mount
from fleetplane.web.routes import Route, RouteTable

PREFIX = "/api/v1"
DOCUMENT = f"{PREFIX}/openapi.json"
TITLE = "Fleetplane boards"
ABOUT = "Raspberry-Pi-class boards: metrics, GPIO, commands, logs and provisioning."
SWEEP_SECONDS = 3600.0
KINDS = (PERSON, LOGIN, DISCLOSURE)


class RestSide:
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
        self._per_minute = core.options.requests_per_minute
        self._answers = Answers(store, master, clock, namespace="boards")
        self.people = People(store, master, clock)
        self.logins = Logins(
            store, master, clock, people=self.people, operators=kernel.operators,
            revocations=kernel.revocations,
        )  # fmt: skip
        self.gate = Gatekeeper(self.logins)
        self._system = SystemRoutes(clock, is_writable=lambda: store.statistics().writable)
        self.show = NodeShow(core.presence, nodes.devices)
        self.table = RouteTable(
            PREFIX, (*self._own_routes(), *self._node_routes(nodes), *self._provisioning_routes(provisioning))
        )
        self.gate.require_complete(self.table.permissions)
        self.feed = EventFeed(store, clock)
        self.events = EventsApp(
            Ground(
                feed=self.feed, logs=nodes.logs, gate=self.gate, authenticate=self.logins.of_token,
                clock=clock,
            )
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<RestSide {self.table!r}>"

    def _own_routes(self) -> Iterable[Route]:
        core = self._core
        yield from self._system.routes()
        yield from PeopleRoutes(people=self.people, logins=self.logins).routes()
        yield from ClusterRoutes(clusters=core.clusters, boards=core.boards, show=self.show).routes()
        yield from NodeRoutes(
            boards=core.boards, revocations=core.kernel.revocations, show=self.show
        ).routes()
        yield from JoiningRoutes(
            tokens=core.join_tokens, approvals=core.approvals, gate=self.gate, clock=self._clock
        ).routes()

    def _node_routes(self, nodes: NodeSide) -> Iterable[Route]:
        """Of what is asked of boards themselves."""
        core, clock = self._core, self._clock
        yield from GpioRoutes(
            boards=core.boards, devices=nodes.devices, driver=nodes.driver, clock=clock
        ).routes()
        yield from CommandRoutes(core.kernel.store, boards=core.boards, commander=nodes.commander).routes()
        yield from TelemetryRoutes(
            boards=core.boards, history=nodes.history, logs=nodes.logs, clock=clock
        ).routes()
        yield from CertificateRoutes(
            methods=nodes.certificate_methods, certificates=core.certificates, requests=nodes.requests,
            clock=clock,
        ).routes()  # fmt: skip

    def _provisioning_routes(self, provisioning: ProvisioningSide) -> Iterable[Route]:
        core = self._core
        yield from ProvisioningRoutes(
            engine=provisioning.engine, operations=provisioning.operations, clock=self._clock
        ).routes()
        yield from SecretRoutes(
            boards=core.boards, credentials=provisioning.credentials, secrets=provisioning.secrets,
            disclosures=Disclosures(core.kernel.store),
        ).routes()  # fmt: skip

    async def prepare(self) -> None:
        await self._answers.load()
        await self.logins.load()

    @cached_property
    def _gateway(self) -> Gateway[Caller]:
        return application(
            self.table, gate=self.gate, answers=self._answers, clock=self._clock,
            requests_per_minute=self._per_minute, envelope=envelope,
        )  # fmt: skip

    @cached_property
    def collectors(self) -> Sequence[Collector]:
        return (GatewayCollector(self._gateway, domain="boards"),)

    @cached_property
    def routes(self) -> Sequence[Mount]:
        document = Document(content_type="application/json", content=lambda: self._document)
        probes = Probes(self._system)
        return (
            Mount(path=PREFIX, app=self._gateway, summary="REST: boards"),
            Mount(path=DOCUMENT, app=Documents({DOCUMENT: document})),
            Mount(path=events_app.PATH, app=self.events, summary="events of boards, over WebSocket"),
            Mount(path="/health", app=probes),
            Mount(path="/ready", app=probes),
        )

    @cached_property
    def _document(self) -> bytes:
        made = openapi.document(
            self.table, title=TITLE, version=self._core.options.version, description=ABOUT
        )
        return msgspec.json.encode(made)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.feed.run(), name="boards/events")
            tasks.create_task(self._sweep(), name="boards/rest/sweep")

    async def _sweep(self) -> None:
        """Forget what is over."""
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            await self._answers.sweep()
            await self.logins.sweep()

    def drain(self) -> None:
        self.events.drain()
