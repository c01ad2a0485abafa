"""The REST half of the proxies domain, composed.

Everything under `/v1`, the OpenAPI document with its page, and the public keys of our tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

import msgspec
import structlog
from prometheus_client.registry import Collector

from fleetplane.domains.proxies.access import Access
from fleetplane.domains.proxies.agents.handover import Handovers
from fleetplane.domains.proxies.agents.live import CHANNEL
from fleetplane.domains.proxies.agents.machines import Machines
from fleetplane.domains.proxies.agents.ports import (
    AgentPresence,
    CommandPort,
    Deployer,
    NobodyThere,
    ReportedRecords,
    Revoker,
)
from fleetplane.domains.proxies.agents.registry import Agents
from fleetplane.domains.proxies.agents.runs import ProxyChannel, ProxyRuns
from fleetplane.domains.proxies.audit import AuditNotes, AuditTrail
from fleetplane.domains.proxies.rest.access_lists import AccessListRoutes
from fleetplane.domains.proxies.rest.accounts import AccountRoutes
from fleetplane.domains.proxies.rest.agents import AgentRoutes
from fleetplane.domains.proxies.rest.common import Gatekeeper
from fleetplane.domains.proxies.rest.deployments import DeploymentRoutes, run_routes
from fleetplane.domains.proxies.rest.dns_zones import DnsZoneRoutes
from fleetplane.domains.proxies.rest.hosts import ServedRoutes
from fleetplane.domains.proxies.rest.nodes import MachineRoutes, ObservedRoutes, RenderedRoutes
from fleetplane.domains.proxies.rest.organizations import PlaceRoutes
from fleetplane.domains.proxies.rest.streams import StreamRoutes
from fleetplane.domains.proxies.rest.telemetry import RecordRoutes, TrafficRoutes
from fleetplane.domains.proxies.rest.versions import VersionRoutes
from fleetplane.domains.proxies.serving.bulk_changes import Rewriting
from fleetplane.domains.proxies.serving.certificates import Certificates, OfferedIssuers
from fleetplane.domains.proxies.serving.dns_zones import DnsZoneRecords
from fleetplane.domains.proxies.serving.hosts import Hosts
from fleetplane.domains.proxies.serving.named import AccessLists, Streams
from fleetplane.domains.proxies.serving.private_keys import Vault
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.domains.proxies.tenancy.logins import ProxyBearers, ProxyLogins, logins_of
from fleetplane.domains.proxies.tenancy.members import ApiTokens, Members
from fleetplane.domains.proxies.tenancy.organizations import OrganizationPlaces, TenancyPlaces
from fleetplane.domains.proxies.tenancy.quotas import QuotaOptions, Quotas
from fleetplane.domains.proxies.tenancy.users import ADMIN_EMAIL, FAMILY, USER_RULES, Users
from fleetplane.fleet.people.account_kind import subject_of
from fleetplane.fleet.people.account_migration import migrate
from fleetplane.fleet.people.directory import LoginDirectory
from fleetplane.fleet.people.door import Admitted, Authenticators
from fleetplane.fleet.runs.runs import Runs
from fleetplane.kernel.access import EVERYWHERE
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import Commands
from fleetplane.kernel.identity import OneTimeTokens
from fleetplane.kernel.store import Store
from fleetplane.rpc import Needs
from fleetplane.web import documents
from fleetplane.web.documents import Documents, WebDocument
from fleetplane.web.ops import Mount
from fleetplane.web.rest.family import FamilyKernel, FamilyText, RestFamily
from fleetplane.web.rest.gateway import REQUESTS_PER_MINUTE
from fleetplane.web.rest.routes import RouteTable

log = structlog.get_logger(__name__)

PREFIX = "/v1"


class ProxyRestKernel(FamilyKernel, Protocol):
    """What of the kernel this half stands on."""

    @property
    def door(self) -> Authenticators: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RestOptions:
    version: str
    admin_email: str = ADMIN_EMAIL
    admin_password: str = ""
    """Of the first administrator; made up and shown once when empty."""
    anyone_may_found: bool = False
    """Whether every user may create organisations."""
    requests_per_minute: int = REQUESTS_PER_MINUTE
    quotas: QuotaOptions = field(default_factory=QuotaOptions)


class ProxyRest:
    """See `create`; the constructor takes what has been loaded."""

    def __init__(
        self,
        kernel: ProxyRestKernel,
        options: RestOptions,
        *,
        workspaces: Workspaces,
        vault: Vault,
        logins: ProxyLogins,
        tokens: OneTimeTokens,
        presence: AgentPresence,
        commander: CommandPort,
        records: ReportedRecords,
        offered: OfferedIssuers,
        revoker: Revoker,
        deployer: Deployer,
        runs: ProxyRuns,
    ) -> None:
        store, clock = kernel.store, kernel.clock
        self._options = options
        self._store = store
        self._master = kernel.master
        self._logins = logins
        access = Access(store)
        self._users = Users(
            store, kernel.master, clock, logins, kernel.door.linked, partial(_holds_something, kernel.door)
        )
        api_tokens = ApiTokens(store, clock, tokens, workspaces)
        self.agents = agents = Agents(store, clock, workspaces, presence)
        hosts = Hosts(store, clock, workspaces)
        self.certificates = Certificates(store, clock, workspaces, vault, offered)
        """For the issuers of certificates."""
        self.rewriting = rewriting = Rewriting(store, clock, workspaces)
        kernel.door.tree.add(OrganizationPlaces(store))
        kernel.door.directories.add(
            LoginDirectory(FAMILY, store, USER_RULES, logins, shown=lambda user: user.spec.email)
        )
        self.gatekeeper = Gatekeeper(access, ProxyBearers(store, logins, api_tokens, access, kernel.door))
        """For whatever else takes a bearer token, such as a stream of events."""
        self.access = access
        notes = AuditNotes(store, kernel.master)
        self.quotas = Quotas(store, options.quotas)
        self.handovers = Handovers(workspaces=workspaces, commander=commander, deployer=deployer)
        self.table = RouteTable(
            PREFIX,
            (
                *AccountRoutes(store, access, self._users, logins, api_tokens, kernel.door).routes(),
                *PlaceRoutes(
                    store,
                    access,
                    self._users,
                    TenancyPlaces(store, clock, workspaces),
                    Members(store, workspaces),
                    AuditTrail(store, notes, self._email_of),
                    self.quotas,
                    anyone_may_found=options.anyone_may_found,
                ).routes(),
                *AgentRoutes(store, clock, agents, presence, commander, access).routes(),
                *ObservedRoutes(clock, agents, self.handovers, self.certificates).routes(),
                *run_routes(runs).routes(),
                *MachineRoutes(agents, Machines(store, clock)).routes(),
                *DeploymentRoutes(store, workspaces, agents, presence, deployer).routes(),
                *RecordRoutes(store, clock, records).routes(),
                *TrafficRoutes(store, clock, records).routes(),
                *RenderedRoutes(workspaces, agents).routes(),
                *AccessListRoutes(store, AccessLists(store, clock, workspaces)).routes(),
                *DnsZoneRoutes(store, DnsZoneRecords(store, clock, workspaces, kernel.master)).routes(),
                *StreamRoutes(store, Streams(store, clock, workspaces)).routes(),
                *ServedRoutes(store, clock, access, hosts, self.certificates, revoker).routes(),
                *VersionRoutes(store, workspaces, agents, rewriting, commander, access).routes(),
            ),
            strict_queries=True,
        )
        access.require_complete(self.table.permissions)
        self.family = RestFamily(
            kernel,
            self.table,
            self.gatekeeper,
            domain="proxies",
            requests_per_minute=options.requests_per_minute,
            sweeps=(self._sweep_logins,),
            text=FamilyText(
                title="Fleetplane proxies",
                version=options.version,
                description=(
                    "Fleets of NGINX: virtual hosts, upstreams, certificates and the agents that serve them."
                ),
                summary="REST: fleets of NGINX",
                document_path="/openapi.json",
                document_summary="the same, for programs",
            ),
        )
        self.notices: Sequence[str] = ()

    @classmethod
    async def create(
        cls,
        kernel: ProxyRestKernel,
        options: RestOptions,
        *,
        workspaces: Workspaces,
        vault: Vault,
        presence: AgentPresence,
        commander: CommandPort,
        records: ReportedRecords,
        offered: OfferedIssuers | None = None,
        revoker: Revoker | None = None,
        deployer: Deployer | None = None,
        tokens: OneTimeTokens | None = None,
        runs: ProxyRuns | None = None,
    ) -> ProxyRest:
        """With its keys and tokens, which are made or loaded unless they are given."""
        logins = logins_of(kernel.store, kernel.master, kernel.clock)
        await logins.load()
        if tokens is None:
            tokens = OneTimeTokens(kernel.store, kernel.master, kernel.clock)
            await tokens.load()
        return cls(
            kernel,
            options,
            workspaces=workspaces,
            vault=vault,
            logins=logins,
            tokens=tokens,
            presence=presence,
            commander=commander,
            records=records,
            offered=offered or OfferedIssuers(),
            revoker=revoker or NobodyThere(),
            deployer=deployer or NobodyThere(),
            runs=runs or _no_runs(kernel.store, kernel.clock),
        )

    def _email_of(self, user: str) -> str | None:
        found = self._users.find(user)
        return found.spec.email if found is not None else None

    async def take_over(self) -> None:
        """Bring what an earlier version wrote up to date, and make the first administrator."""
        await self.family.take_over()
        await migrate(self._store, self._master, USER_RULES)
        email = self._options.admin_email
        password = await self._users.first_administrator(email, self._options.admin_password)
        if password is not None:
            self.notices = (
                "The first administrator was made. This password is shown once:",
                f"  e-mail    {email}",
                f"  password  {password}",
            )

    @property
    def collectors(self) -> Sequence[Collector]:
        return self.family.collectors

    @cached_property
    def routes(self) -> Sequence[Mount]:
        """For the web listener."""
        pages = Documents(
            {
                "/docs": documents.file("docs.html", "text/html; charset=utf-8"),
                "/docs/docs.js": documents.file("docs.js", "text/javascript; charset=utf-8"),
                "/docs/docs.css": documents.file("docs.css", "text/css; charset=utf-8"),
                "/.well-known/jwks.json": WebDocument(
                    content_type="application/json",
                    content=lambda: msgspec.json.encode(self._logins.jwks()),
                ),
            }
        )
        summaries = {"/docs": "the REST API, to read and to try"}
        return (
            *self.family.mounts,
            *(
                Mount(
                    path=path,
                    app=pages,
                    summary=summaries.get(path, ""),
                    is_page=path == "/docs",
                    needs=Needs.STORE,  # the keys of tokens are among them
                )
                for path in pages.paths
            ),
        )

    async def run_active(self) -> None:
        """Forget what has expired and change keys in time, until cancelled."""
        await self.family.run_active()

    async def _sweep_logins(self) -> None:
        kid = await self._logins.sweep()
        if kid is not None:
            log.info("proxies.keys_rotated", kid=kid)


def _holds_something(door: Authenticators, account: str) -> bool:
    """Whether an account that is no user of proxies was given a role at any of their scopes."""
    subject = subject_of(account)
    given = door.given(Admitted(name=subject, subject=subject))
    return any(one.scope == EVERYWHERE or one.scope.startswith("org/") for one in given)


def _no_runs(store: Store, clock: Clock) -> ProxyRuns:
    """Where no agent can be connected: runs are listed, and none finds a target."""
    nobody = NobodyThere()
    ledger = Commands(store, clock, channel=CHANNEL, courier=nobody)
    return Runs(store, clock, ProxyChannel(store, ledger=ledger, is_present=nobody.is_present))
