"""Certificates: asked for, brought along, renewed, removed.

A requested certificate is pending until someone issues it (see `CertificateStatus`); an
imported one is active at once. The private key goes into the vault and never comes out here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from fleetplane.domains.proxies.configuration import certificate_part
from fleetplane.domains.proxies.kinds import (
    CERTIFICATE,
    CONFIG_VERSION,
    VIRTUAL_HOST,
    Certificate,
    CertificateSpec,
    CertificateStatus,
    VirtualHost,
)
from fleetplane.domains.proxies.names import (
    check_match,
    claim_unique,
    hold,
    holders,
    new_id,
    refuse,
    register,
    unregister,
)
from fleetplane.domains.proxies.rules import domain_problems
from fleetplane.domains.proxies.values import CertificateState
from fleetplane.domains.proxies.vault import Vault
from fleetplane.domains.proxies.workspaces import Plan, Put, Workspaces
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, NotFound
from fleetplane.kernel.store import Store
from fleetplane.web.problems import Code, Problem, Rejected

LETS_ENCRYPT = "letsencrypt"
"""The authority that the server is a client of, whichever that is."""
SELF_SIGNED = "selfsigned"
"""Made here and trusted by nobody: for development."""
IMPORTED = "imported"
PROVIDERS = (LETS_ENCRYPT,)
"""Whom a certificate can be requested from; imported ones come from their owner."""
DOMAIN = "domain"
PEM_LIMIT_BYTES = 256 * 1024
CHAIN_LIMIT = 10
NS = 1_000_000_000
PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey


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
    chain = _chain(chain_pem)
    leaf = chain[0]
    key = _key(key_pem)
    public = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    if key.public_key().public_bytes(*public) != leaf.public_key().public_bytes(*public):
        raise Rejected(
            Problem(field="private_key", message="Does not belong to the certificate", code=Code.INCOMPATIBLE)
        )
    expires_at_ns = int(leaf.not_valid_after_utc.timestamp()) * NS
    if expires_at_ns <= now_ns:
        raise Rejected(Problem(field="certificate", message="Has expired", code=Code.OUT_OF_RANGE))
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


def _chain(pem: str) -> list[x509.Certificate]:
    if len(pem) > PEM_LIMIT_BYTES:
        raise Rejected(Problem(field="certificate", message="Too long", code=Code.TOO_LONG))
    try:
        chain = x509.load_pem_x509_certificates(pem.encode())
    except ValueError as error:
        raise Rejected(Problem(field="certificate", message="Not a certificate in PEM")) from error
    if len(chain) > CHAIN_LIMIT:
        raise Rejected(Problem(field="certificate", message=f"More than {CHAIN_LIMIT}", code=Code.TOO_MANY))
    for number, (one, issuer) in enumerate(pairwise(chain), start=1):
        try:
            one.verify_directly_issued_by(issuer)
        except (ValueError, TypeError, InvalidSignature) as error:
            message = f"Certificate {number} was not issued by the one after it"
            raise Rejected(Problem(field="certificate", message=message, code=Code.INCOMPATIBLE)) from error
    return chain


def _key(pem: str) -> PrivateKey:
    try:
        key = serialization.load_pem_private_key(pem.encode(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise Rejected(
            Problem(field="private_key", message="Not an unencrypted private key in PEM")
        ) from error
    if not isinstance(key, PrivateKey):
        raise Rejected(Problem(field="private_key", message="Must be RSA or ECDSA", code=Code.INCOMPATIBLE))
    return key


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
class Offered:
    """What can be requested from this server."""

    providers: tuple[str, ...] = PROVIDERS
    dns: Callable[[str], bool] = lambda _: False
    """Whether a domain can be proved over DNS, as wildcards have to be."""


class Certificates:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        workspaces: Workspaces,
        vault: Vault,
        offered: Offered = Offered(),  # noqa: B008  # frozen
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
        refuse([*domain_problems(spec.domain), *_request_problems(spec, self._offered)])
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
        return await self._create(scope, spec, found.status(), found, cause="certificate.import", actor=actor)

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
            identity = new_id(self._clock)
            plan = self._workspaces.plan(scope, cause=cause, subject=identity, actor=actor)
            plan.puts.append(Put(kind=CERTIFICATE, name=identity, spec=spec, status=status))
            plan.also.append(
                lambda draft: claim_unique(draft, CERTIFICATE, scope, DOMAIN, _claimed(spec), identity)
            )
            plan.also.append(lambda draft: register(draft, CERTIFICATE, scope, identity))
            if found is not None:
                self._serve(plan, identity, spec, found)
            made: Certificate = await self._workspaces.commit(scope, plan)
            return made

    async def issued(self, scope: str, identity: str, found: Material, *, actor: str) -> Certificate:
        """A certificate has come, from whoever issues them: serve it from now on."""
        async with self._workspaces.editing(scope):
            before = self.get(scope, identity)
            plan = self._workspaces.plan(scope, cause="certificate.issue", subject=identity, actor=actor)
            plan.puts.append(
                Put(kind=CERTIFICATE, name=identity, spec=before.spec, before=before, status=found.status())
            )
            self._serve(plan, identity, before.spec, found)
            written: Certificate = await self._workspaces.commit(scope, plan)
            return written

    def _serve(self, plan: Plan, identity: str, spec: CertificateSpec, found: Material) -> None:
        """Seal the key and mention the certificate in the next version."""
        part = certificate_part(identity, spec, found.status())
        assert part is not None
        plan.next.put("certificates", part)
        plan.also.append(lambda draft: self._vault.put(draft, identity, found.fingerprint, found.key_pem))

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
                Put(kind=CERTIFICATE, name=identity, spec=before.spec, before=before, status=renewed)
            )
            written: Certificate = await self._workspaces.commit(scope, plan)
            return written

    async def delete(self, scope: str, identity: str, *, if_match: str | None, actor: str) -> None:
        async with self._workspaces.editing(scope):
            before = self.get(scope, identity)
            check_match(if_match, before)
            hold(
                "the certificate is in use",
                [
                    *holders("ssl_certificate_id", "virtual host", self._users_of(scope, identity)),
                    *self._pinned_users(scope, identity),
                ],
            )
            plan = self._workspaces.plan(scope, cause="certificate.delete", subject=identity, actor=actor)
            plan.deletes.append(before)
            plan.also.append(
                lambda draft: draft.release(CERTIFICATE, scope, DOMAIN, _claimed(before.spec), identity)
            )
            plan.also.append(lambda draft: unregister(draft, CERTIFICATE, scope, identity))
            for fingerprint in self._fingerprints(scope, before):
                plan.also.append(
                    lambda draft, fingerprint=fingerprint: self._vault.remove(draft, identity, fingerprint)  # type: ignore[misc]
                )
            await self._workspaces.commit(scope, plan)

    def _users_of(self, scope: str, identity: str) -> list[VirtualHost]:
        return [
            host for host in self._store.list(VIRTUAL_HOST, scope) if host.spec.ssl_certificate_id == identity
        ]

    def _pinned_users(self, scope: str, identity: str) -> list[Problem]:
        """Agents that are rolled back to a version which serves it."""
        newest = self._workspaces.newest(scope)
        return [
            Problem(
                field="pins", message=f"agent {agent} is rolled back to version {number}", code=Code.IN_USE
            )
            for agent, number in (newest.pins if newest is not None else {}).items()
            if (version := self._workspaces.version(scope, number)) is not None
            and identity in version.certificates
        ]

    def _fingerprints(self, scope: str, certificate: Certificate) -> set[str]:
        """Of everything that this certificate has been, in the versions that are kept."""
        identity = certificate.name
        parts = {
            version.spec.certificates[identity]
            for version in self._store.list(CONFIG_VERSION, scope)
            if identity in version.spec.certificates
        }
        found = {
            part.certificate.fingerprint
            for part in (self._workspaces.part(scope, name) for name in parts)
            if part is not None and part.certificate is not None
        }
        if certificate.status is not None and certificate.status.fingerprint:
            found.add(certificate.status.fingerprint)
        return found


def _claimed(spec: CertificateSpec) -> str:
    """One certificate per domain and provider."""
    return f"{spec.domain.lower()} {spec.provider}"


def _request_problems(spec: CertificateSpec, offered: Offered) -> list[Problem]:
    problems = []
    if spec.provider not in offered.providers:
        problems.append(Problem(field="provider", message=f"Must be one of {', '.join(offered.providers)}"))
    unproven = spec.provider != SELF_SIGNED and not offered.dns(spec.domain)
    if spec.domain.startswith("*.") and unproven:
        problems.append(
            Problem(
                field="domain",
                message="A wildcard is proved over DNS, which is not set up: import the certificate",
                code=Code.INCOMPATIBLE,
            )
        )
    return problems
