"""A certificate authority for one test."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

ROLE_OID = x509.ObjectIdentifier("1.3.6.1.4.1.999999.1")

Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


def make_key(kind: str) -> Key:
    return (
        ed25519.Ed25519PrivateKey.generate() if kind == "ed25519" else ec.generate_private_key(ec.SECP256R1())
    )


def key_pem(key: Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


class ThrowawayCa:
    def __init__(self, *, kind: str = "p256", name: str = "test root") -> None:
        self.key = make_key(kind)
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(self.name, self.key.public_key(), dt.timedelta(days=2), dt.timedelta(days=2))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.certificate = self._sign(builder)
        self.pem = certificate_pem(self.certificate)

    def server(self, folder: Path, *, kind: str = "p256", host: str = "127.0.0.1") -> tuple[Path, Path]:
        """The files of a server's certificate and key."""
        key = make_key(kind)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "nstance-server")])
        builder = self._builder(subject, key.public_key(), dt.timedelta(minutes=5), dt.timedelta(days=1))
        names = [x509.IPAddress(ipaddress.ip_address(host)), x509.DNSName("localhost")]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        certificate, private = folder / "server.crt", folder / "server.key"
        certificate.write_bytes(certificate_pem(self._sign(builder)))
        private.write_bytes(key_pem(key))
        return certificate, private

    def client(
        self,
        public_key: ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey,
        name: str,
        *,
        role: str = "agent",
        tenant: str = "default",
        started_ago: dt.timedelta = dt.timedelta(seconds=5),
        ends_in: dt.timedelta = dt.timedelta(hours=24),
    ) -> bytes:
        """A client's certificate with the contents the protocol gives it."""
        subject = x509.Name(
            [
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, tenant),
                x509.NameAttribute(NameOID.COMMON_NAME, name),
            ]
        )
        said = b"\x13" + bytes([len(role)]) + role.encode()
        builder = self._builder(subject, public_key, started_ago, ends_in)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(x509.UnrecognizedExtension(ROLE_OID, said), critical=False)
        builder = builder.add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        return certificate_pem(self._sign(builder))

    def _builder(
        self,
        subject: x509.Name,
        public_key: ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey,
        started_ago: dt.timedelta,
        ends_in: dt.timedelta,
    ) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - started_ago)
            .not_valid_after(now + ends_in)
        )

    def _sign(self, builder: x509.CertificateBuilder) -> x509.Certificate:
        digest = None if isinstance(self.key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
        return builder.sign(self.key, digest)
