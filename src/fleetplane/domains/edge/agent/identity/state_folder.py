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

from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetplane.domains.edge.agent.config import document as configs
from fleetplane.domains.edge.agent.config.document import DaemonConfig
from fleetplane.kernel.errors import FailedPrecondition, IntegrityError, SettingsError
from fleetplane.node.identity import FOLDER_MODE, PrivateFolder
from fleetplane.node.lock import Occupied

KEY_BYTES: Final = 32
TOKEN_LIMIT_BYTES: Final = 16 * 1024
ENROL_FIRST: Final = "enrol this machine first"


def new_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


class StateFolder(PrivateFolder):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.config = root / "aegis-config.yaml"
        self.key = root / "node.key"
        self.token = root / "node.token"
        self.enrollment = root / "enrollment.jwt"
        self.server_key = root / "server.pub"
        self.pushed = root / "pushed-config.json"
        self.journal = root / "commands.log"
        self.archive = root / "archive"
        self.next_key = root / "node.key.next"

    def tighten_all(self) -> list[Path]:
        """Take from everyone else what only we may read; what was too open."""
        return self.tighten((self.root, self.key, self.token, self.enrollment, self.config, self.next_key))

    def use(self, config: DaemonConfig) -> None:
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
            raise FailedPrecondition(f"{self.key} is missing", hint=ENROL_FIRST)
        return key

    def load_next_key(self) -> Ed25519PrivateKey | None:
        return self._key(self.next_key)

    def store_key(self, key: Ed25519PrivateKey) -> None:
        self.write(self.key, key.private_bytes_raw())
        for path in (self.key.with_suffix(".pub"), self.key.with_name(f"{self.key.name}.pub")):
            self.write(path, public_bytes(key))

    def store_next_key(self, key: Ed25519PrivateKey) -> None:
        self.write(self.next_key, key.private_bytes_raw())

    def drop_next_key(self) -> None:
        self.remove(self.next_key)

    def promote_next_key(self, key: Ed25519PrivateKey, *, now: datetime) -> Path:
        """The next key becomes ours; the one before goes to the archive. Nobody ever finds no key."""
        self.archive.mkdir(exist_ok=True, mode=FOLDER_MODE)
        stamp = now.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
        kept = self.archive / f"{stamp}.key"
        old = self.load_key()
        self.write(kept, old.private_bytes_raw())
        self.write(kept.with_name(f"{kept.name}.pub"), public_bytes(old))
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
        raw = self.read(path)
        if raw is None:
            return None
        if len(raw) != KEY_BYTES:
            raise IntegrityError(f"{path} has {len(raw)} bytes; a key has {KEY_BYTES}")
        return Ed25519PrivateKey.from_private_bytes(raw)

    # Tokens.

    def load_token(self) -> str:
        raw = self.read(self.token)
        if raw is None:
            raise FailedPrecondition(f"{self.token} is missing", hint=ENROL_FIRST)
        return raw[:TOKEN_LIMIT_BYTES].decode("ascii", "replace").strip()

    def store_token(self, token: str) -> None:
        self.write(self.token, token.encode())

    def load_server_key(self) -> bytes:
        """The pinned key, or nothing if the server never named one."""
        raw = self.read(self.server_key)
        if raw is not None and len(raw) != KEY_BYTES:
            raise IntegrityError(f"{self.server_key} has {len(raw)} bytes; a key has {KEY_BYTES}")
        return raw or b""

    def store_server_key(self, key: bytes) -> None:
        if key:
            self.write(self.server_key, key)
        else:
            self.server_key.unlink(missing_ok=True)

    # Configuration.

    def load_document(self, path: Path | None = None) -> configs.Document:
        """A layer; nothing if there is no such file."""
        place = path or self.config
        raw = self.read(place)
        return {} if raw is None else configs.parse(raw, str(place))

    def store_document(self, content: bytes) -> None:
        self.write(self.config, content)

    def signature(self) -> tuple[tuple[int, int], ...]:
        """Changes whenever another program replaces key or token."""
        return tuple(_identity(path) for path in (self.key, self.token))

    # Locks. The kernel drops them with the process, however it ends; the files stay.

    def alone(self) -> AbstractContextManager[None]:
        """Two daemons of one identity would take each other's stream away."""
        return self.sole_user("daemon.lock", whose="another daemon", hint=ENROL_FIRST)

    def changing_identity(self) -> AbstractContextManager[None]:
        """One change of key or token at a time, whichever process makes it; Unavailable says try again."""
        return self.sole_user("identity.lock", whose="another change of the identity", hint=ENROL_FIRST)

    def daemon_pid(self) -> int | None:
        """The process that holds the daemon's lock, if one does."""
        try:
            with self.alone():
                return None
        except Occupied as error:
            return error.pid
        except SettingsError:
            return None


def _identity(path: Path) -> tuple[int, int]:
    try:
        about = path.stat()
    except OSError:
        return (0, 0)
    return (about.st_ino, about.st_mtime_ns)
