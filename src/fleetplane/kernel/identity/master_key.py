"""The key under which every other secret is encrypted at rest.

It comes from the environment, or from a file that only its owner can read and that is made
at first start. Whoever loses it loses the secrets; whoever copies the database without it has
none of them. It is never stored beside what it protects, never logged, never returned.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import IntegrityError, SettingsError

KEY_BYTES = 32  # AES-256
NONCE_BYTES = 12  # what GCM is specified for; random, with far fewer than 2**32 seals per key
_VERSION = b"\x01"


class MasterKey:
    def __init__(self, key: bytes, clock: Clock) -> None:
        if len(key) != KEY_BYTES:
            raise SettingsError(f"the master key must be {KEY_BYTES} bytes, not {len(key)}")
        self._key = key
        self._cipher = AESGCM(key)
        self._clock = clock

    def __repr__(self) -> str:
        return "<MasterKey>"

    @classmethod
    def from_text(cls, text: str, clock: Clock) -> MasterKey:
        """A key given as base64, for example by the environment."""
        try:
            return cls(base64.b64decode(text, validate=True), clock)
        except (binascii.Error, ValueError) as error:
            raise SettingsError(
                "identity.master_key is not base64", hint="make one with: head -c 32 /dev/urandom | base64"
            ) from error

    @classmethod
    def from_file(cls, path: Path, clock: Clock, *, may_create: bool = True) -> MasterKey:
        """The key in `path`, which is made when it is not there: only where nothing is sealed yet."""
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except FileNotFoundError:
            if not may_create:
                raise IntegrityError(
                    f"the master key {path} is missing, and nothing in the database opens without it",
                    hint="put it back, or restore a backup that has it",
                ) from None
            return cls._create(path, clock)
        if mode & 0o077 and path.is_file():
            raise SettingsError(
                f"{path} can be read by others (mode {mode:04o})",
                hint=f"chmod 600 {path}, and consider it known",
            )
        if not path.is_file():
            raise SettingsError(f"{path} is no file, so no master key can be in it")
        # What is no ASCII is no base64 either; `from_text` says so.
        return cls.from_text(path.read_text(encoding="ascii", errors="replace").strip(), clock)

    @classmethod
    def _create(cls, path: Path, clock: Clock) -> MasterKey:
        key = clock.token_bytes(KEY_BYTES)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Whole or not at all: a key that was half written at a crash would lock its owner out.
        staging = path.with_name(f"{path.name}.new")
        staging.unlink(missing_ok=True)
        descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(base64.b64encode(key) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        staging.replace(path)
        return cls(key, clock)

    def derive(self, purpose: str) -> bytes:
        """A key of its own for one purpose, from which no other can be told."""
        return HKDF(hashes.SHA256(), length=KEY_BYTES, salt=None, info=purpose.encode()).derive(self._key)

    def seal(self, secret: bytes, *, purpose: str) -> bytes:
        """Encrypt for one purpose; the result opens for no other."""
        nonce = self._clock.token_bytes(NONCE_BYTES)
        return _VERSION + nonce + self._cipher.encrypt(nonce, secret, purpose.encode())

    def open(self, sealed: bytes, *, purpose: str) -> bytes:
        nonce, body = sealed[1 : 1 + NONCE_BYTES], sealed[1 + NONCE_BYTES :]
        try:
            if sealed[:1] != _VERSION:
                raise InvalidTag
            return self._cipher.decrypt(nonce, body, purpose.encode())
        except (InvalidTag, ValueError) as error:
            raise IntegrityError(
                f"the secret {purpose!r} does not open with this master key",
                hint="start with the master key that this data directory was made with",
            ) from error
