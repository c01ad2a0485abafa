"""The folder that says who this agent is.

    nonce.jwt, ca.crt                    put there by whoever made the instance
    identity.key, .pub, .crt             made here
    config.hash                          which configuration the received files are of

Reads and writes it; what to do about what it holds is decided in `enrolment`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ed25519

from fleetplane.domains.instances.agent import certificates, enrolment
from fleetplane.domains.instances.agent.certificates import Age, Life, PrivateKey
from fleetplane.domains.instances.agent.enrolment import CertificateState, NonceState
from fleetplane.domains.instances.agent.key_folder import load_private_key
from fleetplane.domains.instances.agent.nonce import NONCE_LIMIT_BYTES
from fleetplane.kernel.durable import sync_folder, write_durably
from fleetplane.kernel.errors import IntegrityError, SettingsError

HASH_LIMIT_BYTES: Final = 4096
TRUST_LIMIT_BYTES: Final = 64 * 1024
"""Of ca.crt; while one authority follows another it holds two certificates of a kilobyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What a connection is made with."""

    key_pem: bytes
    certificate_pem: bytes
    authority_pem: bytes
    life: Life


class IdentityFolder:
    """All methods block on the disk."""

    def __init__(self, folder: Path, *, mode: int) -> None:
        self._folder = folder
        self._mode = mode

    def __repr__(self) -> str:
        return f"<IdentityFolder {self._folder}>"

    def authority_pem(self) -> bytes:
        place = self._folder / "ca.crt"
        pem = self._read("ca.crt")
        if pem is None:
            raise SettingsError(
                f"{place} is missing", hint="it holds the certificate of the server's authority"
            )
        try:
            certificates.authorities(pem)
        except ValueError:
            raise SettingsError(f"{place} holds no certificate in PEM form") from None
        return pem

    def trust(self, pem: bytes) -> bool:
        """Trust these authorities from now on; whether they are others than before.

        One must be left that has signed the certificate we have: we would not know ourselves at the
        next start.
        """
        if pem == self._read("ca.crt"):
            return False
        certificate, known = self._certificate(), _authorities(pem)
        if certificate is not None and not certificates.issued_by_one(known, certificate):
            raise IntegrityError("the server wants only others to be trusted than who signed our certificate")
        self._write("ca.crt", pem)
        return True

    def key(self) -> PrivateKey:
        """Our key, made if there is none; its public half beside it is kept in step."""
        pem = self._read("identity.key")
        if pem is None:
            key: PrivateKey = ed25519.Ed25519PrivateKey.generate()
            self._write("identity.key", certificates.private_pem(key))
        else:
            key = load_private_key(pem, str(self._folder / "identity.key"))
        public = certificates.public_pem(key)
        if self._read("identity.pub") != public:
            self._write("identity.pub", public)
        return key

    def nonce(self) -> bytes | None:
        raw = self._read("nonce.jwt")
        return None if raw is None else raw[: NONCE_LIMIT_BYTES + 1]

    def nonce_state(self) -> NonceState:
        return enrolment.nonce_state(self._changed_ns("nonce.jwt"), self._changed_ns("identity.crt"))

    def drop_nonce(self) -> None:
        (self._folder / "nonce.jwt").unlink(missing_ok=True)
        sync_folder(self._folder)

    def certificate_state(self, instance_id: str, *, now: float) -> tuple[CertificateState, str]:
        """How usable our certificate is, and why not in words."""
        certificate = self._certificate()
        if certificate is None:
            return CertificateState.ABSENT, "there is no certificate"
        words = certificates.complaint(
            certificate, key=self.key(), instance_id=instance_id, authority_pem=self.authority_pem()
        )
        if words is not None:
            return CertificateState.FOREIGN, words
        if Life.of(certificate).age(now) is Age.OVER:
            return CertificateState.OVER, f"it ended on {certificate.not_valid_after_utc:%F %T} UTC"
        return CertificateState.USABLE, ""

    def store_certificate(self, pem: bytes, instance_id: str, authority_pem: bytes = b"") -> None:
        """Keep a certificate that was issued to us; one that we could not use is refused.

        With it may come whom to trust from now on. That is kept first: while one authority follows
        another, the certificate we had is good under both.
        """
        try:
            leaf = x509.load_pem_x509_certificate(pem)
        except ValueError:
            raise IntegrityError("the server's answer holds no certificate") from None
        if authority_pem:
            _authorities(authority_pem)
        known = authority_pem or self.authority_pem()
        words = certificates.complaint(leaf, key=self.key(), instance_id=instance_id, authority_pem=known)
        if words is not None:
            raise IntegrityError(f"the server issued a certificate that we cannot use: {words}")
        if known != self._read("ca.crt"):
            self._write("ca.crt", known)
        self._write("identity.crt", pem)

    def credentials(self) -> Credentials:
        certificate, pem = self._certificate(), self._read("identity.crt")
        if certificate is None or pem is None:
            raise IntegrityError(f"{self._folder / 'identity.crt'} is gone")
        return Credentials(
            key_pem=certificates.private_pem(self.key()),
            certificate_pem=pem,
            authority_pem=self.authority_pem(),
            life=Life.of(certificate),
        )

    def config_hash(self) -> str:
        """Empty before the first configuration, which makes the server send it."""
        raw = self._read("config.hash") or b""
        return raw[:HASH_LIMIT_BYTES].decode("utf-8", "replace").strip()

    def store_config_hash(self, value: str) -> None:
        self._write("config.hash", value.encode())

    def _certificate(self) -> x509.Certificate | None:
        pem = self._read("identity.crt")
        if pem is None:
            return None
        try:
            return x509.load_pem_x509_certificate(pem)
        except ValueError:
            return None  # as good as none: a nonce, if there is one, will bring another

    def _read(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def _write(self, name: str, content: bytes) -> None:
        write_durably(self._folder / name, content, mode=self._mode)

    def _changed_ns(self, name: str) -> int | None:
        try:
            return (self._folder / name).stat().st_mtime_ns
        except FileNotFoundError:
            return None


def _authorities(pem: bytes) -> list[x509.Certificate]:
    try:
        known = certificates.authorities(pem) if len(pem) <= TRUST_LIMIT_BYTES else []
    except ValueError:
        known = []
    if not known:
        raise IntegrityError("what the server wants to be trusted are no certificates")
    return known
