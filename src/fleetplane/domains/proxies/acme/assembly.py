"""The part of the proxies domain that gets certificates, put together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial

import structlog

from fleetplane.domains.proxies.acme.controller import CertificateController
from fleetplane.domains.proxies.acme.dns_provider import (
    DnsProvider,
    DnsZones,
    LexiconDns,
    Propagation,
    Server,
    ZoneOptions,
)
from fleetplane.domains.proxies.acme.internal import InternalAuthority
from fleetplane.domains.proxies.acme.issuers import AccountVault, AcmeIssuer, Issuer, SelfSigned
from fleetplane.domains.proxies.acme.orders import AuthorityOptions
from fleetplane.domains.proxies.acme.renewal import RenewalPolicy
from fleetplane.domains.proxies.acme.responder import ChallengeBoard, ShownChallenges
from fleetplane.domains.proxies.acme.workers import AcmeWorkers
from fleetplane.domains.proxies.kinds.records import Certificate
from fleetplane.domains.proxies.kinds.values import RevocationReason
from fleetplane.domains.proxies.serving.certificates import (
    INTERNAL,
    LETS_ENCRYPT,
    SELF_SIGNED,
    Certificates,
    OfferedIssuers,
)
from fleetplane.domains.proxies.serving.dns_zones import PROVIDERS, DnsZoneRecords
from fleetplane.domains.proxies.serving.private_keys import Vault
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import SettingsError
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.store import Store
from fleetplane.rpc import ListenerSpec, open_listener
from fleetplane.web.ops import Mount

log = structlog.get_logger(__name__)

_REASONS = {
    RevocationReason.UNSPECIFIED: 0,
    RevocationReason.KEY_COMPROMISE: 1,
    RevocationReason.AFFILIATION_CHANGED: 3,
    RevocationReason.SUPERSEDED: 4,
    RevocationReason.CESSATION_OF_OPERATION: 5,
}
"""As RFC 5280 numbers them."""
LISTENER = "challenges"
IDLE_SECONDS = 30.0
"""A challenge is one request; nobody has a reason to stay."""
GRACE_SECONDS = 1.0
"""An answer takes milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcmeOptions:
    authority: AuthorityOptions = field(default_factory=AuthorityOptions)
    zones: Mapping[str, ZoneOptions] = field(default_factory=dict)
    """By the zone's name: domains in them can be proved over DNS."""
    dns_servers: Sequence[Server] = ()
    """Asked whether a record is visible, instead of the zone's own."""
    challenge_listen: Sequence[str] = ()
    """Addresses of a listener that answers challenges and nothing else, in plain HTTP as agents ask."""
    challenge_address: str = ""
    """`host:port` where agents reach the challenge board. They are told it together with whose they
    are; when empty, each agent has to be told by its own operator, and none says whose it is."""
    internal_suffixes: Sequence[str] = ()
    """Names below these may have certificates of our own authority."""
    policy: RenewalPolicy = field(default_factory=RenewalPolicy)


async def _own_provider(
    zones: DnsZoneRecords, workers: AcmeWorkers, scope: str, domain: str
) -> DnsProvider | None:
    """The provider of a workspace's own zone, with its credentials opened."""
    found = zones.find(scope, domain)
    if found is None:
        return None
    options = await zones.credentials(found)
    return LexiconDns(workers, provider=found.spec.provider, zone=found.spec.zone, options=options)


class CertificateSide:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        master: MasterKey,
        options: AcmeOptions,
        *,
        workspaces: Workspaces,
        vault: Vault,
        providers: Mapping[str, DnsProvider] | None = None,
        tenant_providers: Mapping[str, frozenset[str]] = PROVIDERS,
    ) -> None:
        """`providers` are zones beside those of the options; `tenant_providers` may have workspaces' own."""
        dns_workers = AcmeWorkers("the DNS provider")
        zones: dict[str, DnsProvider] = {
            zone: LexiconDns(dns_workers, provider=one.provider, zone=zone, options=one.options)
            for zone, one in options.zones.items()
        }
        owners = {zone: one.workspaces for zone, one in options.zones.items() if one.workspaces is not None}
        known = DnsZones({**zones, **(providers or {})}, owners)
        self.zones = DnsZoneRecords(store, clock, workspaces, master, providers=tenant_providers)
        self._store = store
        self._listen = tuple(options.challenge_listen)
        self._tried = asyncio.Event()
        """To open that listener."""
        self._refused = False
        """Whether its address was another's."""
        self._shown = ShownChallenges(store)
        self.board = ChallengeBoard(clock, strict=bool(options.challenge_address), shown=self._shown)
        internal = InternalAuthority(store, clock, master, options.internal_suffixes)
        providers_offered = (LETS_ENCRYPT, SELF_SIGNED, *((INTERNAL,) if options.internal_suffixes else ()))
        self.offered = OfferedIssuers(
            providers=providers_offered,
            dns=known.covers,
            zones=lambda scope, domain: self.zones.find(scope, domain) is not None,
            internal=internal.covers,
        )
        self.certificates = Certificates(store, clock, workspaces, vault, self.offered)
        issuers: dict[str, Issuer] = {
            LETS_ENCRYPT: AcmeIssuer(
                clock,
                options.authority,
                accounts=AccountVault(store, master),
                board=self.board,
                zones=known,
                own_zones=partial(_own_provider, self.zones, dns_workers),
                propagation=Propagation(clock, servers=options.dns_servers),
                workers=AcmeWorkers("the certificate authority"),
            ),
            SELF_SIGNED: SelfSigned(clock),
            INTERNAL: internal,
        }
        self.controller = CertificateController(
            store=store,
            clock=clock,
            workspaces=workspaces,
            certificates=self.certificates,
            issuers=issuers,
            policy=options.policy,
            agents_name_workspace=bool(options.challenge_address),
        )

    def __repr__(self) -> str:
        return f"<CertificateSide {self.controller!r}>"

    @property
    def mounts(self) -> Sequence[Mount]:
        """For the listener that agents pass challenges on to."""
        return (self.board.mount,)

    async def revoke(self, scope: str, identity: str, *, reason: RevocationReason, actor: str) -> Certificate:
        return await self.controller.revoke(scope, identity, reason=_REASONS[reason], actor=actor)

    async def run_here(self) -> None:
        """Answer challenges, until cancelled."""
        async with AsyncExitStack() as stack:
            try:
                await self._open(stack)
            except SettingsError as error:
                if self._store.leads:
                    raise
                # Another server on this machine may have the address, for as long as it is active.
                log.warning("standby.listener_not_opened", listener=LISTENER, error=error.message)
                self._refused = True
            self._tried.set()
            await asyncio.get_running_loop().create_future()

    async def run_active(self) -> None:
        """Order, and answer challenges if that could not be done before, until cancelled."""
        await self._tried.wait()
        async with AsyncExitStack() as stack:
            if self._refused:
                await self._open(stack)
            await self._shown.sweep()
            await self.controller.run()

    async def _open(self, stack: AsyncExitStack) -> None:
        if self._listen:
            # Plain text is no risk here: what is answered is meant for everyone to read.
            spec = ListenerSpec(
                name=LISTENER,
                addresses=self._listen,
                app=self.board,
                http1=True,
                idle_seconds=IDLE_SECONDS,
            )
            await stack.enter_async_context(open_listener(spec, grace_seconds=GRACE_SECONDS))
