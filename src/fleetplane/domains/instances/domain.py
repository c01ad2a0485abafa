"""The instances domain: its kinds, methods, services and controllers, in one place."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
from prometheus_client.registry import Collector

from fleetplane.domains.blueprint import Blueprint, Kernel, Service
from fleetplane.domains.instances import access
from fleetplane.domains.instances.admin_service import AdminService
from fleetplane.domains.instances.agent_service import AgentService
from fleetplane.domains.instances.authority_service import AuthorityService
from fleetplane.domains.instances.credentials import ClientRole, anonymous, authenticator
from fleetplane.domains.instances.downloads import Downloads
from fleetplane.domains.instances.error_feed import ErrorFeed
from fleetplane.domains.instances.files import Addresses, FileMaker, Secrets
from fleetplane.domains.instances.groups import Groups, SilencePolicy
from fleetplane.domains.instances.images import Images
from fleetplane.domains.instances.infrastructure import Infrastructure, ProviderPlace
from fleetplane.domains.instances.kinds import KINDS, Instance
from fleetplane.domains.instances.listeners import Activity
from fleetplane.domains.instances.machinery import Machinery
from fleetplane.domains.instances.metrics import InstanceCollector
from fleetplane.domains.instances.operator_service import OperatorService
from fleetplane.domains.instances.overview import Overview
from fleetplane.domains.instances.providers.contract import Provider
from fleetplane.domains.instances.registration_service import RegistrationService
from fleetplane.domains.instances.registry import Instances
from fleetplane.domains.instances.renewal_service import RenewalService
from fleetplane.domains.instances.reports import Reports
from fleetplane.domains.instances.rest_side import RestSide
from fleetplane.gen.fleetplane.admin.v1 import authority_pb2
from fleetplane.gen.fleetplane.admin.v1 import instances_pb2 as admin_pb2
from fleetplane.gen.fleetplane.instances.v1 import renewal_pb2
from fleetplane.gen.nstance.v1 import agent_pb2, operator_pb2, registration_pb2
from fleetplane.kernel.access import Grant, Permission, Role
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.objects import Objects
from fleetplane.kernel.reconcile import Explanations, Reconciler
from fleetplane.kernel.reconcile.metrics import ReconcileCollector
from fleetplane.kernel.session_metrics import SessionCollector
from fleetplane.kernel.sessions import STOPPING, Sessions
from fleetplane.rpc import Authentication, Authenticator, MethodRow, Rate
from fleetplane.web.ops import Mount

log = structlog.get_logger(__name__)

REGISTRATION, OPERATOR, AGENT, ADMIN = "registration", "operator", "agent", "admin"
LISTENERS = (REGISTRATION, OPERATOR, AGENT, ADMIN)
AS_AGENT, AS_OPERATOR, AS_ADMIN = (Permission(f"instances.{role}") for role in (AGENT, OPERATOR, ADMIN))
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
    kinds=KINDS,
    methods=tuple(
        MethodRow(
            path=f"/{service.full_name}/{method.name}",
            listener=listener,
            authentication=_RULES[listener][0],
            permission=_RULES[listener][1],
            rate=_RULES[listener][2],
        )
        for listener, service in _SERVICES
        for method in service.methods
    ),
    grants={
        Role(ClientRole.AGENT): (Grant(permission=AS_AGENT),),
        Role(ClientRole.OPERATOR): (Grant(permission=AS_OPERATOR),),
        Role("local"): (Grant(permission=AS_ADMIN),),
    },
    operator_roles=access.ROLES,
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


class InstanceDomain:
    def __init__(
        self,
        kernel: Kernel,
        objects: Objects,
        nonces: SigningKeys,
        options: InstanceOptions,
        *,
        provider: Provider | None = None,
    ) -> None:
        """`provider` is for those who bring their own; without it the configuration names one."""
        self._kernel = kernel
        self._nonces = nonces
        self._options = options
        self._bound: Mapping[str, Sequence[str]] = {}
        self._configured = asyncio.Event()
        self._revocations = kernel.revocations
        self._sessions = Sessions(self._revocations)
        self._instances = Instances(kernel.store)
        self._reports = Reports(kernel.clock)
        self._activity = Activity(kernel.clock)
        self._errors = ErrorFeed(kernel.clock)
        self._explanations = Explanations()
        self._groups = Groups(
            kernel.store,
            self._instances,
            objects,
            shard=options.shard,
            drain_on_scale_down=options.drain_on_scale_down,
            trust=lambda: kernel.authority.trust_id if kernel.authority.changes else "",
            silence=options.silence,
        )
        self._infrastructure = Infrastructure(
            self._groups,
            self._instances,
            self._explanations,
            ProviderPlace(
                state_directory=options.state_directory,
                environment=options.environment,
                kind=options.provider,
            ),
            make=self._made,
            clock=kernel.clock,
            brought=provider,
        )
        self._groups.on_change(lambda _changed: self._configured.set())
        self._groups.on_change(lambda _changed: self._activity.keep(set(self._groups.views())))
        kernel.authority.subscribe(self._groups.trust_changed)
        self._images = Images(kernel.clock)
        self._downloads = Downloads(objects, kernel.clock, private_hosts=options.userdata_hosts)
        secrets = Secrets(objects, kernel.master)
        self._files = FileMaker(
            objects=objects,
            secrets=secrets,
            authority=kernel.authority,
            addresses=self.addresses,
            now_ns=kernel.clock.now_ns,
            images=self._images.ids,
        )
        self._agents = AgentService(
            instances=self._instances,
            groups=self._groups,
            reports=self._reports,
            activity=self._activity,
            files=self._files,
            authority=kernel.authority,
            sessions=self._sessions,
            clock=kernel.clock,
            look_at=self.look_at,
            disconnected=self._agent_went,
            complain=self._errors.tell,
        )
        self._operators = OperatorService(
            store=kernel.store,
            instances=self._instances,
            groups=self._groups,
            reports=self._reports,
            authority=kernel.authority,
            clock=kernel.clock,
            look_at=self.look_at,
            create_on_demand=self._create_on_demand,
            provider_status=self._provider_status,
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
            explanations=self._explanations,
            clock=kernel.clock,
            revocations=self._revocations,
            reports=self._reports,
            operator_address=lambda: self.addresses().operator,
            look_at=self.look_at,
        )
        authorities = AuthorityService(kernel.store, kernel.authority, nonces, kernel.clock)
        renewal = RenewalService(self._instances, self._groups, kernel.authority, kernel.clock)
        self.services: Sequence[Service] = (
            Service(listener=REGISTRATION, descriptor=_REGISTRATION, servicer=registration),
            Service(listener=OPERATOR, descriptor=_OPERATORS, servicer=self._operators),
            Service(
                listener=AGENT,
                descriptor=_AGENTS,
                servicer=self._agents,
                raw_requests=("SubmitHealthReport",),
            ),
            Service(listener=AGENT, descriptor=_RENEWAL, servicer=renewal),
            Service(listener=ADMIN, descriptor=_ADMIN, servicer=admin),
            Service(listener=ADMIN, descriptor=_AUTHORITY, servicer=authorities),
        )
        overview = Overview(
            kernel.store, self._instances, self._groups, self._reports, self._explanations, kernel.clock
        )
        self.rest = RestSide(kernel, overview=overview, errors=self._errors, version=options.version)
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
            OPERATOR: {Authentication.CERTIFICATE: self._known_as(ClientRole.OPERATOR)},
        }

    def _known_as(self, role: ClientRole) -> Authenticator:
        return authenticator(role, self._revocations, self._kernel.authority)

    @property
    def server_names(self) -> Sequence[str]:
        advertised = self.addresses()
        places = (advertised.registration, advertised.agent, advertised.operator)
        return ["nstance-server", *(place.rpartition(":")[0].strip("[]") for place in places if place)]

    @property
    def routes(self) -> Sequence[Mount]:
        return self.rest.routes

    notices: Sequence[str] = ()

    # Life.

    async def prepare(self) -> None:
        """Put the stored configuration in force, if there is a good one."""
        try:
            await self._groups.refresh()
        except NotFound:
            log.info("instances.no_configuration", shard=self._options.shard)
        except InvalidArgument as error:
            log.error("instances.bad_configuration", shard=self._options.shard, error=error.message)

    def opened(self, addresses: Mapping[str, Sequence[str]]) -> None:
        self._bound = addresses

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._operators.run())
            tasks.create_task(self._run_machinery())

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
        self.rest.drain()
        self._sessions.close_all(STOPPING)

    # What the parts ask of each other.

    def addresses(self) -> Addresses:
        """Where agents find this server: as configured, or as bound."""
        configuration = self._groups.configuration
        if self._options.advertise_listeners or configuration is None:
            found = {
                name: next(iter(places), "").removeprefix("https://") for name, places in self._bound.items()
            }
            return Addresses(
                registration=found.get(REGISTRATION, ""),
                agent=found.get(AGENT, ""),
                operator=found.get(OPERATOR, ""),
            )
        advertise = configuration.shard.advertise
        return Addresses(
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

    def _required(self) -> Machinery:
        if self._machinery is None:
            raise FailedPrecondition("no configuration is in force, so there is nobody to make instances")
        return self._machinery

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

    async def _provider_status(self, instance: Instance) -> str:
        return await self._required().observations.look_at(instance)

    async def _create_on_demand(
        self, tenant: str, group: str, *, name: str, template: str, instance_type: str, subnet_pool: str,
        vars: Mapping[str, str], actor: str,  # noqa: A002  # the word of the wire
    ) -> Instance:  # fmt: skip
        machinery = self._required()
        view = self._groups.view(tenant, group)
        if view is None:
            raise NotFound(f"group {group!r} is not known", field="config.group")
        chosen = self._groups.chosen(
            view, template=template, instance_type=instance_type, subnet_pool=subnet_pool, variables=vars
        )
        return await machinery.launcher.create(chosen, name=name, on_demand=True, actor=actor, variables=vars)
