"""The certificate authority.

Its key is ECDSA P-256, because grpc's own clients cannot verify Ed25519 server certificates;
the keys it certifies may be of either kind. A client's role and tenant stand in its
certificate, so that who presents it needs no look-up. Knows no HTTP and no listeners.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.identity.master_key import MasterKey
from fleetplane.kernel.identity.profile import LeafProfile, LeafUsage, host_name, subject
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
    serial: int

    @property
    def leaf_pem(self) -> bytes:
        """The certificate alone, without the authority's behind it."""
        end = b"-----END CERTIFICATE-----\n"
        return self.certificate_pem.partition(end)[0] + end


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
        alternatives = [host_name(name) for name in names]
        name = subject([("name", NameOID.COMMON_NAME, ["fleetplane server"])])
        builder = self._builder(name, key.public_key(), SERVER_LIFE)
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([LeafUsage.SERVER.oid]), critical=False)
        return self._sign(builder, _key_pem(key))

    def issue_client(
        self,
        public_key: PublicKey,
        *,
        name: str,
        life: timedelta,
        role: str = "",
        tenant: str = "",
        organization: str | None = None,
        extensions: Iterable[x509.UnrecognizedExtension] = (),
        uris: bool = True,
        serial: int | None = None,
        backdate: timedelta = BACKDATE,
    ) -> Issued:
        """A client's certificate for a key that never left it.

        Role and tenant stand in it as URIs; without `uris` it has no alternative names at all,
        for clients whose role is told by one of `extensions` and whose tenant by `organization`.
        """
        parts = [("organization", NameOID.ORGANIZATION_NAME, [organization] if organization else [])]
        parts.append(("name", NameOID.COMMON_NAME, [name]))
        builder = self._builder(subject(parts), public_key, life, serial=serial, backdate=backdate)
        builder = builder.add_extension(_usage(digital_signature=True), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([LeafUsage.CLIENT.oid]), critical=False)
        if uris:
            names = [
                x509.UniformResourceIdentifier(URI_ROLE + role),
                x509.UniformResourceIdentifier(URI_TENANT + tenant),
            ]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        return self._sign(builder, None)

    def issue_leaf(self, public_key: PublicKey, profile: LeafProfile, *, serial: int | None = None) -> Issued:
        """A certificate as someone configured it, for a key that never left its owner."""
        builder = self._builder(profile.name(), public_key, profile.life, serial=serial, backdate=BACKDATE)
        builder = builder.add_extension(_usage(digital_signature=True), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([profile.usage.oid]), critical=False)
        if alternatives := profile.alternatives():
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        return self._sign(builder, None)

    def _builder(
        self,
        name: x509.Name,
        public_key: PublicKey,
        life: timedelta,
        *,
        serial: int | None = None,
        backdate: timedelta = BACKDATE,
    ) -> x509.CertificateBuilder:
        _check_key(public_key)
        now = _now(self._clock)
        not_after = min(now + life, self._certificate.not_valid_after_utc)
        if not_after <= now:
            raise InvalidArgument("a certificate must be valid for some time to come")
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._certificate.subject)
            .public_key(public_key)
            .serial_number(serial if serial is not None else x509.random_serial_number())
            .not_valid_before(now - backdate)
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
        return Issued(
            certificate_pem=chain,
            key_pem=key_pem,
            not_after=certificate.not_valid_after_utc,
            serial=certificate.serial_number,
        )


def _self_signed(key: ec.EllipticCurvePrivateKey, now: datetime) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Fleetplane CA")])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature, key_cert_sign=key_cert_sign, crl_sign=crl_sign,
        content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _check_key(key: PublicKey) -> None:
    if isinstance(key, ec.EllipticCurvePublicKey) and not isinstance(key.curve, ec.SECP256R1):
        raise InvalidArgument(f"keys on {key.curve.name} are not accepted", hint="use P-256 or Ed25519")


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _now(clock: Clock) -> datetime:
    return datetime.fromtimestamp(clock.now_ns() // 1_000_000_000, UTC)
