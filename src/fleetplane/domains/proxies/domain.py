"""The proxies domain: its kinds, methods, services, routes and controllers, in one place."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from prometheus_client.registry import Collector

from fleetplane.domains.blueprint import Blueprint, Kernel, Service
from fleetplane.domains.proxies import agent_side, event_app
from fleetplane.domains.proxies.access import grants
from fleetplane.domains.proxies.acme.side import AcmeOptions, CertificateSide
from fleetplane.domains.proxies.agent_side import AgentSide
from fleetplane.domains.proxies.controller import AgentPolicy
from fleetplane.domains.proxies.event_app import EventsApp
from fleetplane.domains.proxies.event_feed import EventFeed
from fleetplane.domains.proxies.kinds import KINDS
from fleetplane.domains.proxies.metrics import ProxyCollector
from fleetplane.domains.proxies.ports import NobodyThere
from fleetplane.domains.proxies.records import AgentRecords
from fleetplane.domains.proxies.rest_side import RestOptions, RestSide
from fleetplane.domains.proxies.vault import Vault
from fleetplane.domains.proxies.workspaces import Workspaces
from fleetplane.kernel.session_metrics import SessionCollector
from fleetplane.rpc import Authentication, Authenticator
from fleetplane.web.documents import Document, Documents
from fleetplane.web.ops import Mount

CA_PATH = "/.well-known/ca.pem"

BLUEPRINT = Blueprint(
    name="proxies",
    kinds=(*KINDS, *agent_side.KINDS),
    methods=agent_side.METHODS,
    grants={**grants(), **agent_side.GRANTS},
    keeps_telemetry=True,
)


class ProxyDomain:
    """See `create`; the constructor takes what has been built."""

    def __init__(
        self,
        kernel: Kernel,
        *,
        rest: RestSide,
        agents: AgentSide,
        certificates: CertificateSide,
        feed: EventFeed,
        events: EventsApp,
    ) -> None:
        self._rest = rest
        self._certificates = certificates
        self._authority = kernel.authority
        self._agents = agents
        self._feed = feed
        self._events = events
        self.services: Sequence[Service] = agents.services
        self.authenticators: Mapping[str, Mapping[Authentication, Authenticator]] = agents.authenticators
        self.server_names: Sequence[str] = ()
        self.collectors: Sequence[Collector] = (
            *rest.collectors,
            SessionCollector(agents.sessions, domain="proxies"),
            ProxyCollector(
                kernel.store, controller=agents.controller, commands=agents.commander.ledger, events=events
            ),
        )

    @classmethod
    async def create(
        cls,
        kernel: Kernel,
        options: RestOptions,
        *,
        policy: AgentPolicy | None = None,
        event_origins: Collection[str] = (),
        acme: AcmeOptions | None = None,
    ) -> ProxyDomain:
        store, clock = kernel.store, kernel.clock
        vault = Vault(store, kernel.master)
        workspaces = Workspaces(store, vault)
        acme = acme or AcmeOptions()
        records = AgentRecords(kernel.telemetry) if kernel.telemetry is not None else None
        agents = AgentSide(
            store, clock, workspaces=workspaces, vault=vault, policy=policy, intake=records,
            challenge_address=acme.challenge_address,
        )  # fmt: skip
        certificates = CertificateSide(store, clock, kernel.master, acme, workspaces=workspaces, vault=vault)
        rest = await RestSide.create(
            kernel, options, workspaces=workspaces, vault=vault,
            presence=agents.presences, commander=agents.commander, records=records or NobodyThere(),
            offered=certificates.offered, revoker=certificates, tokens=kernel.operators.tokens,
        )  # fmt: skip
        feed = EventFeed(store)
        events = EventsApp(
            feed, access=rest.access, authenticate=rest.gatekeeper.of_token, clock=clock,
            origins=event_origins,
        )  # fmt: skip
        return cls(kernel, rest=rest, agents=agents, certificates=certificates, feed=feed, events=events)

    @property
    def routes(self) -> Sequence[Mount]:
        authority = Documents(
            {
                CA_PATH: Document(
                    content_type="application/x-pem-file", content=lambda: self._authority.trust_pem
                )
            }
        )
        return (
            *self._rest.routes,
            *self._certificates.mounts,
            Mount(path=event_app.PATH, app=self._events, summary="events, over WebSocket"),
            Mount(path=CA_PATH, app=authority, summary="the certificate by which agents know this server"),
        )

    @property
    def notices(self) -> Sequence[str]:
        return self._rest.notices

    async def prepare(self) -> None:
        await self._rest.prepare()
        self._agents.prepare()

    def opened(self, addresses: Mapping[str, Sequence[str]]) -> None:
        pass

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._rest.run(), name="proxies/rest")
            tasks.create_task(self._agents.run(), name="proxies/agents")
            tasks.create_task(self._feed.run(), name="proxies/events")
            tasks.create_task(self._certificates.run(), name="proxies/certificates")

    def drain(self) -> None:
        self._agents.drain()
        self._events.drain()
