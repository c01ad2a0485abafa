"""The folder that says who this agent is.

    nonce.jwt, ca.crt                    put there by whoever made the instance
    identity.key, .pub, .crt             made here
    config.hash                          which configuration the received files are of

Reads and writes it; what to do about what it holds is decided in `enrolment`.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fleetplane.domains.instances.agent.identity import steps as enrolment
from fleetplane.domains.instances.agent.identity.nonce import NONCE_LIMIT_BYTES
from fleetplane.domains.instances.agent.identity.steps import HeldCertificateState, NonceState
from fleetplane.kernel.errors import SettingsError
from fleetplane.node import certificates
from fleetplane.node.certificates import (
    Age,
    CertificateFolder,
    ConnectionCredentials,
    Life,
    PrivateKey,
    load_private_key,
)

if TYPE_CHECKING:
    from cryptography import x509

HASH_LIMIT_BYTES: Final = 4096


class IdentityFolder(CertificateFolder):
    """All methods block on the disk."""

    def __init__(self, folder: Path, *, mode: int) -> None:
        super().__init__(folder, stem="identity", mode=mode, hint="give this instance a new nonce")

    def authority_pem(self) -> bytes:
        pem = self.read(self.authority_file)
        if pem is None:
            raise SettingsError(
                f"{self.authority_file} is missing", hint="it holds the certificate of the server's authority"
            )
        if not certificates.parse(pem):
            raise SettingsError(f"{self.authority_file} holds no certificate in PEM form")
        return pem

    def key(self) -> PrivateKey:
        """Our key, made if there is none; its public half beside it is kept in step."""
        pem = self._read("identity.key")
        if pem is None:
            from cryptography.hazmat.primitives.asymmetric import ed25519

            key: PrivateKey = ed25519.Ed25519PrivateKey.generate()
            self._write("identity.key", certificates.private_pem(key))
        else:
            key = load_private_key(pem, self.key_file)
        public = certificates.public_pem(key)
        if self._read("identity.pub") != public:
            self._write("identity.pub", public)
        return key

    def public_key_pem(self) -> bytes:
        """The public half of our key, which is made if there is none."""
        return certificates.public_pem(self.key())

    def nonce(self) -> bytes | None:
        raw = self._read("nonce.jwt")
        return None if raw is None else raw[: NONCE_LIMIT_BYTES + 1]

    def nonce_state(self) -> NonceState:
        return enrolment.nonce_state(self._changed_ns("nonce.jwt"), self._changed_ns("identity.crt"))

    def drop_nonce(self) -> None:
        self.remove(self.root / "nonce.jwt")

    def certificate_state(self, instance_id: str, *, now: float) -> tuple[HeldCertificateState, str]:
        """How usable our certificate is, and why not in words."""
        life, words = self.inspect(instance_id)
        if life is None:
            return HeldCertificateState.ABSENT, "there is no certificate"
        if words is not None:
            return HeldCertificateState.FOREIGN, words
        if life.age(now) is Age.OVER:
            return HeldCertificateState.OVER, f"it ended on {datetime.fromtimestamp(life.end, UTC):%F %T} UTC"
        return HeldCertificateState.USABLE, ""

    def inspect(self, instance_id: str) -> tuple[Life | None, str | None]:
        """When our certificate holds (None without one), and why it is not ours to present, if it is not."""
        certificate = self.own_certificate()
        if certificate is None:
            return None, None
        words = certificates.complaint(
            certificate,
            key=self.key(),
            authorities=certificates.parse(self.authority_pem()),
            is_named=partial(_is_named, instance_id),
            whom=instance_id,
        )
        return Life.of(certificate), words

    def store_certificate(self, pem: bytes, instance_id: str, authority_pem: bytes = b"") -> None:
        """Keep a certificate that was issued to us, with whom to trust from now on if that comes with it."""
        is_named = partial(_is_named, instance_id)
        self.keep_issued(pem, authority_pem, key=self.key(), is_named=is_named, whom=instance_id)

    def credentials(self) -> ConnectionCredentials:
        """The credentials, with the key converted to PKCS #8."""
        return replace(super().credentials(), key_pem=certificates.private_pem(self.key()))

    def config_hash(self) -> str:
        """Empty before the first configuration, which makes the server send it."""
        raw = self._read("config.hash") or b""
        return raw[:HASH_LIMIT_BYTES].decode("utf-8", "replace").strip()

    def store_config_hash(self, value: str) -> None:
        self._write("config.hash", value.encode())

    def _read(self, name: str) -> bytes | None:
        return self.read(self.root / name)

    def _write(self, name: str, content: bytes) -> None:
        self.write(self.root / name, content)

    def _changed_ns(self, name: str) -> int | None:
        try:
            return (self.root / name).stat().st_mtime_ns
        except FileNotFoundError:
            return None


def _is_named(instance_id: str, certificate: x509.Certificate) -> bool:
    from cryptography.x509.oid import NameOID

    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return [name.value for name in names] == [instance_id]
