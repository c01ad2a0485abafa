"""Issuers of certificates (ACME authorities, and self-signed for development) and the accounts they use.

An ACME account belongs to one directory and one organisation; its key is sealed under the master key. An
authority remembers by account which domains were proved, so organisations never share an account.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fleetplane.domains.proxies.acme.dns_provider import DnsProvider, DnsZones, Propagation
from fleetplane.domains.proxies.acme.orders import (
    ACTOR,
    AccountUnknown,
    AuthorityOptions,
    ChallengeMethod,
    IssuanceFailed,
    Proof,
)
from fleetplane.domains.proxies.acme.responder import ChallengeBoard
from fleetplane.domains.proxies.acme.workers import AcmeWorkers
from fleetplane.domains.proxies.kinds.records import organization_of, workspace_of
from fleetplane.domains.proxies.serving.certificates import Material, material, names_for
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.master_key import ReplacedMeanwhile, SealedSecret
from fleetplane.kernel.store import Store

if TYPE_CHECKING:
    from fleetplane.domains.proxies.acme.authority import AcmeConversation


class AcmeAccount(msgspec.Struct, frozen=True, kw_only=True):
    key_pem: bytes
    uri: str = ""
    """Where the authority keeps it; empty before it has been registered."""


class AccountVault:
    def __init__(self, store: Store, master: MasterKey) -> None:
        self._store = store
        self._master = master

    async def load_or_create(self, directory_url: str, organization: str) -> AcmeAccount:
        """A new key is kept before it is used: an account whose key is lost cannot revoke anything.

        Of servers that make one at the same time, all have the one that was kept first.
        """

        async def make() -> bytes:
            return msgspec.msgpack.encode(AcmeAccount(key_pem=new_key()))

        kept = await self._kept(_secret(directory_url, organization)).read_or_make(make, actor=ACTOR)
        return msgspec.msgpack.decode(kept.content, type=AcmeAccount)

    async def shared(self, directory_url: str) -> AcmeAccount | None:
        """The account that all organisations had before 0.2. Good for revoking what it issued, no more."""
        found = await self._kept(_shared_secret(directory_url)).read()
        return None if found is None else msgspec.msgpack.decode(found.content, type=AcmeAccount)

    async def save(self, directory_url: str, organization: str, account: AcmeAccount) -> None:
        """Whoever else saves it meanwhile has registered the same key: either address of it will do."""
        kept = self._kept(_secret(directory_url, organization))
        with suppress(ReplacedMeanwhile):
            await kept.replace(msgspec.msgpack.encode(account), version=kept.version, actor=ACTOR)

    def _kept(self, name: str) -> SealedSecret:
        return SealedSecret(self._store, self._master, name=name)


def _secret(directory_url: str, organization: str) -> str:
    return f"{_shared_secret(directory_url)}/{organization}"


def _shared_secret(directory_url: str) -> str:
    return f"proxies/acme/account/{hashlib.sha256(directory_url.encode()).hexdigest()[:32]}"


def new_key() -> bytes:
    """ECDSA P-256, in PEM."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


log = structlog.get_logger(__name__)

PROVE_SECONDS = 120.0
"""How long the authority may take to look, from several places and more than once."""
FINISH_SECONDS = 120.0
POLL_SECONDS = 1.0
SELF_SIGNED_DAYS = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """What an authority says about a certificate's renewal."""

    at_ns: int | None
    ask_again_ns: int


class Issuer(Protocol):
    """All raise `IssuanceFailed` with the reason."""

    async def issue(self, domain: str, *, scope: str) -> Material:
        """`scope` is the workspace's: whose account orders, and whose agents have to be behind the domain."""

    async def revoke(self, chain_pem: str, reason: int, *, scope: str) -> None: ...

    async def suggestion(self, chain_pem: str, *, scope: str) -> Suggestion | None:
        """None from an issuer that never has an opinion."""


OwnZones = Callable[[str, str], Awaitable[DnsProvider | None]]
"""The provider of a workspace's own zone that a domain lies in, by scope and domain."""


async def _no_zone(_scope: str, _domain: str) -> DnsProvider | None:
    return None


class AcmeIssuer:
    def __init__(
        self,
        clock: Clock,
        options: AuthorityOptions,
        *,
        accounts: AccountVault,
        board: ChallengeBoard,
        zones: DnsZones,
        own_zones: OwnZones = _no_zone,
        propagation: Propagation,
        workers: AcmeWorkers,
    ) -> None:
        self._clock = clock
        self._options = options
        self._accounts = accounts
        self._board = board
        self._zones = zones
        self._own_zones = own_zones
        self._propagation = propagation
        self._workers = workers
        self._registering = asyncio.Lock()
        """Of any number of first orders of an organisation, one makes its account."""

    def __repr__(self) -> str:
        return f"<AcmeIssuer {self._options.directory_url}>"

    async def issue(self, domain: str, *, scope: str) -> Material:
        key_pem = new_key()
        method = ChallengeMethod.DNS if domain.startswith("*.") else ChallengeMethod.HTTP
        if method is ChallengeMethod.DNS:
            await self._zone(domain, scope)
        organization = organization_of(scope)
        async with self._conversation(organization) as talk:
            proofs = await self._order(talk, organization, names_for(domain), key_pem, method)
            async with self._shown(proofs, scope):
                for proof in proofs:
                    await self._workers.run(talk.answer, proof)
                await self._until_proved(talk)
            await self._workers.run(talk.finish)
            chain_pem = await self._fetched(talk)
        return material(chain_pem, key_pem.decode(), now_ns=self._clock.now_ns())

    async def revoke(self, chain_pem: str, reason: int, *, scope: str) -> None:
        try:
            async with self._conversation(organization_of(scope)) as talk:
                await self._workers.run(talk.revoke, chain_pem, reason)
        except IssuanceFailed:
            shared = await self._accounts.shared(self._options.directory_url)
            if shared is None or not shared.uri:
                raise
            async with self._speaking_as(shared) as talk:
                await self._workers.run(talk.revoke, chain_pem, reason)

    async def suggestion(self, chain_pem: str, *, scope: str) -> Suggestion | None:
        async with self._conversation(organization_of(scope)) as talk:
            at, again = await self._workers.run(talk.suggestion, chain_pem)
        return Suggestion(at_ns=_ns(at) if at is not None else None, ask_again_ns=_ns(again))

    # The account.

    @asynccontextmanager
    async def _conversation(self, organization: str) -> AsyncIterator[AcmeConversation]:
        async with self._speaking_as(await self._account(organization)) as talk:
            yield talk

    @asynccontextmanager
    async def _speaking_as(self, account: AcmeAccount) -> AsyncIterator[AcmeConversation]:
        talk = await self._workers.run(_begin, self._options, account)
        try:
            yield talk
        finally:
            talk.close()

    async def _account(self, organization: str) -> AcmeAccount:
        url = self._options.directory_url
        account = await self._accounts.load_or_create(url, organization)
        if account.uri:
            return account
        async with self._registering:
            account = await self._accounts.load_or_create(url, organization)
            return account if account.uri else await self._register(account, organization)

    async def _register(self, account: AcmeAccount, organization: str) -> AcmeAccount:
        url = self._options.directory_url
        talk = await self._workers.run(_begin, self._options, account)
        try:
            uri = await self._workers.run(talk.register)
        finally:
            talk.close()
        registered = AcmeAccount(key_pem=account.key_pem, uri=uri)
        await self._accounts.save(url, organization, registered)
        log.info("acme.registered", directory=url, account=uri, organization=organization)
        return registered

    # One order.

    async def _order(
        self,
        talk: AcmeConversation,
        organization: str,
        names: Sequence[str],
        key_pem: bytes,
        method: ChallengeMethod,
    ) -> list[Proof]:
        try:
            return await self._workers.run(talk.order, names, key_pem, method)
        except AccountUnknown:
            # Its database was lost, or put back to before we came: the same key is welcome again.
            uri = await self._workers.run(talk.register)
            url = self._options.directory_url
            account = await self._accounts.load_or_create(url, organization)
            await self._accounts.save(url, organization, AcmeAccount(key_pem=account.key_pem, uri=uri))
            return await self._workers.run(talk.order, names, key_pem, method)

    @asynccontextmanager
    async def _shown(self, proofs: Sequence[Proof], scope: str) -> AsyncIterator[None]:
        """Have every proof where the authority looks, and nothing left behind, whatever happens."""
        async with AsyncExitStack() as stack:
            for proof in proofs:
                if proof.method is ChallengeMethod.HTTP:
                    shown = self._board.answered_anywhere(
                        proof.token, proof.content, workspace=workspace_of(scope)
                    )
                    await stack.enter_async_context(shown)
                else:
                    await stack.enter_async_context(self._recorded(proof, scope))
            for name in {proof.record for proof in proofs if proof.method is ChallengeMethod.DNS}:
                await self._propagation.wait(name, {one.content for one in proofs if one.record == name})
            yield

    async def _zone(self, domain: str, scope: str) -> DnsProvider:
        if (own := await self._own_zones(scope, domain)) is not None:
            return own
        provider = self._zones.provider(domain)
        # A zone of others looks as if it were not there: its existence is their business.
        if provider is None or not self._zones.allows(domain, workspace_of(scope)):
            raise IssuanceFailed(
                f"no DNS provider is set up for {domain}",
                hint="add its zone to the workspace, or both to the file of proxies.dns_zones_file",
            )
        return provider

    @asynccontextmanager
    async def _recorded(self, proof: Proof, scope: str) -> AsyncIterator[None]:
        provider = await self._zone(proof.domain, scope)
        try:
            await provider.present(proof.record, proof.content)
            yield
        finally:
            try:
                await provider.clear(proof.record, proof.content)
            except IssuanceFailed as error:  # a stale record does no harm, and the order is decided
                log.warning("acme.record_left_behind", record=proof.record, error=error.message)

    async def _until_proved(self, talk: AcmeConversation) -> None:
        deadline = self._clock.monotonic() + PROVE_SECONDS
        while not await self._workers.run(talk.proved):
            if self._clock.monotonic() >= deadline:
                raise IssuanceFailed(f"the authority has not looked within {PROVE_SECONDS:g} seconds")
            await self._clock.sleep(POLL_SECONDS)

    async def _fetched(self, talk: AcmeConversation) -> str:
        deadline = self._clock.monotonic() + FINISH_SECONDS
        while (found := await self._workers.run(talk.fetch)) is None:
            if self._clock.monotonic() >= deadline:
                raise IssuanceFailed(f"the authority has issued nothing within {FINISH_SECONDS:g} seconds")
        return found


def _begin(options: AuthorityOptions, account: AcmeAccount) -> AcmeConversation:
    """In a thread: the first time, this loads the libraries."""
    from fleetplane.domains.proxies.acme.authority import AcmeConversation

    return AcmeConversation(options, account.key_pem, account.uri)


def _ns(moment: dt.datetime) -> int:
    return round(moment.timestamp() * 1e9)


class SelfSigned:
    """Certificates that nobody trusts, at once and without anyone's help."""

    def __init__(self, clock: Clock, *, days: float = SELF_SIGNED_DAYS) -> None:
        self._clock = clock
        self._life = dt.timedelta(days=days)

    async def issue(self, domain: str, *, scope: str = "") -> Material:  # noqa: ARG002  # nobody looks
        now_ns = self._clock.now_ns()
        now = dt.datetime.fromtimestamp(now_ns // 1_000_000_000, dt.UTC)
        key = ec.generate_private_key(ec.SECP256R1())
        # A common name has at most 64 characters; what counts are the alternative names.
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, domain[:64])])
        names = [x509.DNSName(one) for one in names_for(domain)]
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now)
            .not_valid_after(now + self._life)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=False)
            .sign(key, hashes.SHA256())
        )
        key_pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        pem = made.public_bytes(serialization.Encoding.PEM).decode()
        return material(pem, key_pem.decode(), now_ns=now_ns)

    async def revoke(self, chain_pem: str, reason: int, *, scope: str) -> None:
        """Nothing to do: self-signed certificates have no revocation list."""

    async def suggestion(self, chain_pem: str, *, scope: str) -> None:  # noqa: ARG002  # the protocol's
        return None
