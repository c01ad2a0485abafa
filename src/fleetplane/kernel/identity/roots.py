"""The root of an authority (key and self-signed certificate), and the steps from one authority to the next.

    steady     one authority signs and is trusted
    announced  the next one is trusted too and signs nothing: everyone has time to learn of it
    switched   the next one signs; the former one is still trusted, and has signed the next one's certificate
               for those who know no other; its key is gone
    steady     the former one is trusted no more

No step can be left out. The issuers know who has learnt of an authority and who still presents a certificate
of the former one; they decide when the next step is due. Pure.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument


class SuccessionPhase(StrEnum):
    STEADY = "steady"
    ANNOUNCED = "announced"
    SWITCHED = "switched"


class AuthorityRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One authority as it is kept, inside the seal."""

    certificate_der: bytes
    private_der: bytes | None = None
    """Gone as soon as it signs nothing any more."""


class Succession(msgspec.Struct, frozen=True, kw_only=True):
    current: AuthorityRecord
    """The one that signs."""
    following: AuthorityRecord | None = None
    preceding: AuthorityRecord | None = None
    cross_der: bytes | None = None
    """The certificate of the one that signs, signed by the preceding one: for those who trust that alone."""
    trusted_since_ns: int = 0
    """When the set of those that are trusted last changed."""
    signing_since_ns: int = 0
    """When the one that signs began to."""
    changes: int = 0
    """How often the set of those that are trusted has changed."""

    @property
    def phase(self) -> SuccessionPhase:
        if self.following is not None:
            return SuccessionPhase.ANNOUNCED
        return SuccessionPhase.SWITCHED if self.preceding is not None else SuccessionPhase.STEADY

    @property
    def trusted(self) -> tuple[AuthorityRecord, ...]:
        """The one that signs first."""
        return tuple(
            record for record in (self.current, self.following, self.preceding) if record is not None
        )

    def announce(self, following: AuthorityRecord, *, now_ns: int) -> Succession:
        _expect(self.phase, SuccessionPhase.STEADY)
        return self._after(following=following, trusted_since_ns=now_ns, changes=self.changes + 1)

    def switch(self, *, now_ns: int, cross_der: bytes | None = None) -> Succession:
        _expect(self.phase, SuccessionPhase.ANNOUNCED)
        assert self.following is not None
        before = msgspec.structs.replace(self.current, private_der=None)
        return self._after(
            current=self.following,
            following=None,
            preceding=before,
            cross_der=cross_der,
            signing_since_ns=now_ns,
        )

    def retire(self, *, now_ns: int) -> Succession:
        _expect(self.phase, SuccessionPhase.SWITCHED)
        return self._after(preceding=None, cross_der=None, trusted_since_ns=now_ns, changes=self.changes + 1)

    def _after(self, **changed: object) -> Succession:
        return msgspec.structs.replace(self, **changed)


_WORDS = {
    SuccessionPhase.STEADY: "only one authority is trusted, and no other was announced",
    SuccessionPhase.ANNOUNCED: "the next authority was announced and does not sign yet",
    SuccessionPhase.SWITCHED: "the authority before the present one is still trusted",
}
_HINTS = {
    SuccessionPhase.STEADY: "announce the next authority first",
    SuccessionPhase.ANNOUNCED: "switch to it next",
    SuccessionPhase.SWITCHED: "retire the one before first",
}


def _expect(found: SuccessionPhase, wanted: SuccessionPhase) -> None:
    if found is not wanted:
        raise FailedPrecondition(_WORDS[found], hint=_HINTS[found], details={"phase": found.value})


AUTHORITY_LIFE = timedelta(days=3650)
BACKDATE = timedelta(minutes=5)  # a client's clock may lag by this much


PATH_LENGTH = 1
"""Authorities below ours: one, the successor whose certificate it signs when it is replaced."""

PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


def key_id_of(certificate: x509.Certificate) -> str:
    """How the certificates that an authority signs name its key."""
    found = certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    return found.value.digest.hex()


def authority_key_identifier(issuer: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    """As the issuer's own certificate says it: programs work it out from the key in more than one way."""
    found = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(found.value)


def make_root(now: datetime, *, title: str = "Fleetplane CA") -> AuthorityRecord:
    """A new authority: a key, and a certificate that it signs for itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    return AuthorityRecord(
        certificate_der=_self_signed(key, now, title).public_bytes(serialization.Encoding.DER),
        private_der=_private_der(key),
    )


def private_key(der: bytes) -> PrivateKey:
    key = serialization.load_der_private_key(der, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey)
    return key


def signature_hash(key: PrivateKey) -> hashes.SHA256 | None:
    """What is hashed before signing; Ed25519 does that itself."""
    return hashes.SHA256() if isinstance(key, ec.EllipticCurvePrivateKey) else None


def may_sign_authorities(certificate: x509.Certificate) -> bool:
    """Whether clients accept another authority's certificate signed by this one."""
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    return constraints.path_length is None or constraints.path_length >= 1


def cross_signed(
    successor: x509.Certificate, *, by: x509.Certificate, key: PrivateKey, now: datetime
) -> bytes:
    """The successor's name and key in a certificate by its predecessor, in DER."""
    made = (
        x509.CertificateBuilder()
        .subject_name(successor.subject)
        .issuer_name(by.subject)
        .public_key(successor.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(min(by.not_valid_after_utc, successor.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(authority_key_identifier(by), critical=False)
        .add_extension(
            successor.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value, critical=False
        )
        .sign(key, signature_hash(key))
    )
    return made.public_bytes(serialization.Encoding.DER)


def read_root(certificate_pem: bytes, key_pem: bytes, *, now: datetime) -> AuthorityRecord:
    """An authority brought by its owner, if it can sign for a fleet; `InvalidArgument` says what is wrong."""
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
    except ValueError as error:
        raise InvalidArgument("certificate: is no certificate in PEM", field="certificate") from error
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except TypeError as error:
        raise InvalidArgument(
            "key: is encrypted", field="key", hint="decrypt it first, for example with openssl pkey"
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidArgument("key: is no private key in PEM", field="key") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) or (
        isinstance(key, ec.EllipticCurvePrivateKey) and not isinstance(key.curve, ec.SECP256R1)
    ):
        raise InvalidArgument("key: must be P-256 or Ed25519", field="key")
    if key.public_key() != certificate.public_key():
        raise InvalidArgument("key: is not the key of this certificate", field="key")
    if problem := _root_problem(certificate, now):
        raise InvalidArgument(f"certificate: {problem}", field="certificate")
    return AuthorityRecord(
        certificate_der=certificate.public_bytes(serialization.Encoding.DER), private_der=_private_der(key)
    )


def write_root(record: AuthorityRecord) -> bytes:
    """Certificate and private key of an authority, in PEM."""
    assert record.private_der is not None
    certificate = x509.load_der_x509_certificate(record.certificate_der)
    key = private_key(record.private_der)
    return certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _root_problem(certificate: x509.Certificate, now: datetime) -> str:
    if certificate.issuer != certificate.subject:
        return "is not self-signed; bring the authority at the end of the chain"
    try:
        certificate.verify_directly_issued_by(certificate)
    except (InvalidSignature, ValueError, TypeError):
        return "its own signature does not verify"
    if not certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc:
        begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        return f"is valid from {begins:%F} to {ends:%F}, not now"
    extensions = certificate.extensions
    try:
        authority = extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    except x509.ExtensionNotFound as error:
        return f"lacks the extension {error.oid._name}"
    if not authority:
        return "is not the certificate of an authority"
    try:
        usage = extensions.get_extension_for_class(x509.KeyUsage).value
    except x509.ExtensionNotFound:
        return ""
    return "" if usage.key_cert_sign else "its key may not sign certificates"


def _private_der(key: PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def unpack(kept: bytes) -> Succession:
    """What is kept; the first form was the PEM of one key and its certificate."""
    if not kept.startswith(b"-----BEGIN"):
        return msgspec.msgpack.decode(kept, type=Succession)
    key = serialization.load_pem_private_key(kept, password=None)
    private_der = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    certificate = x509.load_pem_x509_certificate(kept)
    certificate_der = certificate.public_bytes(serialization.Encoding.DER)
    return Succession(current=AuthorityRecord(certificate_der=certificate_der, private_der=private_der))


def _self_signed(key: ec.EllipticCurvePrivateKey, now: datetime, title: str) -> x509.Certificate:
    # Each has a name of its own: while two are trusted, a verifier need not try both.
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    common_name = f"{title} {identifier.digest.hex()[:8]}"
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=PATH_LENGTH), critical=True)
        .add_extension(key_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )


def key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
