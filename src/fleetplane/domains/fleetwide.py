"""The domain that every server has: freezes, explanations, rollouts, releases, `/v1/fleet` and `/apis/v1`."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from prometheus_client.registry import Collector

from fleetplane.domains.blueprint import Blueprint, Domain, Kernel, Service
from fleetplane.fleet.api import ResourceApi
from fleetplane.fleet.audit import AUDIT_ENTRIES, Verification
from fleetplane.fleet.explain import DomainExplainers, ExplainedKind, FleetExplanations, TokenReaders
from fleetplane.fleet.freeze import Freezable, FreezeSwitch
from fleetplane.fleet.freeze_objects import FREEZES, WRITERS
from fleetplane.fleet.people.account_kind import ACCOUNT
from fleetplane.fleet.people.objects import ACCOUNTS, TOKENS
from fleetplane.fleet.plans.records import PLAN, with_writing
from fleetplane.fleet.releases import agents_service
from fleetplane.fleet.releases.agents_service import DomainReleases, ReleaseService
from fleetplane.fleet.releases.check_in import CheckInPolicy, CheckIns
from fleetplane.fleet.releases.records import KINDS as RELEASE_KINDS
from fleetplane.fleet.releases.records import ReleaseKey
from fleetplane.fleet.releases.releases import Releases
from fleetplane.fleet.releases.resource import AGENT_VERSIONS, RELEASES, ReleaseCollector
from fleetplane.fleet.releases.shelf import Shelf
from fleetplane.fleet.releases.subject import FREEZE_DOMAIN, AgentVersions
from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.catalogue import CatalogueMember
from fleetplane.fleet.resources.common import VIEW
from fleetplane.fleet.rest import GRANTS, FleetRest
from fleetplane.fleet.rollouts.gates import GateSources
from fleetplane.fleet.rollouts.policies import ROLLOUT_POLICIES
from fleetplane.fleet.rollouts.policies import WRITERS as POLICY_WRITERS
from fleetplane.fleet.rollouts.records import KINDS as ROLLOUT_KINDS
from fleetplane.fleet.rollouts.resource import ROLLOUTS, RolloutCollector, RolloutExplainer
from fleetplane.fleet.rollouts.rollouts import Rollouts
from fleetplane.fleet.rollouts.settings import RolloutSettings
from fleetplane.fleet.servers import (
    SERVERS,
    OwnFacts,
    ServerNeighbours,
    ServerSpecView,
    ServerStatusView,
    shown,
)
from fleetplane.gen.fleetplane.fleet.v1 import releases_pb2
from fleetplane.kernel.access import Grant, Permission, Role
from fleetplane.kernel.audit.chain import ChainEntry
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.freeze import FREEZE
from fleetplane.kernel.identity.bindings import Bindings
from fleetplane.kernel.identity.tokens import TokenRecord
from fleetplane.kernel.objects import Objects
from fleetplane.kernel.reconcile import LEASE
from fleetplane.kernel.reconcile.reconciler import ReconcileCollector
from fleetplane.kernel.sessions import SessionCollector
from fleetplane.kernel.store.notifiers.notifier import NO_BUS
from fleetplane.kernel.store.servers.engine import ServerReport
from fleetplane.rpc import Authentication, Authenticator, service_rows
from fleetplane.web.documents import console_mounts
from fleetplane.web.ops import Mount

SWEEP_SECONDS = 3600.0
DIRECTORY = "releases"
"""In the data directory."""
FREEZABLE = Freezable(stops="upgrading agents", scopes=("agents/{domain}",))
_ADMIN = releases_pb2.DESCRIPTOR.services_by_name["ReleaseAdmin"]
_READS = ("ListReleases", "GetRelease")
LISTENER = "admin"
MANAGE = Permission("fleet.manage")


BLUEPRINT = Blueprint(
    name="fleetwide",
    kinds=(PLAN, *ROLLOUT_KINDS, *RELEASE_KINDS, ACCOUNT, FREEZE, LEASE),
    methods=(),
    grants={Role("local"): (Grant(permission=MANAGE),), **GRANTS},
    operator_roles=tuple(GRANTS),
    explain={
        "rollout": ExplainedKind(
            summary="why a rollout waits, has halted or has gone back",
            permission=VIEW,
            explainer=lambda domain: domain.rollout_explainer,
        )
    },
    readers=lambda domain: domain.readers,
    resources=with_writing(
        (
            FREEZES,
            TOKENS,
            ACCOUNTS,
            SERVERS,
            AUDIT_ENTRIES,
            ROLLOUT_POLICIES,
            ROLLOUTS,
            RELEASES,
            AGENT_VERSIONS,
        ),
        {**WRITERS, **POLICY_WRITERS},
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseOptions:
    """Where files of releases lie, how agents ask, and what vouches for it all."""

    directory: Path
    key: ReleaseKey
    policy: CheckInPolicy
    shared: Objects | None = None
    """Where other servers find the files, too."""


class ReleaseSide:
    def __init__(
        self,
        kernel: Kernel,
        running: Iterable[tuple[Blueprint, Domain]],
        options: ReleaseOptions,
    ) -> None:
        self._clock: Clock = kernel.clock
        audiences = [(one.name, one.releases, domain) for one, domain in running if one.releases is not None]
        registers = {name: audience.register(domain, kernel.store) for name, audience, domain in audiences}
        self.releases = Releases(
            kernel.store, kernel.clock, Shelf(options.directory, options.shared), options.key
        )
        self.check_ins = CheckIns(kernel.store, kernel.clock, self.releases, registers, options.policy)
        self.subject = AgentVersions(kernel.store, self.check_ins)
        rows = service_rows(
            _ADMIN, MANAGE, listener=LISTENER, authentication=Authentication.LOCAL, reads=_READS
        )
        self.services: Sequence[Service] = (
            Service(
                listener=LISTENER,
                descriptor=_ADMIN,
                servicer=ReleaseService(self.releases),
                rows=tuple(rows),
            ),
            *(
                Service(
                    listener=audience.listener,
                    descriptor=agents_service.SERVICE,
                    servicer=DomainReleases(self.check_ins, name, registers[name]),
                    rows=tuple(audience.rows()),
                )
                for name, audience, _ in audiences
            ),
        )
        self.collectors: Sequence[Collector] = (ReleaseCollector(kernel.store, self.check_ins),)

    def __repr__(self) -> str:
        return f"<ReleaseSide {self.releases!r}>"

    async def run_here(self) -> None:
        """Note whom this server hears, until cancelled."""
        await self.check_ins.run_here()

    async def run_active(self) -> None:
        """Forget agents that are gone, now and then."""
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            await self.check_ins.sweep()


async def release_options(
    kernel: Kernel,
    state_directory: Path,
    *,
    shared: Objects | None,
    check_in_seconds: float,
    hello_seconds: float,
) -> ReleaseOptions:
    """The options of a server with these settings."""
    key = await ReleaseKey.load_or_create(kernel.store, kernel.master)
    policy = CheckInPolicy(every_seconds=check_in_seconds, hello_seconds=hello_seconds)
    return ReleaseOptions(directory=state_directory / DIRECTORY, key=key, policy=policy, shared=shared)


class FleetwideDomain:
    def __init__(
        self,
        kernel: Kernel,
        running: Iterable[tuple[Blueprint, Domain]],
        *,
        version: str,
        releases: ReleaseOptions | None = None,
        gates: RolloutSettings | None = None,
        verify_audit: Verification | None = None,
        beside: ServerNeighbours | None = None,
    ) -> None:
        """`running` are the domains of this server, each with what it declares; `beside` is how it knows of
        other servers.

        Without `releases` their agents are not upgraded from here. `gates` is what gates of rollouts may ask
        outside of it; without `verify_audit` the audit log is not verified from elsewhere.
        """
        pairs = tuple(running)
        freezable = {one.name: one.freeze for one, _ in pairs if one.freeze is not None}
        if releases is not None:
            freezable[FREEZE_DOMAIN] = FREEZABLE
        self.switch = FreezeSwitch(kernel.store, kernel.clock, freezable)
        self.explanations = FleetExplanations(
            self.switch.freezes, {one.name: _explainers(one, domain) for one, domain in pairs if one.explain}
        )
        self._kernel = kernel
        self._version = version
        self._operator_roles = {
            str(role) for one in (*(one for one, _ in pairs), BLUEPRINT) for role in one.operator_roles
        }
        self._permissions: dict[str, set[Permission]] = {}
        for one in (*(one for one, _ in pairs), BLUEPRINT):
            for role, grants in one.grants.items():
                self._permissions.setdefault(str(role), set()).update(grant.permission for grant in grants)
        self._domains = tuple(one.name for one, _ in pairs)
        self._beside = beside or ServerNeighbours(name=socket.gethostname())
        self._sessions = tuple(
            found for _, domain in pairs for found in domain.collectors if isinstance(found, SessionCollector)
        )
        self._controllers = tuple(found for _, domain in pairs for found in domain.collectors)
        self._started_at_ns = kernel.clock.now_ns()
        self.apis = ResourceApi(
            kernel,
            members_of((*pairs, (BLUEPRINT, self))),
            (one.grants for one in (*(one for one, _ in pairs), BLUEPRINT)),
            version=version,
            explanations=self.explanations,
            switch=self.switch,
        )
        subjects = [found for one, domain in pairs if one.rollouts for found in one.rollouts(domain)]
        self.releases: ReleaseSide | None = None
        if releases is not None:
            self.releases = ReleaseSide(kernel, pairs, releases)
            subjects.append(self.releases.subject)
        self.rollouts = Rollouts(
            kernel.store, kernel.clock, subjects, self.switch.freezes, GateSources(gates)
        )
        self.rollout_explainer = RolloutExplainer(self.rollouts, kernel.clock)
        self.readers = TokenReaders(kernel.door, GRANTS)
        self.explanations.domains[BLUEPRINT.name] = _explainers(BLUEPRINT, self)
        self.rest = FleetRest(
            kernel,
            self.explanations,
            self.switch,
            self.rollouts,
            version=version,
            verify_audit=verify_audit,
        )
        self.services: Sequence[Service] = self.releases.services if self.releases is not None else ()
        self.authenticators: Mapping[str, Mapping[Authentication, Authenticator]] = {}
        self.server_names: Sequence[str] = ()
        self.collectors: Sequence[Collector] = (
            RolloutCollector(self.rollouts),
            ReconcileCollector(lambda: self.rollouts.reconcilers),
            *(self.releases.collectors if self.releases is not None else ()),
        )
        self.notices: Sequence[str] = ()

    def __repr__(self) -> str:
        return f"<FleetwideDomain {self.explanations!r}>"

    def token_records(self) -> Sequence[TokenRecord]:
        """Tokens of operators and programs; other domains keep tokens of their own beside these."""
        records = self._kernel.operators.tokens.records()
        return [one for one in records if one.roles and self._operator_roles.issuperset(one.roles)]

    async def audit_entries(self, before: int | None, limit: int) -> Sequence[ChainEntry]:
        """So many entries of the audit log, newest first; those that were archived are not among them."""
        store = self._kernel.store
        found: list[ChainEntry] = []
        seq = store.audit_head().seq if before is None else before - 1
        while seq > 0 and len(found) < limit:
            row = await store.audit_row(seq)
            if row is None:
                break
            found.append(msgspec.json.decode(row.entry, type=ChainEntry))
            seq -= 1
        return found

    def permissions_of_token(self, name: str, path: str) -> set[Permission]:
        """What a token holds by its own roles, and by roles that were bound to it at a path and below."""
        roles = {
            role for one in self._kernel.operators.tokens.records() if one.name == name for role in one.roles
        }
        roles |= {
            one.spec.role
            for one in Bindings(self._kernel.store).of((f"token/{name}",))
            if scopes.covers(path, one.spec.scope)
        }
        return {permission for role in roles for permission in self._permissions.get(role, ())}

    @property
    def audit_length(self) -> int:
        """The number of the last entry of the audit log."""
        return self._kernel.store.audit_head().seq

    async def revoke_token(self, name: str, *, actor: str) -> bool:
        """Refuse a token from now on; what was bound to it is not left to another of its name."""
        if not await self._kernel.operators.tokens.revoke(name, actor=actor):
            return False
        await Bindings(self._kernel.store).forget(f"token/{name}", actor=actor)
        return True

    def servers(self) -> Iterator[tuple[ServerSpecView, ServerStatusView]]:
        """This server, and those that share its database."""
        found = self._kernel.store.statistics()
        own = OwnFacts(
            domains=self._domains,
            version=self._version,
            revision=found.revision,
            started_at_ns=self._started_at_ns,
            writable=found.writable,
            watchers=found.watchers,
            level=found.level,
            supported_level=found.supported_level,
            report=self._report(),
        )
        return shown(own, self._beside, self._kernel.clock.now_ns())

    def _report(self) -> ServerReport:
        bell = self._kernel.store.bell
        return ServerReport(
            agents=sum(one.open for one in self._sessions),
            controllers=sum(
                one.held
                for one in (*self._controllers, *self.collectors)
                if isinstance(one, ReconcileCollector)
            ),
            bus=bell.state if bell is not None else NO_BUS,
        )

    @property
    def routes(self) -> Sequence[Mount]:
        return (*self.rest.routes, *self.apis.routes, *console_mounts())

    async def prepare_here(self) -> None:
        """What is asked of every server is read from the store."""

    async def take_over(self) -> None:
        await self.rest.take_over()
        await self.apis.take_over()
        self.rollouts.take_over()

    def opened(self, addresses: Mapping[str, Sequence[str]]) -> None:
        pass

    async def run_here(self) -> None:
        """Follow what watches tell, and look at the servers beside this one."""
        async with Boundary() as tasks:
            tasks.keep("fleetwide/apis", self.apis.run_here)
            tasks.keep("fleetwide/servers", self._look_beside)
            if self.releases is not None:
                tasks.keep("fleetwide/releases", self.releases.run_here)

    async def _look_beside(self) -> None:
        if (roster := self._beside.roster) is not None:
            await roster.run(lambda: self.apis.watching.streams > 0, self._report)

    async def run_active(self) -> None:
        """Drive rollouts, and sweep."""
        async with Boundary() as tasks:
            tasks.keep("fleetwide/apis", self.apis.run_active)
            tasks.keep("fleetwide/rest", self.rest.run_active)
            tasks.keep("fleetwide/rollouts", self.rollouts.run)
            if self.releases is not None:
                tasks.keep("fleetwide/releases", self.releases.run_active)

    def drain(self) -> None:
        self.apis.watching.end()


def members_of(running: Iterable[tuple[Blueprint, Domain]]) -> Iterator[CatalogueMember]:
    """The resources of running domains, for the resource API."""
    for blueprint, domain in running:
        for resource in blueprint.resources:
            yield CatalogueMember(resource=resource, domain=blueprint.name, running=domain)


def _explainers(blueprint: Blueprint, domain: Domain) -> DomainExplainers[object]:
    return DomainExplainers(
        readers=blueprint.readers(domain) if blueprint.readers is not None else None,
        kinds={word: (kind, kind.explainer(domain)) for word, kind in blueprint.explain.items()},
    )
