"""The half of the proxies domain that talks to people and programs, put together.

Everything under `/v1`, the OpenAPI document with its page, and the public keys of our tokens.
Litestar is loaded here, when this half is built, and by nobody who does not run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import msgspec
import structlog
from prometheus_client.registry import Collector

from fleetplane.domains.proxies.access import Access, Caller
from fleetplane.domains.proxies.accounts import ADMIN_EMAIL, Accounts
from fleetplane.domains.proxies.agents import Agents
from fleetplane.domains.proxies.audit_notes import AuditNotes
from fleetplane.domains.proxies.audit_trail import AuditTrail
from fleetplane.domains.proxies.callers import Gatekeeper
from fleetplane.domains.proxies.certificates import Certificates, Offered
from fleetplane.domains.proxies.hosts import Hosts
from fleetplane.domains.proxies.members import ApiTokens, Members
from fleetplane.domains.proxies.places import Places
from fleetplane.domains.proxies.ports import Commander, NobodyThere, Presence, Records, Revoker
from fleetplane.domains.proxies.rest_accounts import AccountRoutes
from fleetplane.domains.proxies.rest_agents import AgentRoutes
from fleetplane.domains.proxies.rest_places import PlaceRoutes
from fleetplane.domains.proxies.rest_records import RecordRoutes
from fleetplane.domains.proxies.rest_served import ServedRoutes
from fleetplane.domains.proxies.rest_versions import VersionRoutes
from fleetplane.domains.proxies.rewriting import Rewriting
from fleetplane.domains.proxies.sessions import Sessions
from fleetplane.domains.proxies.vault import Vault
from fleetplane.domains.proxies.workspaces import Workspaces
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.identity import MasterKey, Tokens
from fleetplane.kernel.identity.passwords import Passwords
from fleetplane.kernel.store import Store
from fleetplane.web import documents, openapi
from fleetplane.web.app import application
from fleetplane.web.documents import Document, Documents
from fleetplane.web.gateway import REQUESTS_PER_MINUTE, Gateway
from fleetplane.web.idempotency import Answers
from fleetplane.web.metrics import GatewayCollector
from fleetplane.web.ops import Mount
from fleetplane.web.routes import RouteTable

log = structlog.get_logger(__name__)

PREFIX = "/v1"
SWEEP_SECONDS = 3600.0
KEY_LIFE_SECONDS = 30 * 86_400.0
"""How long one key signs access tokens; its public half serves an hour longer."""
TITLE = "Fleetplane proxies"
ABOUT = "Fleets of NGINX: virtual hosts, upstreams, certificates and the agents that serve them."


class Ground(Protocol):
    """What of the kernel this half stands on."""

    @property
    def store(self) -> Store: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def master(self) -> MasterKey: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RestOptions:
    version: str
    admin_email: str = ADMIN_EMAIL
    admin_password: str = ""
    """Of the first administrator; made up and shown once when empty."""
    anyone_may_found: bool = True
    """Whether every user may create organisations."""
    requests_per_minute: int = REQUESTS_PER_MINUTE


class RestSide:
    """See `create`; the constructor takes what has been loaded."""

    def __init__(
        self,
        kernel: Ground,
        options: RestOptions,
        *,
        workspaces: Workspaces,
        vault: Vault,
        sessions: Sessions,
        tokens: Tokens,
        presence: Presence,
        commander: Commander,
        records: Records,
        offered: Offered,
        revoker: Revoker,
    ) -> None:
        store, clock = kernel.store, kernel.clock
        self._clock = clock
        self._options = options
        self._sessions = sessions
        self._passwords = Passwords(store, kernel.master, namespace="proxies")
        self._answers = Answers(store, kernel.master, clock, namespace="proxies")
        access = Access(store)
        self._accounts = Accounts(store, clock, self._passwords, sessions)
        api_tokens = ApiTokens(store, clock, tokens, workspaces)
        agents = Agents(store, clock, workspaces, presence)
        hosts = Hosts(store, clock, workspaces)
        self.certificates = Certificates(store, clock, workspaces, vault, offered)
        """For whoever issues certificates."""
        rewriting = Rewriting(store, clock, workspaces)
        self.gatekeeper = Gatekeeper(access, self._accounts, sessions, api_tokens)
        """For whatever else takes a bearer token, such as a stream of events."""
        self.access = access
        notes = AuditNotes(store, kernel.master)
        self.table = RouteTable(
            PREFIX,
            (
                *AccountRoutes(store, access, self._accounts, sessions, api_tokens).routes(),
                *PlaceRoutes(
                    store, access, self._accounts, Places(store, clock, workspaces),
                    Members(store, workspaces), AuditTrail(store, notes, self._email_of),
                    anyone_may_found=options.anyone_may_found,
                ).routes(),
                *AgentRoutes(store, clock, agents, presence, commander).routes(),
                *RecordRoutes(store, clock, records).routes(),
                *ServedRoutes(store, clock, access, hosts, self.certificates, revoker).routes(),
                *VersionRoutes(store, workspaces, agents, rewriting, commander).routes(),
            ),
        )  # fmt: skip
        access.require_complete(self.table.permissions)
        self.notices: Sequence[str] = ()

    @classmethod
    async def create(
        cls,
        kernel: Ground,
        options: RestOptions,
        *,
        workspaces: Workspaces,
        vault: Vault,
        presence: Presence,
        commander: Commander,
        records: Records,
        offered: Offered | None = None,
        revoker: Revoker | None = None,
        tokens: Tokens | None = None,
    ) -> RestSide:
        """With its keys and tokens, which are made or loaded unless they are given."""
        sessions = await Sessions.load_or_create(kernel.store, kernel.master, kernel.clock)
        if tokens is None:
            tokens = Tokens(kernel.store, kernel.master, kernel.clock)
            await tokens.load()
        return cls(
            kernel, options, workspaces=workspaces, vault=vault, sessions=sessions, tokens=tokens,
            presence=presence, commander=commander, records=records, offered=offered or Offered(),
            revoker=revoker or NobodyThere(),
        )  # fmt: skip

    def _email_of(self, user: str) -> str | None:
        found = self._accounts.find(user)
        return found.spec.email if found is not None else None

    async def prepare(self) -> None:
        """Load what answers need, and make the first administrator."""
        await self._answers.load()
        email = self._options.admin_email
        password = await self._accounts.first_administrator(email, self._options.admin_password)
        if password is not None:
            self.notices = (
                "The first administrator was made. This password is shown once:",
                f"  e-mail    {email}",
                f"  password  {password}",
            )

    @cached_property
    def _gateway(self) -> Gateway[Caller]:
        return application(
            self.table, gate=self.gatekeeper, answers=self._answers, clock=self._clock,
            requests_per_minute=self._options.requests_per_minute,
        )  # fmt: skip

    @cached_property
    def collectors(self) -> Sequence[Collector]:
        return (GatewayCollector(self._gateway, domain="proxies"),)

    @cached_property
    def routes(self) -> Sequence[Mount]:
        """For the web listener."""
        pages = Documents(
            {
                "/openapi.json": Document(content_type="application/json", content=lambda: self._document),
                "/docs": documents.file("docs.html", "text/html; charset=utf-8"),
                "/docs/docs.js": documents.file("docs.js", "text/javascript; charset=utf-8"),
                "/docs/docs.css": documents.file("docs.css", "text/css; charset=utf-8"),
                "/.well-known/jwks.json": Document(
                    content_type="application/json",
                    content=lambda: msgspec.json.encode(self._sessions.jwks()),
                ),
            }
        )
        summaries = {"/docs": "the REST API, to read and to try", "/openapi.json": "the same, for programs"}
        return (
            Mount(path=PREFIX, app=self._gateway, summary="REST: fleets of NGINX"),
            *(
                Mount(path=path, app=pages, summary=summaries.get(path, ""), is_page=path == "/docs")
                for path in pages.paths
            ),
        )

    @cached_property
    def _document(self) -> bytes:
        made = openapi.document(self.table, title=TITLE, version=self._options.version, description=ABOUT)
        return msgspec.json.encode(made)

    async def run(self) -> None:
        """Forget what has expired and change keys in time, until cancelled."""
        while True:
            if self._sessions.key_age_seconds() > KEY_LIFE_SECONDS:
                kid = await self._sessions.rotate_keys(actor="system/identity")
                log.info("proxies.keys_rotated", kid=kid)
            await self._sessions.sweep()
            await self._answers.sweep()
            await self._clock.sleep(SWEEP_SECONDS)
