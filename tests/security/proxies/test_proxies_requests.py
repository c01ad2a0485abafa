"""Certificate requests of strangers: nothing that takes long is done with a key that is refused anyway."""

from __future__ import annotations

import base64

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.identity.enrolment import proven_key


def test_the_signature_of_a_key_that_is_not_accepted_is_not_checked() -> None:
    """Checking one of RSA with 16384 bits and a great exponent takes 20 ms of everybody's time."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    made = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    der = bytearray(made.public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1
    text = base64.encodebytes(bytes(der)).decode()
    spelled = f"-----BEGIN CERTIFICATE REQUEST-----\n{text}-----END CERTIFICATE REQUEST-----\n"
    with pytest.raises(InvalidArgument, match="only P-256 and Ed25519"):
        proven_key(spelled)
