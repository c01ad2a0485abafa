"""Certificates: requested, imported, renewed, removed; and which workspace holds a name.

A requested certificate is pending until someone issues it (see `CertificateStatus`); an
imported one is active at once. The private key goes into the vault and never comes out here.

The server orders for everyone, so it, and not the authority, must keep tenants apart. A workspace holds
the names of each certificate that it got from the authority, until that expires or is deleted. Nobody else
orders one of them meanwhile, and nobody of another organisation orders a wildcard that covers one of
them, or a name that their wildcard covers. A request that proved nothing holds nothing: otherwise a
stranger could keep a name from its owner by asking first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID

from fleetplane.domains.proxies.kinds.records import (
    CERTIFICATE,
    CONFIG_VERSION,
    UPSTREAM,
    VIRTUAL_HOST,
    Certificate,
    CertificateSpec,
    CertificateStatus,
    Upstream,
    VirtualHost,
    organization_of,
    version_name,
)
from fleetplane.domains.proxies.kinds.unique import (
    check_match,
    claim_unique,
    hold,
    holders,
    refuse,
    register,
    unregister,
)
from fleetplane.domains.proxies.kinds.values import CertificateState
from fleetplane.domains.proxies.rules.configuration import authorities_of, certificate_part
from fleetplane.domains.proxies.rules.conflicts import served_names
from fleetplane.domains.proxies.rules.validation import domain_problems
from fleetplane.domains.proxies.serving.basis import ServedReader, decided_again
from fleetplane.domains.proxies.serving.bundles import read_chain, read_key
from fleetplane.domains.proxies.serving.private_keys import Vault
from fleetplane.domains.proxies.serving.workspaces import PutObject, WorkspaceBatch, WorkspacePlan, Workspaces
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, NotFound
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.ids import new_uuid
from fleetplane.kernel.values.times import NS
from fleetplane.web.rest.problems import Code, Problem, Rejected

LETS_ENCRYPT = "letsencrypt"
"""The authority that the server is a client of, whichever that is."""


class NameBound(FailedPrecondition):
    """Another workspace has proved the name, and has a certificate for it."""

    reason = "NAME_BOUND"


def names_for(domain: str) -> tuple[str, ...]:
    """A wildcard covers the domain it is below as well: nobody wants the one without the other."""
    return (domain, domain[2:]) if domain.startswith("*.") else (domain,)


def require(wanted: Certificate, present: Iterable[Certificate], *, now_ns: int) -> None:
    """Refuse a certificate for names that another workspace holds; who holds them already may renew."""
    if wanted.spec.provider != LETS_ENCRYPT or _holds(wanted, now_ns):
        return
    names = names_for(wanted.spec.domain.lower())
    for other in present:
        if other.scope == wanted.scope or not _holds(other, now_ns):
            continue
        assert other.status is not None
        foreign = organization_of(other.scope) != organization_of(wanted.scope)
        for held in {*names_for(other.spec.domain.lower()), *(name.lower() for name in other.status.names)}:
            for name in names:
                if name == held or (foreign and (_covers(name, held) or _covers(held, name))):
                    # Neither whose it is nor what exactly they have: that is their business.
                    raise NameBound(
                        f"{name} belongs to another workspace of this server, which has proved it",
                        hint="delete the certificate there, let it expire, or import your own",
                    )


def require_own(wanted: Certificate, hosts: Iterable[VirtualHost]) -> None:
    """Refuse a name that virtual hosts of another organisation serve.

    For challenges that pass through agents which do not say whose they are: another organisation's agents
    would pass ours on just as well, and the name be proved by whoever asks first.
    """
    domain = wanted.spec.domain.lower()
    if wanted.spec.provider != LETS_ENCRYPT or domain.startswith("*."):
        return  # a wildcard is proved over DNS
    for host in hosts:
        if organization_of(host.scope) == organization_of(wanted.scope):
            continue
        if any(name == domain or _covers(name, domain) for name in served_names(host.spec.server_name)):
            raise NameBound(
                f"virtual hosts of another organization serve {domain}, and agents name no workspace",
                hint="set proxies.challenge_address, so that challenges name their workspace",
            )


def _holds(certificate: Certificate, now_ns: int) -> bool:
    status = certificate.status
    return (
        certificate.spec.provider == LETS_ENCRYPT
        and status is not None
        and bool(status.fingerprint)
        and (status.expires_at_ns is None or status.expires_at_ns > now_ns)
    )


def _covers(wildcard: str, name: str) -> bool:
    return wildcard.startswith("*.") and name.partition(".")[2] == wildcard[2:]


SELF_SIGNED = "selfsigned"
INTERNAL = "internal"
"""Our own authority, for names below suffixes that the operator set."""
"""Made here and trusted by nobody: for development."""
IMPORTED = "imported"
PROVIDERS = (LETS_ENCRYPT,)
"""Issuers that a certificate can be requested from; imported ones come from their owner."""
DOMAIN = "domain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """A certificate with its chain and key, checked to belong together."""

    chain_pem: str
    key_pem: bytes
    fingerprint: str
    names: tuple[str, ...]
    issued_at_ns: int
    expires_at_ns: int

    def status(self) -> CertificateStatus:
        return CertificateStatus(
            state=CertificateState.ACTIVE,
            fingerprint=self.fingerprint,
            chain_pem=self.chain_pem,
            names=self.names,
            issued_at_ns=self.issued_at_ns,
            expires_at_ns=self.expires_at_ns,
        )


def material(chain_pem: str, key_pem: str, *, now_ns: int) -> Material:
    """What was brought, or a refusal that names the part at fault. Pure."""
    key = read_key(key_pem)
    chain = read_chain(chain_pem, key, now_ns=now_ns)
    leaf = chain[0]
    expires_at_ns = int(leaf.not_valid_after_utc.timestamp()) * NS
    return Material(
        chain_pem="".join(one.public_bytes(serialization.Encoding.PEM).decode() for one in chain),
        key_pem=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        fingerprint=leaf.fingerprint(hashes.SHA256()).hex(),
        names=_names(leaf),
        issued_at_ns=int(leaf.not_valid_before_utc.timestamp()) * NS,
        expires_at_ns=expires_at_ns,
    )


def _names(leaf: x509.Certificate) -> tuple[str, ...]:
    try:
        alternative = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = tuple(alternative.get_values_for_type(x509.DNSName))
    except x509.ExtensionNotFound:
        names = ()
    return names or tuple(
        str(name.value) for name in leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedIssuers:
    """What can be requested from this server."""

    providers: tuple[str, ...] = PROVIDERS
    dns: Callable[[str], bool] = lambda _: False
    """Whether a domain can be proved over DNS, as wildcards have to be."""
    zones: Callable[[str, str], bool] = lambda _scope, _domain: False
    """Whether a workspace has a DNS zone of its own that a domain lies in."""
    internal: Callable[[str], bool] = lambda _: False
    """Whether our own authority may certify a domain."""


class Certificates:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        workspaces: Workspaces,
        vault: Vault,
        offered: OfferedIssuers = OfferedIssuers(),  # noqa: B008  # frozen
    ) -> None:
        self._offered = offered
        self._store = store
        self._clock = clock
        self._workspaces = workspaces
        self._vault = vault

    def get(self, scope: str, identity: str) -> Certificate:
        found = self._store.get(CERTIFICATE, scope, identity)
        if found is None:
            raise NotFound("certificate not found")
        return found

    async def request(self, scope: str, spec: CertificateSpec, *, actor: str) -> Certificate:
        """Pending, until it is issued."""
        refuse([*domain_problems(spec.domain), *_request_problems(scope, spec, self._offered)])
        status = CertificateStatus(state=CertificateState.PENDING)
        return await self._create(scope, spec, status, None, cause="certificate.request", actor=actor)

    async def bring(
        self, scope: str, domain: str | None, chain_pem: str, key_pem: str, *, actor: str
    ) -> Certificate:
        """Import one with its key."""
        found = material(chain_pem, key_pem, now_ns=self._clock.now_ns())
        if domain is None:
            if not found.names:
                raise Rejected(
                    Problem(field="domain", message="The certificate names none", code=Code.REQUIRED)
                )
            domain = found.names[0]
        refuse(domain_problems(domain))
        spec = CertificateSpec(domain=domain.lower(), provider=IMPORTED, auto_renew=False)
        declared = self._store.claimed_by(CERTIFICATE, scope, DOMAIN, _claimed(spec))
        if declared is not None and _awaits_key(self._store.get(CERTIFICATE, scope, declared)):
            return await self.issued(scope, declared, found, actor=actor, cause="certificate.import")
        return await self._create(scope, spec, found.status(), found, cause="certificate.import", actor=actor)

    @decided_again
    async def _create(
        self,
        scope: str,
        spec: CertificateSpec,
        status: CertificateStatus,
        found: Material | None,
        *,
        cause: str,
        actor: str,
    ) -> Certificate:
        async with self._workspaces.editing(scope):
            self._workspaces.require(scope)
            identity = new_uuid(self._clock)
            plan = self._workspaces.plan(scope, cause=cause, subject=identity, actor=actor)
            _create(plan, scope, identity, spec, status)
            if found is not None:
                self._serve(plan, identity, spec, found)
            made: Certificate = await self._workspaces.commit(scope, plan)
            return made

    @decided_again
    async def issued(
        self, scope: str, identity: str, found: Material, *, actor: str, cause: str = "certificate.issue"
    ) -> Certificate:
        """Take an issued certificate in and serve it from now on."""
        async with self._workspaces.editing(scope):
            before = self.get(scope, identity)
            plan = self._workspaces.plan(scope, cause=cause, subject=identity, actor=actor)
            plan.puts.append(
                PutObject(
                    kind=CERTIFICATE, name=identity, spec=before.spec, before=before, status=found.status()
                )
            )
            # Two workspaces may have ordered the same name at once: the first one to prove it has it.
            plan.also.append(lambda draft: require(before, draft.list(CERTIFICATE), now_ns=draft.now_ns))
            self._serve(plan, identity, before.spec, found)
            written: Certificate = await self._workspaces.commit(scope, plan)
            return written

    def require_unbound(self, certificate: Certificate) -> None:
        """Refuse to order a name that another workspace has a certificate for; see `binding`."""
        require(certificate, self._store.list(CERTIFICATE), now_ns=self._clock.now_ns())

    def _serve(self, plan: WorkspacePlan, identity: str, spec: CertificateSpec, found: Material) -> None:
        """Seal the key and mention the certificate in the next version."""
        part = certificate_part(identity, spec, found.status())
        assert part is not None
        plan.next.put("certificates", part)
        plan.also.append(lambda draft: self._vault.put(draft, identity, found.fingerprint, found.key_pem))

    @decided_again
    async def renew(self, scope: str, identity: str, *, actor: str) -> Certificate:
        """Ask for a new one; the old one is served meanwhile."""
        async with self._workspaces.editing(scope):
            before = self.get(scope, identity)
            if before.spec.provider == IMPORTED:
                raise FailedPrecondition(
                    "an imported certificate cannot be renewed here", hint="import its successor"
                )
            status = before.status or CertificateStatus(state=CertificateState.PENDING)
            state = CertificateState.RENEWING if status.fingerprint else CertificateState.PENDING
            plan = self._workspaces.plan(scope, cause="certificate.renew", subject=identity, actor=actor)
            renewed = msgspec.structs.replace(
                status, state=state, error="", failures=0, next_attempt_at_ns=None
            )
            plan.puts.append(
                PutObject(kind=CERTIFICATE, name=identity, spec=before.spec, before=before, status=renewed)
            )
            written: Certificate = await self._workspaces.commit(scope, plan)
            return written

    @decided_again
    async def delete(self, scope: str, identity: str, *, if_match: str | None, actor: str) -> None:
        async with self._workspaces.editing(scope):
            before = self.get(scope, identity)
            check_match(if_match, before)
            plan = self._workspaces.plan(scope, cause="certificate.delete", subject=identity, actor=actor)
            self._delete(plan, before, at=self._store)
            await self._workspaces.commit(scope, plan)

    # As objects that people declare.

    def put_in(self, batch: WorkspaceBatch, scope: str, identity: str, spec: CertificateSpec) -> Certificate:
        """Ask for a certificate in a batch's draft, or change whether it is renewed.

        One that its owner imports waits for that, as no document carries a private key.
        """
        draft = batch.draft
        self._workspaces.require(scope, at=draft)
        before = draft.get(CERTIFICATE, scope, identity)
        if before is not None:
            if _claimed(before.spec) != _claimed(spec):
                raise FailedPrecondition(
                    f"a certificate from {before.spec.provider} does not become one from {spec.provider}",
                    field="provider",
                    hint="delete it, and ask for another",
                )
            plan = batch.plan(scope, cause="certificate.update", subject=identity)
            plan.puts.append(PutObject(kind=CERTIFICATE, name=identity, spec=spec, before=before))
        else:
            problems = [] if spec.provider == IMPORTED else _request_problems(scope, spec, self._offered)
            refuse([*domain_problems(spec.domain), *problems])
            plan = batch.plan(scope, cause="certificate.request", subject=identity)
            _create(plan, scope, identity, spec, CertificateStatus(state=CertificateState.PENDING))
        written: Certificate = batch.write(scope, plan)[identity]
        return written

    def delete_in(self, batch: WorkspaceBatch, found: Certificate) -> None:
        """Delete a certificate and its keys in a batch's draft."""
        plan = batch.plan(found.scope, cause="certificate.delete", subject=found.name)
        self._delete(plan, found, at=batch.draft)
        batch.write(found.scope, plan)

    def _delete(self, plan: WorkspacePlan, found: Certificate, *, at: ServedReader) -> None:
        scope, identity = found.scope, found.name
        hosts = at.list(VIRTUAL_HOST, scope)
        presenting = [host for host in hosts if host.spec.ssl_certificate_id == identity]
        trusting = [host for host in hosts if identity in authorities_of(host.spec)]
        hold(
            "the certificate is in use",
            [
                *holders("ssl_certificate_id", "virtual host", presenting),
                *holders("tls.client_certificates", "virtual host", trusting),
                *holders("tls", "upstream", _upstreams_with(at, scope, identity)),
                *self._pinned_users(scope, identity, at),
            ],
        )
        plan.deletes.append(found)
        plan.also.append(
            lambda draft: draft.release(CERTIFICATE, scope, DOMAIN, _claimed(found.spec), identity)
        )
        plan.also.append(lambda draft: unregister(draft, CERTIFICATE, scope, identity))
        for fingerprint in self._fingerprints(found, at):
            plan.also.append(
                lambda draft, fingerprint=fingerprint: self._vault.remove(draft, identity, fingerprint)  # type: ignore[misc]
            )

    def _pinned_users(self, scope: str, identity: str, at: ServedReader) -> list[Problem]:
        """Agents that are rolled back to a version which serves it."""
        newest = self._workspaces.newest(scope, at=at)
        if newest is None:
            return []
        served = {f"agent {agent} is rolled back to version {at}": at for agent, at in newest.pins.items()}
        if newest.held is not None:
            served[f"agents are held at version {newest.held} by a rollout"] = newest.held
        return [
            Problem(field="pins", message=message, code=Code.IN_USE)
            for message, number in served.items()
            if (version := at.get(CONFIG_VERSION, scope, version_name(number))) is not None
            and identity in version.spec.certificates
        ]

    def _fingerprints(self, certificate: Certificate, at: ServedReader) -> set[str]:
        """The fingerprints of all issues of this certificate in stored versions."""
        scope, identity = certificate.scope, certificate.name
        parts = {
            version.spec.certificates[identity]
            for version in at.list(CONFIG_VERSION, scope)
            if identity in version.spec.certificates
        }
        found = {
            part.certificate.fingerprint
            for part in (self._workspaces.part(scope, name, at=at) for name in parts)
            if part is not None and part.certificate is not None
        }
        if certificate.status is not None and certificate.status.fingerprint:
            found.add(certificate.status.fingerprint)
        return found


def _create(
    plan: WorkspacePlan, scope: str, identity: str, spec: CertificateSpec, status: CertificateStatus
) -> None:
    plan.puts.append(PutObject(kind=CERTIFICATE, name=identity, spec=spec, status=status))
    plan.also.append(lambda draft: claim_unique(draft, CERTIFICATE, scope, DOMAIN, _claimed(spec), identity))
    plan.also.append(lambda draft: register(draft, CERTIFICATE, scope, identity))


def _upstreams_with(at: ServedReader, scope: str, identity: str) -> list[Upstream]:
    """Upstreams that check servers against it, or show it to them."""
    return [
        one
        for one in at.list(UPSTREAM, scope)
        if one.spec.tls and identity in (one.spec.tls.authority_id, one.spec.tls.client_certificate_id)
    ]


def _awaits_key(found: Certificate | None) -> bool:
    """Whether it was declared without a key, as documents are, and none was imported yet."""
    return found is not None and (found.status is None or not found.status.fingerprint)


def _claimed(spec: CertificateSpec) -> str:
    """One certificate per domain and provider."""
    return f"{spec.domain.lower()} {spec.provider}"


def _request_problems(scope: str, spec: CertificateSpec, offered: OfferedIssuers) -> list[Problem]:
    problems = []
    if spec.provider not in offered.providers:
        problems.append(Problem(field="provider", message=f"Must be one of {', '.join(offered.providers)}"))
    if spec.provider == INTERNAL and not offered.internal(spec.domain):
        message = "Lies below none of the server's internal suffixes"
        problems.append(Problem(field="domain", message=message, code=Code.INCOMPATIBLE))
    proved = offered.dns(spec.domain) or offered.zones(scope, spec.domain)
    unproven = spec.provider not in (SELF_SIGNED, INTERNAL) and not proved
    if spec.domain.startswith("*.") and unproven:
        problems.append(
            Problem(
                field="domain",
                message="A wildcard is proved over DNS, which is not set up: import the certificate",
                code=Code.INCOMPATIBLE,
            )
        )
    return problems
