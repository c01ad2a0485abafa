"""An operator's key and certificate in a folder: `identity.key`, `identity.crt` and `ca.crt`.

Certificates of operators live for a day, so whoever uses one renews it: by the command line itself when half
of its life is over, or by `renew --watch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fleetplane.kernel.errors import Conflict, IntegrityError, NotFound
from fleetplane.kernel.files import write_durably

KEY, CERTIFICATE, AUTHORITY = "identity.key", "identity.crt", "ca.crt"
RENEWAL_SHARE = 0.5
"""Of a certificate's life that is over when it is renewed: as operators of the documented protocols do."""


@dataclass(frozen=True, slots=True)
class IdentityFiles:
    folder: Path

    def make_key(self) -> ec.EllipticCurvePrivateKey:
        """A new key in this folder, the owner's alone; refuses to replace one."""
        if (self.folder / KEY).exists():
            raise Conflict(f"{self.folder} has an {KEY} already; it is left alone")
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        write_durably(self.folder / KEY, pem, mode=0o600)
        return key

    def read(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError as error:
            raise NotFound(f"there is no {name} in {self.folder}") from error

    def keep(self, *, certificate_pem: bytes, authority_pem: bytes = b"") -> None:
        if authority_pem:
            write_durably(self.folder / AUTHORITY, authority_pem, mode=0o644)
        write_durably(self.folder / CERTIFICATE, certificate_pem, mode=0o644)

    def public_key_pem(self) -> bytes:
        key = serialization.load_pem_private_key(self.read(KEY), password=None)
        return key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def certificate(self) -> x509.Certificate:
        try:
            return x509.load_pem_x509_certificate(self.read(CERTIFICATE))
        except ValueError as error:
            raise IntegrityError(f"{self.folder / CERTIFICATE} is no certificate in PEM") from error


def request_pem(key: ec.EllipticCurvePrivateKey, name: str) -> str:
    """A certificate request that is signed with the key."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM).decode()


def renewal_at(certificate: x509.Certificate) -> datetime:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return begins + (ends - begins) * RENEWAL_SHARE
