"""Our own authority, for names that no public one certifies: one for each organisation, made when needed.

It is not the authority that agents and operators are known by: whoever trusts this one trusts it for web
servers, and only for names below the suffixes of `proxies.internal_suffixes`. That is written into its
certificate as a constraint, so that even its key could not be used for another name. Other suffixes are
another authority: what was issued stays good, and renewals come from the new one.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import ipaddress
import re
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fleetplane.domains.proxies.acme.issuers import new_key
from fleetplane.domains.proxies.acme.orders import ACTOR, IssuanceFailed
from fleetplane.domains.proxies.kinds.records import organization_of
from fleetplane.domains.proxies.serving.certificates import Material, material, names_for
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.master_key import SealedSecret
from fleetplane.kernel.store import Store

AUTHORITY_DAYS: Final = 3650
LEAF_DAYS: Final = 90
BACKDATED: Final = dt.timedelta(minutes=5)
"""For clients whose clock is behind ours."""
SUFFIXES_LIMIT: Final = 20
RESERVED: Final = frozenset({"internal", "test", "local", "lan", "home", "corp", "intranet", "private"})
"""Top-level names that are nobody's on the Internet; of any other, a suffix has at least two labels."""
NO_ADDRESSES: Final = tuple(x509.IPAddress(ipaddress.ip_network(every)) for every in ("0.0.0.0/0", "::/0"))
"""Excluded: a constraint of names says nothing about addresses."""
_SUFFIX: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*")


def suffix_faults(suffixes: Sequence[str]) -> Iterator[str]:
    """What is wrong with suffixes that an operator set. Pure."""
    if len(suffixes) > SUFFIXES_LIMIT:
        yield f"has {len(suffixes)} suffixes; the limit is {SUFFIXES_LIMIT}"
    for suffix in suffixes:
        if not _SUFFIX.fullmatch(suffix) or len(suffix) > 200:
            yield f"{suffix[:80]!r} is not a domain in lower case, such as corp.example.com"
        elif "." not in suffix and suffix not in RESERVED:
            known = ", ".join(sorted(RESERVED))
            yield f"{suffix!r} is a top-level domain of the Internet; a single label must be one of {known}"


def is_internal(domain: str, suffixes: Sequence[str]) -> bool:
    """Whether every name of a certificate for a domain lies below a suffix, or is one. Pure."""
    return all(
        any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes)
        for name in (one.lower().removeprefix("*.") for one in names_for(domain))
    )


class _Authority(msgspec.Struct, frozen=True, kw_only=True):
    key_pem: bytes
    certificate_pem: bytes


class InternalAuthority:
    """An `Issuer` that nobody else is asked by."""

    def __init__(self, store: Store, clock: Clock, master: MasterKey, suffixes: Sequence[str]) -> None:
        self._store = store
        self._clock = clock
        self._master = master
        self._suffixes = tuple(sorted(set(suffixes)))
        self._making = asyncio.Lock()
        """Of any number of first requests of an organisation, one makes its authority."""

    def __repr__(self) -> str:
        return f"<InternalAuthority {' '.join(self._suffixes)}>"

    def covers(self, domain: str) -> bool:
        return is_internal(domain, self._suffixes)

    async def issue(self, domain: str, *, scope: str) -> Material:
        if not self.covers(domain):
            raise IssuanceFailed(
                f"{domain} lies below none of the internal suffixes",
                hint="get it from the certificate authority, or have proxies.internal_suffixes changed",
            )
        authority = await self._authority(organization_of(scope))
        return await asyncio.to_thread(self._signed, authority, domain)

    def _signed(self, authority: _Authority, domain: str) -> Material:
        now_ns = self._clock.now_ns()
        key_pem = new_key()
        issuer = x509.load_pem_x509_certificate(authority.certificate_pem)
        names = [x509.DNSName(one.lower()) for one in names_for(domain)]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, domain[:64])])
        signing = _key(authority.key_pem)
        made = (
            _dated(now_ns, LEAF_DAYS)
            .subject_name(subject)
            .issuer_name(issuer.subject)
            .public_key(_key(key_pem).public_key())
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False
            )
            .sign(signing, hashes.SHA256())
        )
        pem = made.public_bytes(serialization.Encoding.PEM) + authority.certificate_pem
        return material(pem.decode(), key_pem.decode(), now_ns=now_ns)

    async def revoke(self, chain_pem: str, reason: int, *, scope: str) -> None:
        """Nothing to publish: it is taken out of service, and lives ninety days at most."""

    async def suggestion(self, chain_pem: str, *, scope: str) -> None:  # noqa: ARG002  # the protocol's
        return None

    # The authority.

    async def _authority(self, organization: str) -> _Authority:
        kept = SealedSecret(self._store, self._master, name=self._secret(organization))

        async def make() -> bytes:
            return msgspec.msgpack.encode(await asyncio.to_thread(self._made, organization))

        async with self._making:
            found = await kept.read_or_make(make, actor=ACTOR)
        return msgspec.msgpack.decode(found.content, type=_Authority)

    def _made(self, organization: str) -> _Authority:
        key_pem = new_key()
        key = _key(key_pem)
        title = x509.Name(
            [
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization[:64]),
                x509.NameAttribute(NameOID.COMMON_NAME, "Fleetplane internal names"),
            ]
        )
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        allowed = [x509.DNSName(suffix) for suffix in self._suffixes]
        made = (
            _dated(self._clock.now_ns(), AUTHORITY_DAYS)
            .subject_name(title)
            .issuer_name(title)
            .public_key(key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(
                x509.NameConstraints(permitted_subtrees=allowed, excluded_subtrees=NO_ADDRESSES),
                critical=True,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return _Authority(key_pem=key_pem, certificate_pem=made.public_bytes(serialization.Encoding.PEM))

    def _secret(self, organization: str) -> str:
        suffixes = hashlib.sha256("\n".join(self._suffixes).encode()).hexdigest()[:16]
        return f"proxies/internal-authority/{organization}/{suffixes}"


def _dated(now_ns: int, days: int) -> x509.CertificateBuilder:
    now = dt.datetime.fromtimestamp(now_ns // 1_000_000_000, dt.UTC)
    return (
        x509.CertificateBuilder()
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + dt.timedelta(days=days))
    )


def _key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key
