"""A public key whose owner has shown to hold the private half: what a certificate request is good for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.identity.authority import PublicKey
from fleetplane.kernel.identity.enrolment import digest

CSR_LIMIT_BYTES = 16 * 1024
CSRS_REMEMBERED = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenKey:
    key: PublicKey
    digest: str
    """SHA-256 of its SubjectPublicKeyInfo, as `CertificateIdentity.public_key_digest` has it."""


@lru_cache(maxsize=CSRS_REMEMBERED)  # an agent that waits for approval asks again and again
def proven_key(csr_pem: str) -> ProvenKey:
    """The key of a certificate request that is signed with it; names in the request do not count."""
    if not csr_pem:
        raise InvalidArgument("csr_pem is required", field="csr_pem")
    if len(csr_pem) > CSR_LIMIT_BYTES:
        raise InvalidArgument(f"csr_pem is longer than {CSR_LIMIT_BYTES} bytes", field="csr_pem")
    try:
        request = x509.load_pem_x509_csr(csr_pem.encode())
        key = request.public_key()
        # Before the signature: strangers choose how long that of another kind takes to check.
        if not isinstance(key, ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey):
            raise InvalidArgument("csr_pem: only P-256 and Ed25519 keys are accepted", field="csr_pem")
        signed = request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidArgument("csr_pem is no certificate request in PEM", field="csr_pem") from error
    if not signed:
        raise InvalidArgument("csr_pem is not signed by the key that it names", field="csr_pem")
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return ProvenKey(key=key, digest=digest(der))
