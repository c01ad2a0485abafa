"""The folder that says who this daemon is. Its layout is that of the daemons already in the field, so
that either can take the other's place:

    aegis-config.yaml                what the owner wrote, or enrolment
    node.key, node.key.pub           our Ed25519 key, 32 bytes each; enrolment also writes node.pub
    node.token                       the server's word for us
    enrollment.jwt                   the token that we came with
    archive/                         keys that were rotated away

and of our own: server.pub (the server's key, pinned), pushed-config.json, commands.log, node.key.next
(a key that the server may or may not have taken), and two locks.

Reads and writes; every file is the owner's alone, replaced as a whole, and on disk before a method
returns. All methods block.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetplane.domains.edge.agent import config as configs
from fleetplane.domains.edge.agent.config import NodeConfig
from fleetplane.kernel.durable import sync_folder, write_durably
from fleetplane.kernel.errors import FailedPrecondition, IntegrityError, SettingsError, Unavailable

KEY_BYTES: Final = 32
TOKEN_LIMIT_BYTES: Final = 16 * 1024
FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
PID_LIMIT_BYTES: Final = 32


def new_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


class StateFolder:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "aegis-config.yaml"
        self.key = root / "node.key"
        self.token = root / "node.token"
        self.enrollment = root / "enrollment.jwt"
        self.server_key = root / "server.pub"
        self.pushed = root / "pushed-config.json"
        self.journal = root / "commands.log"
        self.archive = root / "archive"
        self.next_key = root / "node.key.next"

    def __repr__(self) -> str:
        return f"<StateFolder {self.root}>"

    def make(self) -> None:
        """Make the folder, or make an existing one ours alone."""
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
            self.root.chmod(FOLDER_MODE)
        except OSError as error:
            raise SettingsError(f"{self.root} cannot be used: {error.strerror}") from error

    def tighten(self) -> list[Path]:
        """Take from everyone else what only we may read; what was too open."""
        found = []
        for path in (self.root, self.key, self.token, self.enrollment, self.config, self.next_key):
            with suppress(FileNotFoundError):
                mode = stat.S_IMODE(path.stat().st_mode)
                if mode & 0o077:
                    path.chmod(mode & 0o700)
                    found.append(path)
        return found

    def use(self, config: NodeConfig) -> None:
        """Take over where the configuration says that key and token are."""
        if config.spec.cluster.node_keypair_path:
            self.key = Path(config.spec.cluster.node_keypair_path).expanduser()
            self.next_key = self.key.with_name(f"{self.key.name}.next")
        if config.edge.node_security_token_path:
            self.token = Path(config.edge.node_security_token_path).expanduser()

    # Keys.

    def load_key(self) -> Ed25519PrivateKey:
        key = self._key(self.key)
        if key is None:
            raise FailedPrecondition(f"{self.key} is missing", hint="enrol this machine first")
        return key

    def load_next_key(self) -> Ed25519PrivateKey | None:
        return self._key(self.next_key)

    def store_key(self, key: Ed25519PrivateKey) -> None:
        write_durably(self.key, key.private_bytes_raw(), mode=FILE_MODE)
        for path in (self.key.with_suffix(".pub"), self.key.with_name(f"{self.key.name}.pub")):
            write_durably(path, public_bytes(key), mode=FILE_MODE)

    def store_next_key(self, key: Ed25519PrivateKey) -> None:
        write_durably(self.next_key, key.private_bytes_raw(), mode=FILE_MODE)

    def drop_next_key(self) -> None:
        self.next_key.unlink(missing_ok=True)
        sync_folder(self.next_key.parent)

    def promote_next_key(self, key: Ed25519PrivateKey, *, now: datetime) -> Path:
        """The next key becomes ours; the one before goes to the archive. Nobody ever finds no key."""
        self.archive.mkdir(exist_ok=True, mode=FOLDER_MODE)
        stamp = now.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
        kept = self.archive / f"{stamp}.key"
        old = self.load_key()
        write_durably(kept, old.private_bytes_raw(), mode=FILE_MODE)
        write_durably(kept.with_name(f"{kept.name}.pub"), public_bytes(old), mode=FILE_MODE)
        self.store_key(key)
        self.drop_next_key()
        return kept

    def prune_archive(self, *, keep_seconds: float, now: datetime) -> int:
        """Remove archived keys that are older; how many."""
        removed = 0
        for path in self.archive.glob("*.key*"):
            with suppress(FileNotFoundError):
                if now.timestamp() - path.stat().st_mtime > keep_seconds:
                    path.unlink()
                    removed += 1
        return removed

    def _key(self, path: Path) -> Ed25519PrivateKey | None:
        raw = self._read(path)
        if raw is None:
            return None
        if len(raw) != KEY_BYTES:
            raise IntegrityError(f"{path} has {len(raw)} bytes; a key has {KEY_BYTES}")
        return Ed25519PrivateKey.from_private_bytes(raw)

    # Tokens.

    def load_token(self) -> str:
        raw = self._read(self.token)
        if raw is None:
            raise FailedPrecondition(f"{self.token} is missing", hint="enrol this machine first")
        return raw[:TOKEN_LIMIT_BYTES].decode("ascii", "replace").strip()

    def store_token(self, token: str) -> None:
        write_durably(self.token, token.encode(), mode=FILE_MODE)

    def load_server_key(self) -> bytes:
        """The pinned key, or nothing if the server never named one."""
        raw = self._read(self.server_key)
        if raw is not None and len(raw) != KEY_BYTES:
            raise IntegrityError(f"{self.server_key} has {len(raw)} bytes; a key has {KEY_BYTES}")
        return raw or b""

    def store_server_key(self, key: bytes) -> None:
        if key:
            write_durably(self.server_key, key, mode=FILE_MODE)
        else:
            self.server_key.unlink(missing_ok=True)

    # Configuration.

    def load_document(self, path: Path | None = None) -> configs.Document:
        """A layer; nothing if there is no such file."""
        place = path or self.config
        raw = self._read(place)
        return {} if raw is None else configs.parse(raw, str(place))

    def store_document(self, content: bytes) -> None:
        write_durably(self.config, content, mode=FILE_MODE)

    def signature(self) -> tuple[tuple[int, int], ...]:
        """Changes whenever another program replaces key or token."""
        return tuple(_identity(path) for path in (self.key, self.token))

    def _read(self, path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SettingsError(f"{path} cannot be read: {error.strerror}") from error

    # Locks. The kernel drops them with the process, however it ends; the files stay.

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Two daemons of one identity would take each other's stream away."""
        with self._locked("daemon.lock", "another daemon"):
            yield

    @contextmanager
    def changing_identity(self) -> Iterator[None]:
        """One change of key or token at a time, whichever process makes it; Unavailable says try again."""
        with self._locked("identity.lock", "another change of the identity"):
            yield

    def daemon_pid(self) -> int | None:
        """The process that holds the daemon's lock, if one does."""
        try:
            with self.alone():
                return None
        except Unavailable as error:
            return int(error.details["pid"]) if error.details["pid"].isdecimal() else 0
        except SettingsError:
            return None

    @contextmanager
    def _locked(self, name: str, whose: str) -> Iterator[None]:
        try:
            descriptor = os.open(
                self.root / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE
            )
        except OSError as error:
            raise SettingsError(
                f"{self.root} cannot be used: {error.strerror}", hint="enrol this machine first"
            ) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = (
                    os.pread(descriptor, PID_LIMIT_BYTES, 0).decode(errors="replace").strip() or "unknown"
                )
                raise Unavailable(
                    f"{whose} (process {holder}) works in {self.root}", details={"pid": holder}
                ) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)


def _identity(path: Path) -> tuple[int, int]:
    try:
        about = path.stat()
    except OSError:
        return (0, 0)
    return (about.st_ino, about.st_mtime_ns)
