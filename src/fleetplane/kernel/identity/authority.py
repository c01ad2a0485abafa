"""The certificate authority.

Its key is ECDSA P-256, because grpc's own clients cannot verify Ed25519 server certificates;
the keys it certifies may be of either kind. A client's role and tenant stand in its
certificate as URIs, so that who presents it needs no look-up. Knows no HTTP and no listeners.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.identity.master_key import MasterKey
from fleetplane.kernel.store import Store

AUTHORITY_LIFE = timedelta(days=3650)
SERVER_LIFE = timedelta(days=397)  # the longest that browsers accept
BACKDATE = timedelta(minutes=5)  # a client's clock may lag by this much
ACTOR = "system/identity"
_SECRET = "authority"  # noqa: S105  # the name it is kept under
URI_ROLE = "fleetplane://role/"
URI_TENANT = "fleetplane://tenant/"

PublicKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A certificate with its chain, and the private key where we made it."""

    certificate_pem: bytes
    key_pem: bytes | None
    not_after: datetime


class Authority:
    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate, clock: Clock) -> None:
        self._key = key
        self._certificate = certificate
        self._clock = clock

    def __repr__(self) -> str:
        subject = self._certificate.subject.rfc4514_string()
        return f"<Authority {subject} until {self._certificate.not_valid_after_utc:%F}>"

    @classmethod
    async def load_or_create(cls, store: Store, master: MasterKey, clock: Clock) -> Authority:
        """The authority kept in the store, made at first start."""
        sealed = await store.get_secret(_SECRET)
        if sealed is not None:
            pem = master.open(sealed, purpose=_SECRET)
            key = serialization.load_pem_private_key(pem, password=None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            return cls(key, x509.load_pem_x509_certificate(pem), clock)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _self_signed(key, _now(clock))
        pem = _key_pem(key) + certificate.public_bytes(serialization.Encoding.PEM)
        await store.put_secret(_SECRET, master.seal(pem, purpose=_SECRET), actor=ACTOR)
        return cls(key, certificate, clock)

    @property
    def certificate_pem(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue_server(self, names: Iterable[str]) -> Issued:
        """A server's certificate for host names and addresses, with a key of its own."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = [_host(name) for name in names]
        builder = self._builder("fleetplane server", key.public_key(), SERVER_LIFE)
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        builder = builder.add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        return self._sign(builder, _key_pem(key))

    def issue_client(
        self, public_key: PublicKey, *, name: str, role: str, tenant: str, life: timedelta
    ) -> Issued:
        """A client's certificate for a key that never left it."""
        if isinstance(public_key, ec.EllipticCurvePublicKey) and not isinstance(
            public_key.curve, ec.SECP256R1
        ):
            raise InvalidArgument(
                f"keys on {public_key.curve.name} are not accepted", hint="use P-256 or Ed25519"
            )
        uris = [
            x509.UniformResourceIdentifier(URI_ROLE + role),
            x509.UniformResourceIdentifier(URI_TENANT + tenant),
        ]
        builder = self._builder(name, public_key, life)
        builder = builder.add_extension(x509.SubjectAlternativeName(uris), critical=False)
        builder = builder.add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        return self._sign(builder, None)

    def _builder(self, common_name: str, public_key: PublicKey, life: timedelta) -> x509.CertificateBuilder:
        now = _now(self._clock)
        not_after = min(now + life, self._certificate.not_valid_after_utc)
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
            .issuer_name(self._certificate.subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - BACKDATE)
            .not_valid_after(not_after)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        )

    def _sign(self, builder: x509.CertificateBuilder, key_pem: bytes | None) -> Issued:
        certificate = builder.sign(self._key, hashes.SHA256())
        chain = certificate.public_bytes(serialization.Encoding.PEM) + self.certificate_pem
        return Issued(certificate_pem=chain, key_pem=key_pem, not_after=certificate.not_valid_after_utc)


def _self_signed(key: ec.EllipticCurvePrivateKey, now: datetime) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Fleetplane CA")])
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _now(clock: Clock) -> datetime:
    return datetime.fromtimestamp(clock.now_ns() // 1_000_000_000, UTC)
