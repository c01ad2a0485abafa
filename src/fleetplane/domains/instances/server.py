"""The instances domain: its kinds, methods, services and controllers, in one place."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
from prometheus_client.registry import Collector

from fleetplane.domains.blueprint import Blueprint, Kernel, Service
from fleetplane.domains.instances import access, figures
from fleetplane.domains.instances.configuration.schema import PROVIDERS
from fleetplane.domains.instances.content.downloads import Downloads
from fleetplane.domains.instances.content.files import FileMaker, InstanceSecrets, ServerAddresses
from fleetplane.domains.instances.content.images import Images
from fleetplane.domains.instances.controllers.assembly import Machinery
from fleetplane.domains.instances.controllers.on_behalf import OnBehalf
from fleetplane.domains.instances.controllers.provider_switch import Infrastructure, ProviderPlace
from fleetplane.domains.instances.credentials import ClientRole, anonymous, authenticator, with_tokens
from fleetplane.domains.instances.desired import WRITERS
from fleetplane.domains.instances.explain import GroupExplainer, InstanceExplainer
from fleetplane.domains.instances.grpc.admin import AdminService
from fleetplane.domains.instances.grpc.agents import InstanceAgentService
from fleetplane.domains.instances.grpc.anywhere import PLACES, AgentsAnywhere
from fleetplane.domains.instances.grpc.authority import AuthorityService
from fleetplane.domains.instances.grpc.operator_groups import OperatorGroups
from fleetplane.domains.instances.grpc.operators import OperatorService
from fleetplane.domains.instances.grpc.registration import RegistrationService
from fleetplane.domains.instances.grpc.renewal import RenewalService
from fleetplane.domains.instances.kinds import GROUP, KINDS, SECRET, Instance
from fleetplane.domains.instances.live.errors import ErrorFeed
from fleetplane.domains.instances.metrics import InstanceCollector
from fleetplane.domains.instances.providers import registry as provider_registry
from fleetplane.domains.instances.providers.contract import Provider
from fleetplane.domains.instances.records.drains import RequestedDrains
from fleetplane.domains.instances.records.groups import Groups, SilencePolicy
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.records.intents import Intents
from fleetplane.domains.instances.records.listener_activity import Activity
from fleetplane.domains.instances.records.reports import InstanceReports
from fleetplane.domains.instances.releases import AUDIENCE
from fleetplane.domains.instances.resources import RESOURCES
from fleetplane.domains.instances.rest.overview import Overview
from fleetplane.domains.instances.rest.remote import RemoteCalls
from fleetplane.domains.instances.rest.routes import InstanceRest
from fleetplane.domains.instances.rollout import GroupTemplates
from fleetplane.domains.instances.rules import quotas
from fleetplane.domains.instances.rules.workload import SERVER_NAME
from fleetplane.fleet.errands import ERRAND, Errands
from fleetplane.fleet.explain import ExplainedKind, Explainer, TokenReaders
from fleetplane.fleet.figures import FigureKeeper
from fleetplane.fleet.freeze import Freezable
from fleetplane.fleet.plans.records import with_writing
from fleetplane.fleet.rollouts.records import KINDS as ROLLOUT_KINDS
from fleetplane.gen.fleetplane.admin.v1 import authority_pb2
from fleetplane.gen.fleetplane.admin.v1 import instances_pb2 as admin_pb2
from fleetplane.gen.fleetplane.instances.v1 import renewal_pb2
from fleetplane.gen.nstance.v1 import agent_pb2, operator_pb2, registration_pb2
from fleetplane.kernel.access import Grant, Permission, Role, built_in_grants
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.errors import InvalidArgument, NotFound
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.objects import Objects
from fleetplane.kernel.objects.port import RecordedObjects
from fleetplane.kernel.presence import PresenceRegistry
from fleetplane.kernel.reconcile import Explanations, Reconciler
from fleetplane.kernel.reconcile.reconciler import ReconcileCollector
from fleetplane.kernel.sessions import STOPPING, SessionCollector, Sessions
from fleetplane.rpc import Authentication, Authenticator, Needs, Rate, service_rows
from fleetplane.web.ops import Mount

log = structlog.get_logger(__name__)

REGISTRATION, OPERATOR, AGENT, ADMIN = "registration", "operator", "agent", "admin"
LISTENERS = (REGISTRATION, OPERATOR, AGENT, ADMIN)
AS_AGENT = Permission("instances.agent")
AS_OPERATOR, AS_ADMIN = access.AS_OPERATOR, access.AS_ADMIN
UNSPECIFIED = frozenset({"", "0.0.0.0", "::"})  # noqa: S104  # recognised, not bound
REGISTRATION_RATE = Rate(per_second=5.0, burst=50, per="caller")
"""Per address: a rack that boots behind one address must get in, a guesser must not get far."""

_REGISTRATION = registration_pb2.DESCRIPTOR.services_by_name["RegistrationService"]
_OPERATORS = operator_pb2.DESCRIPTOR.services_by_name["OperatorService"]
_AGENTS = agent_pb2.DESCRIPTOR.services_by_name["AgentService"]
_RENEWAL = renewal_pb2.DESCRIPTOR.services_by_name["AgentRenewal"]
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["InstancesAdmin"]
_AUTHORITY = authority_pb2.DESCRIPTOR.services_by_name["AuthorityAdmin"]
_SERVICES = (
    (REGISTRATION, _REGISTRATION),
    (OPERATOR, _OPERATORS),
    (AGENT, _AGENTS),
    (AGENT, _RENEWAL),
    (ADMIN, _ADMIN),
    (ADMIN, _AUTHORITY),
)
_RULES: Mapping[str, tuple[Authentication, Permission | None, Rate | None]] = {
    REGISTRATION: (Authentication.ANONYMOUS, None, REGISTRATION_RATE),
    OPERATOR: (Authentication.CERTIFICATE, AS_OPERATOR, None),
    AGENT: (Authentication.CERTIFICATE, AS_AGENT, None),
    ADMIN: (Authentication.LOCAL, AS_ADMIN, None),
}

BLUEPRINT = Blueprint(
    name="instances",
    kinds=(*KINDS, *ROLLOUT_KINDS, ERRAND),
    keeps_telemetry=True,
    methods=tuple(
        row
        for listener, service in _SERVICES
        for authentication, permission, rate in (_RULES[listener],)
        for row in service_rows(
            service,
            permission,
            listener=listener,
            authentication=authentication,
            rate=rate,
            reads=("ListFreezes",) if service is _ADMIN else (),
            needs=Needs.WRITES,
        )
    ),
    grants={
        Role(ClientRole.AGENT): (Grant(permission=AS_AGENT),),
        access.VIEWER: access.GRANTS[access.VIEWER],
        # The role of an operator's certificate is the built-in one of that name.
        **built_in_grants(viewer=(access.VIEW,), operator=(AS_OPERATOR,), admin=(AS_ADMIN,)),
        Role("local"): (Grant(permission=AS_ADMIN),),
    },
    operator_roles=access.ROLES,
    explain={
        "group": ExplainedKind(
            summary="why a group has not the instances that it should have",
            permission=access.VIEW,
            explainer=lambda domain: domain.explainers["group"],
        ),
        "instance": ExplainedKind(
            summary="why an instance is not there, or not healthy",
            permission=access.VIEW,
            explainer=lambda domain: domain.explainers["instance"],
        ),
    },
    readers=lambda domain: domain.readers,
    resources=with_writing(RESOURCES, WRITERS),
    releases=AUDIENCE,
    freeze=Freezable(
        stops="creating, draining, replacing and deleting instances",
        scopes=("tenant/{tenant}", "tenant/{tenant}/group/{group}"),
    ),
    rollouts=lambda domain: (domain.templates,),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceOptions:
    """What the server's own settings decide, beside the configuration document."""

    shard: str
    state_directory: Path
    environment: Mapping[str, str]
    """Of which a provider may hand on to its machines what is harmless."""
    provider: str = ""
    """Overrides the document's provider; empty: the document's."""
    drain_on_scale_down: bool = True
    first_generation_tenants: frozenset[str] = frozenset()
    """Tenants whose operators expect the first numbering of group events."""
    silence: SilencePolicy | None = None
    machine: str = ""
    """The provider's id of the machine that this server runs on; the leader's address goes there."""
    userdata_hosts: frozenset[str] = frozenset()
    """Hosts of user data that may be in a private network."""
    advertise_listeners: bool = False
    """Tell agents the addresses that are really bound, instead of the document's `advertise`."""
    version: str = ""
    tenant_instances: int = quotas.DEFAULT
    """How many instances a tenant may have, unless the document says otherwise; 0: any number."""
    agent_command: tuple[str, ...] = ()
    """The program that local instances run; empty: our own agent."""
    agent_variables: frozenset[str] = frozenset()
    """Environment variables that a document may set for it, beside `NSTANCE_…`."""
    reserved_names: frozenset[str] = frozenset()
    """Further names of this server, which no workload gets a certificate for."""


def _host(place: str) -> str:
    return place.rpartition(":")[0].strip("[]")


class InstanceDomain:
    def __init__(
        self,
        kernel: Kernel,
        objects: Objects,
        nonces: SigningKeys,
        workloads: Authority,
        options: InstanceOptions,
        *,
        provider: Provider | None = None,
    ) -> None:
        """`workloads` signs the certificate files of instances, and nothing else.

        `provider` is for those who bring their own; without it the configuration names one.
        """
        self._kernel = kernel
        self._workloads = workloads
        self._nonces = nonces
        self._options = options
        self._bound: Mapping[str, Sequence[str]] = {}
        self._configured = asyncio.Event()
        self._revocations = kernel.revocations
        self._sessions = Sessions(self._revocations)
        self._instances = Instances(kernel.store)
        objects = recorded = RecordedObjects(objects, kernel.store)
        self._reports = InstanceReports(kernel.clock, kernel.store)
        places = PresenceRegistry(kernel.store, kernel.clock, channel=PLACES)
        self._activity = Activity(kernel.clock)
        self.errors = self._errors = ErrorFeed(kernel.clock, kernel.store)
        self._explanations = Explanations()
        self.store = kernel.store
        self.groups = self._groups = Groups(
            kernel.store,
            self._instances,
            objects,
            shard=options.shard,
            drain_on_scale_down=options.drain_on_scale_down,
            trust=self._trust_id,
            silence=options.silence,
            tenant_instances=options.tenant_instances,
            # With a provider of the settings, a document's own is never asked for.
            providers={*PROVIDERS, *provider_registry.names()} if options.provider else None,
            attention=kernel.attention,
        )
        self.templates = GroupTemplates(
            kernel.store, self._groups, self._instances, self._reports, kernel.clock
        )
        self._groups.hold_by(self.templates.hold)
        kernel.store.add_hook(self.templates.commit_hook, GROUP)
        self._infrastructure = Infrastructure(
            self._groups,
            self._instances,
            self._explanations,
            ProviderPlace(
                state_directory=options.state_directory,
                environment=options.environment,
                kind=options.provider,
                command=options.agent_command,
                variables=options.agent_variables,
            ),
            make=self._made,
            clock=kernel.clock,
            brought=provider,
        )
        self._errands = Errands(kernel.store, kernel.clock, channel=BLUEPRINT.name)
        on_behalf = OnBehalf(
            kernel.store,
            self._errands,
            self._groups,
            self._instances,
            Intents(
                self._instances,
                self._groups,
                nonces,
                kernel.clock,
                provider_kind=self._infrastructure.kind_of,
            ),
            self._explanations,
            machinery=lambda: self._machinery,
        )
        self.drains = RequestedDrains(self._instances, self._groups, kernel.clock)
        self.operator_groups = OperatorGroups(kernel.store, self._groups)
        self._groups.on_change(lambda _changed: self._configured.set())
        self._groups.on_change(lambda _changed: self._activity.keep(set(self._groups.views())))
        for authority in (kernel.authority, workloads):
            authority.subscribe(self._groups.trust_changed)
        self._images = Images(kernel.clock, kernel.store)
        self._downloads = Downloads(objects, kernel.clock, private_hosts=options.userdata_hosts)
        secrets = InstanceSecrets(objects, kernel.master, self._secret_tenants)
        self._files = FileMaker(
            objects=objects,
            secrets=secrets,
            authority=kernel.authority,
            workloads=workloads,
            addresses=self.addresses,
            now_ns=kernel.clock.now_ns,
            images=self._images.ids,
            reserved=self._reserved,
        )
        self.figures = FigureKeeper(
            kernel.telemetry, kernel.clock, prefix=figures.PREFIX, measures=figures.MEASURES
        )
        self._agents = InstanceAgentService(
            instances=self._instances,
            groups=self._groups,
            reports=self._reports,
            activity=self._activity,
            measured=self.figures,
            files=self._files,
            workloads=workloads,
            sessions=self._sessions,
            clock=kernel.clock,
            look_at=self.look_at,
            disconnected=self._agent_went,
            complain=self._errors.tell,
            places=places,
        )
        self._anywhere = AgentsAnywhere(kernel.store, self._instances, self._reports, self._agents, places)
        self._operators = OperatorService(
            store=kernel.store,
            instances=self._instances,
            groups=self._groups,
            reports=self._reports,
            authority=kernel.authority,
            clock=kernel.clock,
            look_at=self.look_at,
            create_on_demand=on_behalf.create,
            provider_status=on_behalf.status,
            errors=self._errors,
            activity=self._activity,
            event_generation=self._event_generation,
        )
        registration = RegistrationService(kernel.store, kernel.authority, nonces, self._groups, kernel.clock)
        admin = AdminService(
            store=kernel.store,
            groups=self._groups,
            authority=kernel.authority,
            nonces=nonces,
            secrets=secrets,
            findings=on_behalf.findings,
            clock=kernel.clock,
            revocations=self._revocations,
            reports=self._reports,
            operator_address=lambda: self.addresses().operator,
            look_at=self.look_at,
            accept=recorded.accept,
        )
        authorities = AuthorityService(kernel.store, kernel.authority, workloads, nonces, kernel.clock)
        renewal = RenewalService(self._instances, self._groups, kernel.authority, kernel.clock)
        self.services: Sequence[Service] = (
            Service(listener=REGISTRATION, descriptor=_REGISTRATION, servicer=registration),
            Service(listener=OPERATOR, descriptor=_OPERATORS, servicer=self._operators),
            Service(
                listener=AGENT,
                descriptor=_AGENTS,
                servicer=self._agents,
                raw_requests=("SubmitHealthReport", "ReportHealth"),
            ),
            Service(listener=AGENT, descriptor=_RENEWAL, servicer=renewal),
            Service(listener=ADMIN, descriptor=_ADMIN, servicer=admin),
            Service(listener=ADMIN, descriptor=_AUTHORITY, servicer=authorities),
        )
        overview = Overview(
            kernel.store, self._instances, self._groups, self._reports, on_behalf.findings, kernel.clock
        )
        self.readers = TokenReaders(kernel.door, access.GRANTS)
        self.explainers: Mapping[str, Explainer] = {
            "group": GroupExplainer(self._groups, self._explanations),
            "instance": InstanceExplainer(
                self._instances, self._explanations, kernel.clock, health=overview.health
            ),
        }
        remote = RemoteCalls({"operator": self._operators, "admin": admin, "authority": authorities})
        self.rest = InstanceRest(
            kernel, overview=overview, errors=self._errors, remote=remote, version=options.version
        )
        self.collectors: Sequence[Collector] = (
            *self.rest.collectors,
            InstanceCollector(self._instances, self._groups, self._reports, self._held),
            SessionCollector(self._sessions, domain=BLUEPRINT.name),
            ReconcileCollector(self._controllers),
        )

    @property
    def authenticators(self) -> Mapping[str, Mapping[Authentication, Authenticator]]:
        """By listener: each role has its own."""
        return {
            REGISTRATION: {Authentication.ANONYMOUS: anonymous},
            AGENT: {Authentication.CERTIFICATE: self._known_as(ClientRole.AGENT)},
            OPERATOR: {
                Authentication.CERTIFICATE: with_tokens(
                    self._known_as(ClientRole.OPERATOR),
                    self._kernel.door.of_header,
                    tenant_header=access.TENANT_HEADER,
                )
            },
        }

    def _known_as(self, role: ClientRole) -> Authenticator:
        return authenticator(role, self._revocations, self._kernel.authority)

    @property
    def server_names(self) -> Sequence[str]:
        advertised = self.addresses()
        places = (advertised.registration, advertised.agent, advertised.operator)
        return [SERVER_NAME, *(_host(place) for place in places if place)]

    def _secret_tenants(self, name: str) -> Sequence[str]:
        found = self._kernel.store.get(SECRET, "", name)
        return found.spec.tenants if found is not None else ()

    def _reserved(self) -> Iterable[str]:
        """Names and addresses by which a client may look for this server."""
        bound = (place for places in self._bound.values() for place in places)
        hosts = (
            _host(place.partition("://")[2] or place) for place in bound if not place.startswith("unix:")
        )
        return {*self.server_names, *self._options.reserved_names, *hosts} - UNSPECIFIED

    def _trust_id(self) -> str:
        """A name for the authorities whose certificates stand in files."""
        fleet = self._kernel.authority
        return f"{fleet.trust_id if fleet.changes else ''} {self._workloads.trust_id}"

    @property
    def routes(self) -> Sequence[Mount]:
        return self.rest.routes

    notices: Sequence[str] = ()

    # Life.

    async def prepare_here(self) -> None:
        """Nothing: which document is in force is read in the store."""

    async def take_over(self) -> None:
        """Put the document of the storage in force, if there is a good one and no other server was active."""
        await self.rest.family.take_over()
        self._reports.take_over()
        if self.store.succeeds and self._groups.loaded is not None:
            return  # nobody has asked for another than the one that is in force
        try:
            await self._groups.refresh()
        except NotFound:
            log.info("instances.no_configuration", shard=self._options.shard)
        except InvalidArgument as error:
            log.error("instances.bad_configuration", shard=self._options.shard, error=error.message)

    def opened(self, addresses: Mapping[str, Sequence[str]]) -> None:
        self._bound = addresses

    async def run_here(self) -> None:
        """Operators, and agents where they may be at several servers."""
        async with Boundary() as tasks:
            tasks.keep("instances/operators", self._operators.run)
            tasks.keep("instances/errors", self._errors.run_here)
            if self.store.shared:
                tasks.keep("instances/configuration", self._groups.follow)
                tasks.keep("instances/agents", self._anywhere.run_here)

    async def run_active(self) -> None:
        """Keep groups as they should be, answer other servers, and sweep."""
        async with Boundary() as tasks:
            tasks.keep("instances/machinery", self._run_machinery)
            tasks.keep("instances/templates", self.templates.run)
            tasks.keep("instances/rest", self.rest.family.run_active)
            if self.store.shared:
                tasks.keep("instances/errands", self._errands.run_active)
                tasks.keep("instances/errors", self._errors.run_active)
                tasks.keep("instances/everywhere", partial(self._anywhere.run_for_all, self._agent_went))

    async def _run_machinery(self) -> None:
        await self._configured.wait()
        await self._infrastructure.run()

    def _made(self, provider: Provider) -> Machinery:
        kernel = self._kernel
        return Machinery(
            store=kernel.store,
            instances=self._instances,
            groups=self._groups,
            reports=self._reports,
            files=self._files,
            provider=provider,
            nonces=self._nonces,
            authority=kernel.authority,
            addresses=self.addresses,
            images=self._images,
            downloads=self._downloads,
            machine=self._options.machine,
            clock=kernel.clock,
            complain=self._errors.tell,
            gone=self._gone,
        )

    def drain(self) -> None:
        self._operators.close()
        self._sessions.close_all(STOPPING)

    # What the parts ask of each other.

    def addresses(self) -> ServerAddresses:
        """Where agents find this server: as configured, or as bound."""
        configuration = self._groups.configuration
        if self._options.advertise_listeners or configuration is None:
            found = {
                name: next(iter(places), "").removeprefix("https://") for name, places in self._bound.items()
            }
            return ServerAddresses(
                registration=found.get(REGISTRATION, ""),
                agent=found.get(AGENT, ""),
                operator=found.get(OPERATOR, ""),
            )
        advertise = configuration.shard.advertise
        return ServerAddresses(
            registration=advertise.registration_addr,
            agent=advertise.agent_addr,
            operator=advertise.operator_addr,
        )

    def _controllers(self) -> Sequence[Reconciler]:
        return () if self._machinery is None else self._machinery.reconcilers

    def look_at(self, tenant: str, group: str) -> None:
        if self._machinery is not None:
            self._machinery.controller.look_at(tenant, group)

    @property
    def _machinery(self) -> Machinery | None:
        return self._infrastructure.machinery

    def _held(self) -> int:
        return 0 if self._machinery is None else self._machinery.controller.held

    def _agent_went(self, instance: Instance) -> None:
        if self._machinery is not None:
            self._machinery.suspect(instance)

    def _gone(self, instance: Instance) -> None:
        self._agents.forget(instance.name)
        self._files.forget(instance.name)
        self._sessions.close_where(lambda session: session.agent == instance.name, "deleted")

    def _event_generation(self, tenant: str) -> str:
        return "first" if tenant in self._options.first_generation_tenants else "second"
