"""Keys for a trial: the server does not send private keys along with what is only to be tried."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

_LIFE = timedelta(days=1)


def with_keys(candidate: pb.ConfigUpdate, served: pb.ConfigUpdate) -> pb.ConfigUpdate:
    """The configuration with a key for every certificate: the one in service, else a generated pair."""
    made = pb.ConfigUpdate()
    made.CopyFrom(candidate)
    for name, certificate in made.certificates.items():
        if name in served.certificates:
            certificate.CopyFrom(served.certificates[name])
        else:
            certificate.certificate_pem, certificate.private_key_pem = _pair(certificate.domain)
    return made


def _pair(domain: str) -> tuple[str, str]:
    """A self-signed certificate for a name, and its key. Slow to import, and rarely needed."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, domain[:64] or "trial")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _LIFE)
        .not_valid_after(now + _LIFE)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), pem.decode()
