"""What an authority is made of: its key and the certificate that it signs for itself."""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fleetplane.kernel.identity.succession import AuthorityRecord, Succession

AUTHORITY_LIFE = timedelta(days=3650)
BACKDATE = timedelta(minutes=5)  # a client's clock may lag by this much


def key_id_of(certificate: x509.Certificate) -> str:
    """How the certificates that an authority signs name its key."""
    found = certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    return found.value.digest.hex()


def make_root(now: datetime) -> AuthorityRecord:
    """A new authority: a key, and a certificate that it signs for itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    return AuthorityRecord(
        certificate_der=_self_signed(key, now).public_bytes(serialization.Encoding.DER),
        private_der=key.private_bytes(
            serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
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


def _self_signed(key: ec.EllipticCurvePrivateKey, now: datetime) -> x509.Certificate:
    # Each has a name of its own: while two are trusted, a verifier need not try both.
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    common_name = f"Fleetplane CA {identifier.digest.hex()[:8]}"
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )


def key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature, key_cert_sign=key_cert_sign, crl_sign=crl_sign,
        content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
