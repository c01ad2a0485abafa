"""The proxies domain: its kinds, methods, services, routes and controllers, in one place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from prometheus_client.registry import Collector

from fleetplane.domains.blueprint import Blueprint, Kernel, Service
from fleetplane.domains.proxies.access import OPERATOR_ROLES, READ, grants
from fleetplane.domains.proxies.acme.assembly import AcmeOptions, CertificateSide
from fleetplane.domains.proxies.acme.responder import CHALLENGE
from fleetplane.domains.proxies.agents import assembly as agent_side
from fleetplane.domains.proxies.agents.assembly import AgentSide
from fleetplane.domains.proxies.agents.controller import AgentPolicy
from fleetplane.domains.proxies.agents.identity import AUDIENCE
from fleetplane.domains.proxies.agents.ports import NobodyThere, ReportedRecords
from fleetplane.domains.proxies.agents.telemetry import AgentRecords, ProxyCollector, TrafficCollector
from fleetplane.domains.proxies.desired.writers import DESIRED, WRITERS
from fleetplane.domains.proxies.explain import (
    AgentExplainer,
    CertificateExplainer,
    HostExplainer,
    ProxyReaders,
)
from fleetplane.domains.proxies.kinds.records import KINDS
from fleetplane.domains.proxies.live import app as event_app
from fleetplane.domains.proxies.live.app import ProxyEventsApp
from fleetplane.domains.proxies.live.events import ProxyEvent, event_ring
from fleetplane.domains.proxies.live.subscriptions import EventLimits
from fleetplane.domains.proxies.resources import RESOURCES
from fleetplane.domains.proxies.rest.assembly import ProxyRest, RestOptions
from fleetplane.domains.proxies.rollout import WorkspaceConfiguration, is_held
from fleetplane.domains.proxies.rules.ports import ANY_PORT, PortRanges
from fleetplane.domains.proxies.serving.hosts import Hosts
from fleetplane.domains.proxies.serving.named import AccessLists, Streams
from fleetplane.domains.proxies.serving.private_keys import Vault
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.fleet.explain import ExplainedKind, Explainer
from fleetplane.fleet.feeds.ring import EventRing
from fleetplane.fleet.freeze import Freezable
from fleetplane.fleet.people.account_kind import ACCOUNT
from fleetplane.fleet.plans.records import with_writing
from fleetplane.fleet.rollouts.records import KINDS as ROLLOUT_KINDS
from fleetplane.fleet.runs.resources import RunCollector
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.sessions import SessionCollector
from fleetplane.rpc import Authentication, Authenticator, Needs
from fleetplane.web.documents import Documents, WebDocument
from fleetplane.web.ops import Mount

CA_PATH = "/.well-known/ca.pem"

BLUEPRINT = Blueprint(
    name="proxies",
    kinds=(*KINDS, ACCOUNT, CHALLENGE, *agent_side.KINDS, *ROLLOUT_KINDS),
    methods=agent_side.METHODS,
    grants={**grants(), **agent_side.GRANTS},
    operator_roles=OPERATOR_ROLES,
    keeps_telemetry=True,
    explain={
        "agent": ExplainedKind(
            summary="why an agent is degraded or away, or has not its configuration",
            permission=READ,
            explainer=lambda domain: domain.explainers["agent"],
        ),
        "host": ExplainedKind(
            summary="why a virtual host is not live, and at which agents",
            permission=READ,
            explainer=lambda domain: domain.explainers["host"],
        ),
        "certificate": ExplainedKind(
            summary="why a certificate is not issued or renewed",
            permission=READ,
            explainer=lambda domain: domain.explainers["certificate"],
        ),
    },
    readers=lambda domain: domain.readers,
    resources=with_writing((*RESOURCES, *DESIRED), WRITERS),
    releases=AUDIENCE,
    freeze=Freezable(
        stops="sending configuration to agents, and ordering certificates",
        scopes=(
            "org/{organization}",
            "org/{organization}/ws/{workspace}",
            "org/{organization}/ws/{workspace}/agent/{agent}",
        ),
    ),
    rollouts=lambda domain: (domain.configuration,),
)


class ProxyDomain:
    """See `create`; the constructor takes what has been built."""

    def __init__(
        self,
        kernel: Kernel,
        *,
        rest: ProxyRest,
        agents: AgentSide,
        certificates: CertificateSide,
        feed: EventRing[ProxyEvent],
        events: ProxyEventsApp,
        workspaces: Workspaces,
        records: ReportedRecords,
    ) -> None:
        store, clock = kernel.store, kernel.clock
        self.readers = ProxyReaders(rest.gatekeeper, rest.access)
        self.explainers: Mapping[str, Explainer] = {
            "agent": AgentExplainer(store, agents.controller, workspaces, clock),
            "host": HostExplainer(store, workspaces, clock),
            "certificate": CertificateExplainer(store, certificates.controller, clock),
        }
        self.runs = agents.runs
        self.records = records
        self.clock = clock
        self.presences = agents.presences
        self.is_connected: Callable[[str], bool] = agents.presences.is_present
        self.workspaces = workspaces
        self.hosts = Hosts(store, clock, workspaces)
        self.access_lists = AccessLists(store, clock, workspaces)
        self.streams = Streams(store, clock, workspaces)
        self.agent_registry = rest.agents
        self.handovers = rest.handovers
        self.rewriting = rest.rewriting
        self.certificates = rest.certificates
        self.revoker = certificates
        self.configuration = WorkspaceConfiguration(
            store, workspaces, presence=agents.presences, deployer=agents.controller, records=records
        )
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
            RunCollector(agents.runs, domain="proxies"),
            ProxyCollector(
                kernel.store,
                controller=agents.controller,
                commands=agents.commander.ledger,
                events=events,
                presences=agents.presences,
                quotas=rest.quotas,
            ),
            *([TrafficCollector(records.totals)] if isinstance(records, AgentRecords) else []),
        )

    @classmethod
    async def create(
        cls,
        kernel: Kernel,
        options: RestOptions,
        *,
        policy: AgentPolicy | None = None,
        event_origins: Collection[str] = (),
        event_limits: EventLimits | None = None,
        acme: AcmeOptions | None = None,
        stream_ports: PortRanges = ANY_PORT,
    ) -> ProxyDomain:
        store, clock = kernel.store, kernel.clock
        vault = Vault(store, kernel.master)
        workspaces = Workspaces(store, vault, holds=is_held, stream_ports=stream_ports)
        acme = acme or AcmeOptions()
        records = AgentRecords(kernel.telemetry) if kernel.telemetry is not None else None
        agents = AgentSide(
            store,
            clock,
            workspaces=workspaces,
            vault=vault,
            policy=policy,
            intake=records,
            challenge_address=acme.challenge_address,
            attention=kernel.attention,
            authority=kernel.authority,
            revocations=kernel.revocations,
        )
        certificates = CertificateSide(store, clock, kernel.master, acme, workspaces=workspaces, vault=vault)
        rest = await ProxyRest.create(
            kernel,
            options,
            workspaces=workspaces,
            vault=vault,
            presence=agents.presences,
            commander=agents.commander,
            records=records or NobodyThere(),
            offered=certificates.offered,
            revoker=certificates,
            deployer=agents.controller,
            tokens=kernel.operators.tokens,
            runs=agents.runs,
        )
        feed = event_ring(store)
        events = ProxyEventsApp(
            feed,
            access=rest.access,
            authenticate=rest.gatekeeper.of_token,
            clock=clock,
            origins=event_origins,
            limits=event_limits,
        )
        return cls(
            kernel,
            rest=rest,
            agents=agents,
            certificates=certificates,
            feed=feed,
            events=events,
            workspaces=workspaces,
            records=records or NobodyThere(),
        )

    @property
    def routes(self) -> Sequence[Mount]:
        authority = Documents(
            {
                CA_PATH: WebDocument(
                    content_type="application/x-pem-file", content=lambda: self._authority.trust_pem
                )
            }
        )
        return (
            *self._rest.routes,
            *self._certificates.mounts,
            Mount(path=event_app.PATH, app=self._events, summary="events, over WebSocket", needs=Needs.STORE),
            Mount(
                path=CA_PATH,
                app=authority,
                summary="the certificate by which agents know this server",
                needs=Needs.STORE,
            ),
        )

    @property
    def notices(self) -> Sequence[str]:
        return self._rest.notices

    async def prepare_here(self) -> None:
        await self._agents.prepare_here()

    async def take_over(self) -> None:
        await self._rest.take_over()
        await self._agents.take_over()

    def opened(self, addresses: Mapping[str, Sequence[str]]) -> None:
        pass

    async def run_here(self) -> None:
        """For those who are connected to this server."""
        async with Boundary() as tasks:
            tasks.keep("proxies/agents", self._agents.run_here)
            tasks.keep("proxies/events", self._feed.run)
            tasks.keep("proxies/certificates", self._certificates.run_here)

    async def run_active(self) -> None:
        """Agents that nobody has, orders of certificates, and sweeps."""
        async with Boundary() as tasks:
            tasks.keep("proxies/rest", self._rest.run_active)
            tasks.keep("proxies/agents", self._agents.run_active)
            tasks.keep("proxies/certificates", self._certificates.run_active)

    def drain(self) -> None:
        self._agents.drain()
        self._events.drain()
