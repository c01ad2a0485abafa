"""The folder that says who this node is: key, certificate, authority, and what the server was last told.

    node.key              made here, and never leaves
    node.crt, ca.crt      from the server
    membership.json       the server's address, our number, and a digest of what we registered with

Every file is the owner's alone, replaced as a whole, and on disk before a method returns. A certificate
that does not belong to our key, or that nobody we trust has signed, is not kept. All methods block.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fleetplane.kernel.durable import sync_folder, write_durably
from fleetplane.kernel.errors import FailedPrecondition, IntegrityError, SettingsError, Unavailable

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
PEM_LIMIT_BYTES: Final = 64 * 1024
URI_NODE: Final = "fleetplane://boards/node/"
RENEWAL_SHARE: Final = 1 / 3
"""Of its life left, when a certificate is renewed."""


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    server: str
    server_name: str = ""
    """The name in the server's certificate, where that is not what is dialled."""
    node_id: int
    name: str = ""
    heartbeat_seconds: int = 30
    registered: str = ""
    """The digest of what we registered with last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """Of a certificate, in seconds since the Unix epoch."""

    begins: float
    ends: float

    @property
    def renewal_at(self) -> float:
        return self.ends - (self.ends - self.begins) * RENEWAL_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    key_pem: bytes
    certificate_pem: bytes
    authority_pem: bytes
    life: Life
    serial: str


class IdentityFolder:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.key = root / "node.key"
        self.certificate = root / "node.crt"
        self.authority = root / "ca.crt"
        self.membership = root / "membership.json"
        self.audit = root / "audit.jsonl"
        self.running = root / "running.json"

    def __repr__(self) -> str:
        return f"<IdentityFolder {self.root}>"

    def make(self) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
            self.root.chmod(FOLDER_MODE)
        except OSError as error:
            raise SettingsError(f"{self.root} cannot be used: {error.strerror}") from error

    # The key.

    def load_or_make_key(self) -> ec.EllipticCurvePrivateKey:
        pem = self._read(self.key)
        if pem is not None:
            return _private(pem, self.key)
        key = ec.generate_private_key(ec.SECP256R1())
        write_durably(self.key, _private_pem(key), mode=FILE_MODE)
        return key

    def csr_pem(self) -> str:
        """A request signed by our key. The names in it count for nothing: the server decides them."""
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "board")])
        builder = x509.CertificateSigningRequestBuilder().subject_name(name)
        request = builder.sign(self.load_or_make_key(), hashes.SHA256())
        return request.public_bytes(serialization.Encoding.PEM).decode()

    # Who we are.

    def load_membership(self) -> Membership | None:
        raw = self._read(self.membership)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=Membership)
        except msgspec.DecodeError as error:
            raise IntegrityError(f"{self.membership} cannot be read: {error}") from error

    def store_membership(self, membership: Membership) -> None:
        write_durably(self.membership, msgspec.json.encode(membership) + b"\n", mode=FILE_MODE)

    def store_certificate(self, certificate_pem: bytes, authority_pem: bytes, *, node_id: int) -> None:
        """Keep what the server issued, or IntegrityError. Whom to trust is kept first: both are
        trusted while one authority follows another."""
        authorities = _certificates(authority_pem)
        leaf = next(iter(_certificates(certificate_pem)), None)
        if leaf is None or not authorities:
            raise IntegrityError("the server's answer holds no certificate")
        if leaf.public_key() != self.load_or_make_key().public_key():
            raise IntegrityError("the server's certificate is for another key than ours")
        if not any(_signed_by(leaf, authority) for authority in authorities):
            raise IntegrityError("the server's certificate is not signed by its authority")
        if f"{URI_NODE}{node_id}" not in _uris(leaf):
            raise IntegrityError(f"the server's certificate is not for node {node_id}")
        if authority_pem != self._read(self.authority):
            write_durably(self.authority, authority_pem, mode=FILE_MODE)
        write_durably(self.certificate, certificate_pem, mode=FILE_MODE)

    def store_authority(self, authority_pem: bytes) -> bool:
        """Trust these from now on; whether that is news. One must be left that has signed our certificate."""
        if not authority_pem or authority_pem == self._read(self.authority):
            return False
        ours = next(iter(_certificates(self._read(self.certificate) or b"")), None)
        if ours is not None and not any(_signed_by(ours, one) for one in _certificates(authority_pem)):
            raise IntegrityError("the server wants only others to be trusted than who signed our certificate")
        write_durably(self.authority, authority_pem, mode=FILE_MODE)
        return True

    def credentials(self) -> Credentials:
        key, certificate = self._read(self.key), self._read(self.certificate)
        authority = self._read(self.authority)
        if key is None or certificate is None or authority is None:
            raise FailedPrecondition(
                f"there is no identity in {self.root}",
                hint="join a server first",
            )
        leaf = next(iter(_certificates(certificate)), None)
        if leaf is None:
            raise IntegrityError(f"{self.certificate} holds no certificate")
        if leaf.public_key() != _private(key, self.key).public_key():
            raise IntegrityError(f"{self.certificate} is not for the key in {self.key}")
        life = Life(begins=leaf.not_valid_before_utc.timestamp(), ends=leaf.not_valid_after_utc.timestamp())
        return Credentials(
            key_pem=key, certificate_pem=certificate, authority_pem=authority, life=life,
            serial=f"{leaf.serial_number:x}",
        )  # fmt: skip

    def forget(self) -> list[Path]:
        """Remove everything but the audit log."""
        gone = [
            path for path in (self.membership, self.certificate, self.authority, self.key) if path.exists()
        ]
        for path in gone:
            path.unlink()
        if gone:
            sync_folder(self.root)
        return gone

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Two agents in one folder would fight over the pins and the port."""
        try:
            descriptor = os.open(
                self.root / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE
            )
        except OSError as error:
            raise SettingsError(f"{self.root} cannot be used: {error.strerror}") from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Unavailable(f"another agent works in {self.root}", details={"cause": "lock"}) from None
            yield
        finally:
            os.close(descriptor)

    def _read(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SettingsError(f"{path} cannot be read: {error.strerror}") from error


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _private(pem: bytes, path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise IntegrityError(f"{path} holds no key") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise IntegrityError(f"{path} holds a key of another kind than P-256")
    return key


def _certificates(pem: bytes) -> list[x509.Certificate]:
    if len(pem) > PEM_LIMIT_BYTES:
        return []
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        return []


def _signed_by(leaf: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        leaf.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _uris(leaf: x509.Certificate) -> list[str]:
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)
