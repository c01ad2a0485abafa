"""An agent's certificate: when it is fine, due for renewal or useless, and the folder that keeps it.

Renewal is due after two thirds of a certificate's life, which leaves a third of it for
retries; after nine tenths it is urgent, because someone will have to act by hand soon. Machines
that were made together would all ask together, so each may ask a little later than that. All of this is
pure; `CertificateFolder` blocks on the disk.

The cryptography library takes ten megabytes, so it is loaded by the functions that need it: an agent that
calls them in a short-lived process (`short_lived`) does not carry it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from fleetplane.kernel.errors import FailedPrecondition, IntegrityError
from fleetplane.node.identity import PrivateFolder

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

PrivateKey: TypeAlias = "ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey"

PEM_LIMIT_BYTES: Final = 64 * 1024
"""Of what a server sends; while one authority follows another there are two, of a kilobyte each."""
DUE_AFTER: Final = 2 / 3
SPREAD: Final = 1 / 20
"""Of a life, over which the first attempts to renew are spread: 18 days of a year's certificate."""
URGENT_AFTER: Final = 9 / 10


class Age(StrEnum):
    FRESH = "fresh"
    DUE = "due"
    URGENT = "urgent"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """From when to when a certificate holds, in seconds since the Unix epoch."""

    start: float
    end: float

    @classmethod
    def of(cls, certificate: x509.Certificate) -> Life:
        return cls(
            start=certificate.not_valid_before_utc.timestamp(),
            end=certificate.not_valid_after_utc.timestamp(),
        )

    def age(self, now: float) -> Age:
        if now >= self.end:
            return Age.OVER
        spent = (now - self.start) / (self.end - self.start)
        if spent >= URGENT_AFTER:
            return Age.URGENT
        return Age.DUE if spent >= DUE_AFTER else Age.FRESH

    def renewal_at(self, jitter: float = 0.0) -> float:
        """When to ask for the next one; `jitter` is a number in [0, 1), from the clock."""
        return self.start + (self.end - self.start) * (DUE_AFTER + SPREAD * jitter)

    def seconds_to_next_age(self, now: float) -> float | None:
        """Until `age` gives another answer; None when it never will."""
        whole = self.end - self.start
        turns = (self.start + whole * DUE_AFTER, self.start + whole * URGENT_AFTER, self.end)
        return next((turn - now for turn in turns if turn > now), None)


def complaint(
    leaf: x509.Certificate,
    *,
    key: PrivateKey,
    authorities: Iterable[x509.Certificate],
    is_named: Callable[[x509.Certificate], bool],
    whom: str,
) -> str | None:
    """Why this certificate is not ours to present, or None. Its dates are judged elsewhere.

    `is_named` tells whether it names us; `whom` is that name for the text.
    """
    if public_bytes(leaf) != public_bytes(key):
        return "it is for another key"
    if not is_named(leaf):
        return f"it is for {leaf.subject.rfc4514_string() or 'nobody'}, not for {whom}"
    if not issued_by_one(authorities, leaf):
        return "it is not from the authority that is trusted"
    return None


def parse(pem: bytes) -> list[x509.Certificate]:
    """The certificates of a PEM text; none if it holds something else."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        return []


def issued_by_one(known: Iterable[x509.Certificate], certificate: x509.Certificate) -> bool:
    return any(_issued(authority, certificate) for authority in known)


def load_private_key(pem: bytes, where: Path | str) -> PrivateKey:
    """An Ed25519 or P-256 key."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError):
        raise IntegrityError(
            f"{where} holds no private key", hint="remove it and a new one is made"
        ) from None
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key
    if isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP256R1):
        return key
    raise IntegrityError(f"the key in {where} is neither Ed25519 nor P-256")


def signing_request(key: PrivateKey, *, name: str = "") -> str:
    """A request for a certificate, in PEM. Servers decide the names in certificates, so one is not needed."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519
    from cryptography.x509.oid import NameOID

    subject = [x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else []
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name(subject))
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return builder.sign(key, algorithm).public_bytes(serialization.Encoding.PEM).decode()


def public_bytes(holder: PrivateKey | x509.Certificate) -> bytes:
    """The DER form of the public half, to compare and to submit."""
    from cryptography.hazmat.primitives import serialization

    return holder.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def public_pem(key: PrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def private_pem(key: PrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _issued(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionCredentials:
    """What a connection is made with."""

    key_pem: bytes
    certificate_pem: bytes
    authority_pem: bytes
    life: Life
    serial: str = ""

    def __repr__(self) -> str:
        return f"<Credentials serial={self.serial}>"


class CertificateFolder(PrivateFolder):
    """A key that never leaves, its certificate, and the authorities that are trusted.

    A certificate that does not belong to our key, that does not name us, or that nobody trusted has signed is
    not kept; nor are authorities under which our own certificate would not count any more.
    """

    def __init__(self, root: Path, *, stem: str, mode: int = 0o600, hint: str = "") -> None:
        """`stem` of key and certificate files; `hint` for a folder without them."""
        super().__init__(root, mode=mode)
        self.key_file = root / f"{stem}.key"
        self.certificate_file = root / f"{stem}.crt"
        self.authority_file = root / "ca.crt"
        self._hint = hint

    def own_certificate(self) -> x509.Certificate | None:
        """None also for a file that holds something else: the next one issued replaces it."""
        return next(iter(parse(self.read(self.certificate_file) or b"")), None)

    def trust(self, authority_pem: bytes) -> bool:
        """Trust these authorities from now on; whether they are others than before.

        One must be left that has signed the certificate we have: else the agent could not connect after its
        next start, and no server could tell it otherwise.
        """
        if authority_pem == self.read(self.authority_file):
            return False
        known, own = _authorities(authority_pem), self.own_certificate()
        if own is not None and not issued_by_one(known, own):
            raise IntegrityError("the server wants only others to be trusted than who signed our certificate")
        self.write(self.authority_file, authority_pem)
        return True

    def keep_issued(
        self,
        certificate_pem: bytes,
        authority_pem: bytes,
        *,
        key: PrivateKey,
        is_named: Callable[[x509.Certificate], bool],
        whom: str,
    ) -> None:
        """Keep a certificate that was issued to us, or IntegrityError.

        With it may come whom to trust from now on (else it is empty). That is written first: while one
        authority follows another, the certificate we had is good under both.
        """
        leaf = next(iter(_received(certificate_pem)), None)
        if leaf is None:
            raise IntegrityError("the server's answer holds no certificate")
        known = parse(self.read(self.authority_file) or b"")
        if authority_pem:
            known = _authorities(authority_pem)
        why = complaint(leaf, key=key, authorities=known, is_named=is_named, whom=whom)
        if why is not None:
            raise IntegrityError(f"the server issued a certificate that we cannot use: {why}")
        if authority_pem and authority_pem != self.read(self.authority_file):
            self.write(self.authority_file, authority_pem)
        self.write(self.certificate_file, certificate_pem)

    def credentials(self) -> ConnectionCredentials:
        key, certificate = self.read(self.key_file), self.read(self.certificate_file)
        authority = self.read(self.authority_file)
        if key is None or certificate is None or authority is None:
            raise FailedPrecondition(f"there is no identity in {self.root}", hint=self._hint)
        leaf = next(iter(parse(certificate)), None)
        if leaf is None:
            raise IntegrityError(f"{self.certificate_file} holds no certificate")
        if public_bytes(leaf) != public_bytes(load_private_key(key, self.key_file)):
            raise IntegrityError(f"{self.certificate_file} is not for the key in {self.key_file}")
        return ConnectionCredentials(
            key_pem=key,
            certificate_pem=certificate,
            authority_pem=authority,
            life=Life.of(leaf),
            serial=f"{leaf.serial_number:x}",
        )


def _authorities(pem: bytes) -> list[x509.Certificate]:
    known = _received(pem)
    if not known:
        raise IntegrityError("what the server wants to be trusted are no certificates")
    return known


def _received(pem: bytes) -> list[x509.Certificate]:
    return parse(pem) if len(pem) <= PEM_LIMIT_BYTES else []
