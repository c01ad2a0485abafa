"""When a certificate is fine, due for renewal, or useless. Pure.

Renewal is due after two thirds of a certificate's life, which leaves a third of it for
retries; after nine tenths it is urgent, because someone will have to act by hand soon. Machines
that were made together would all ask together, so each asks a little later than that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

PrivateKey = ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey

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

    def renewal_at(self, jitter: float) -> float:
        """When to ask for the next one; `jitter` is a number in [0, 1), from the clock."""
        return self.start + (self.end - self.start) * (DUE_AFTER + SPREAD * jitter)

    def seconds_to_next_age(self, now: float) -> float | None:
        """Until `age` gives another answer; None when it never will."""
        whole = self.end - self.start
        turns = (self.start + whole * DUE_AFTER, self.start + whole * URGENT_AFTER, self.end)
        return next((turn - now for turn in turns if turn > now), None)


def complaint(
    certificate: x509.Certificate, *, key: PrivateKey, instance_id: str, authority_pem: bytes
) -> str | None:
    """Why this certificate is not ours to show, or None. Its dates are judged elsewhere."""
    if public_bytes(certificate) != public_bytes(key):
        return "it is for another key"
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if [name.value for name in names] != [instance_id]:
        return f"it is for {certificate.subject.rfc4514_string()}, not for {instance_id}"
    if not issued_by_one(authorities(authority_pem), certificate):
        return "it is not from the authority in ca.crt"
    return None


def authorities(pem: bytes) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(pem)


def issued_by_one(known: Iterable[x509.Certificate], certificate: x509.Certificate) -> bool:
    return any(_issued(authority, certificate) for authority in known)


def public_bytes(holder: PrivateKey | x509.Certificate) -> bytes:
    """The DER form of the public half, to compare and to submit."""
    return holder.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def public_pem(key: PrivateKey) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def private_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _issued(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
