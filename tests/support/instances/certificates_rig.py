"""Certificates in this process: a real store, a workspace in it, and whatever issues them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.proxies.pebble_lab import Pebble

from fleetplane.domains.blueprint import run_both
from fleetplane.domains.proxies.acme.assembly import AcmeOptions, CertificateSide
from fleetplane.domains.proxies.acme.controller import CertificateController
from fleetplane.domains.proxies.acme.dns_provider import ZoneOptions
from fleetplane.domains.proxies.acme.issuers import Issuer
from fleetplane.domains.proxies.acme.orders import AuthorityOptions
from fleetplane.domains.proxies.acme.renewal import RenewalPolicy
from fleetplane.domains.proxies.acme.responder import ChallengeBoard
from fleetplane.domains.proxies.kinds.records import (
    CERTIFICATE,
    KINDS,
    Certificate,
    CertificateSpec,
    CertificateStatus,
    OrganizationSpec,
    WorkspaceSpec,
    workspace_scope,
)
from fleetplane.domains.proxies.serving.certificates import Certificates, OfferedIssuers
from fleetplane.domains.proxies.serving.private_keys import Vault
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.domains.proxies.tenancy.organizations import TenancyPlaces
from fleetplane.kernel.clock import Clock, SystemClock
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.rpc import ListenerSpec, open_listener

DEADLINE_SECONDS = 60.0
BOSS = "user/boss"


async def until(condition: Callable[[], Any], *, seconds: float = DEADLINE_SECONDS) -> Any:
    async with asyncio.timeout(seconds):
        while not (found := condition()):
            await asyncio.sleep(0.005)
    return found


@dataclass(slots=True, kw_only=True)
class Desk:
    """A workspace and its certificates; nobody issues any yet."""

    store: Store
    clock: Clock
    master: MasterKey
    vault: Vault
    workspaces: Workspaces
    certificates: Certificates
    places: TenancyPlaces
    scope: str

    async def neighbour(self, slug: str, *, organization: str = "") -> Desk:
        """The same server, seen from another workspace: of an organisation of its own unless one is named."""
        if not organization:
            made = await self.places.create_organization(
                OrganizationSpec(name=slug, slug=slug), owner=slug, actor=BOSS
            )
            organization = made.name
        workspace = await self.places.create_workspace(
            organization, WorkspaceSpec(name=slug, slug=slug), actor=BOSS
        )
        return dataclasses.replace(self, scope=workspace.scope)

    async def request(
        self, domain: str, *, provider: str = "letsencrypt", auto_renew: bool = True
    ) -> Certificate:
        spec = CertificateSpec(domain=domain, provider=provider, auto_renew=auto_renew)
        return await self.certificates.request(self.scope, spec, actor=BOSS)

    def status(self, certificate: Certificate) -> CertificateStatus:
        found = self.store.get(CERTIFICATE, self.scope, certificate.name)
        assert found is not None
        assert found.status is not None
        return found.status

    def is_in(self, certificate: Certificate, *states: str) -> Callable[[], bool]:
        return lambda: self.status(certificate).state in states

    def alarmed(self, certificate: Certificate, level: str) -> Callable[[], bool]:
        return lambda: self.status(certificate).alarm == level

    async def reached(self, certificate: Certificate, *states: str) -> CertificateStatus:
        await until(self.is_in(certificate, *states))
        return self.status(certificate)


@asynccontextmanager
async def desk(folder: Path, clock: Clock | None = None, *, name: str = "state.db") -> AsyncIterator[Desk]:
    clock = clock or SystemClock()
    settings = StoreSettings(path=folder / name)
    async with Store.open(settings, kinds=[*KINDS, *KERNEL_KINDS], clock=clock) as store:
        master = MasterKey(b"k" * 32, clock)
        vault = Vault(store, master)
        workspaces = Workspaces(store, vault)
        offered = OfferedIssuers(providers=("letsencrypt", "selfsigned"), dns=lambda _: True)
        yield Desk(
            store=store,
            clock=clock,
            master=master,
            vault=vault,
            workspaces=workspaces,
            certificates=Certificates(store, clock, workspaces, vault, offered),
            places=TenancyPlaces(store, clock, workspaces),
            scope=await _workspace(store, TenancyPlaces(store, clock, workspaces)),
        )


async def _workspace(store: Store, places: TenancyPlaces) -> str:
    from fleetplane.domains.proxies.kinds.records import WORKSPACE

    if existing := store.list(WORKSPACE):
        return existing[0].scope
    organization = await places.create_organization(
        OrganizationSpec(name="Acme", slug="acme"), owner="boss", actor=BOSS
    )
    made = await places.create_workspace(
        organization.name, WorkspaceSpec(name="Production", slug="production"), actor=BOSS
    )
    assert made.scope == workspace_scope(organization.name, made.name)
    return made.scope


@asynccontextmanager
async def controlled(
    desk: Desk, issuers: Mapping[str, Issuer], policy: RenewalPolicy | None = None
) -> AsyncIterator[CertificateController]:
    controller = CertificateController(
        store=desk.store,
        clock=desk.clock,
        workspaces=desk.workspaces,
        certificates=desk.certificates,
        issuers=issuers,
        policy=policy or RenewalPolicy(),
    )
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(controller.run())
        try:
            yield controller
        finally:
            running.cancel()


@asynccontextmanager
async def side(
    at: Desk,
    pebble: Pebble,
    *,
    answers: bool = True,
    zones: Mapping[str, ZoneOptions] | None = None,
    authority_options: AuthorityOptions | None = None,
    policy: RenewalPolicy | None = None,
) -> AsyncIterator[CertificateSide]:
    """Everything as the server runs it, its challenges answered (or not) where the authority comes."""
    options = AcmeOptions(
        authority=authority_options or pebble.options,
        zones=zones or {},
        dns_servers=[("127.0.0.1", pebble.dns_port)],
        policy=policy or RenewalPolicy(),
    )
    made = CertificateSide(at.store, at.clock, at.master, options, workspaces=at.workspaces, vault=at.vault)
    app = made.board if answers else ChallengeBoard(at.clock)
    spec = ListenerSpec(name="challenges", addresses=(f"127.0.0.1:{pebble.http_port}",), app=app, http1=True)
    async with open_listener(spec, grace_seconds=1), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run_both(made))
        try:
            yield made
        finally:
            running.cancel()
