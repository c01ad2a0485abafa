"""The master key, under which every other secret is encrypted at rest, and the secrets that servers share.

The master key comes from the environment, or from a file that only its owner can read and that is made at
first start. It is never stored beside what it protects, never logged, never returned.

A shared secret is sealed in the store, with a claim that names its version. It is replaced only if its
version is unchanged: on a race one server wins and the others reload. Secrets of a database file,
and those from before versions existed, have no version until they are replaced.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Conflict, IntegrityError, SettingsError
from fleetplane.kernel.resources import Kind, Nothing
from fleetplane.kernel.store import Draft, Store

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


VERSION_BYTES = 8
NO_VERSION = ""
SECRET_VERSION: Kind[Nothing, Nothing] = Kind("secret-version", Nothing, Nothing)
"""Of claims alone: the name of a secret, held by its version."""
_FIELD = "name"


class Unsealed(NamedTuple):
    content: bytes
    version: str


class ReplacedMeanwhile(Conflict):
    """Somebody else, perhaps another server, has replaced a secret that was to be replaced."""


class SealedSecret:
    def __init__(self, store: Store, master: MasterKey, *, name: str) -> None:
        self._store = store
        self._master = master
        self.name = name

    def __repr__(self) -> str:
        return f"<SealedSecret {self.name} version={self.version or '-'}>"

    @property
    def version(self) -> str:
        """Which one the store has, as far as memory knows: whoever holds another one reads it again."""
        return self._store.claimed_by(SECRET_VERSION, "", _FIELD, self.name) or NO_VERSION

    async def read(self) -> Unsealed | None:
        """What it is now; None if there is none.

        The version is never newer than the content: whoever replaces by it what they have not seen is told.
        """
        version = self.version
        sealed = await self._store.get_secret(self.name)
        return None if sealed is None else Unsealed(self._master.open(sealed, purpose=self.name), version)

    async def read_or_make(
        self, make: Callable[[], Awaitable[bytes]], *, actor: str, action: str = "secret.put"
    ) -> Unsealed:
        """What it is, made if there is none: by one of all servers, whose the others then read."""
        version = self.version  # also of one that was deleted
        found = await self.read()
        if found is not None:
            return found
        content = await make()
        try:
            return await self.replace(content, version=version, actor=actor, action=action)
        except ReplacedMeanwhile:
            found = await self.read()
            if found is None:
                raise
            return found

    async def replace(
        self, content: bytes, *, version: str, actor: str, action: str = "secret.put"
    ) -> Unsealed:
        """Put it in the place of a version; raises `ReplacedMeanwhile` if it has another by now."""
        following = self._store.clock.token_bytes(VERSION_BYTES).hex()
        sealed = self._master.seal(content, purpose=self.name)

        def change(draft: Draft) -> None:
            draft.put_secret(self.name, sealed)
            if not self._store.shared:  # nobody else could replace it
                return
            found = draft.claimed_by(SECRET_VERSION, "", _FIELD, self.name) or NO_VERSION
            if found != version:
                raise ReplacedMeanwhile(
                    f"{self.name} was replaced by somebody else meanwhile", hint="look at it, and try again"
                )
            if found:
                draft.release(SECRET_VERSION, "", _FIELD, self.name, found)
            draft.claim(SECRET_VERSION, "", _FIELD, self.name, following)

        await self._store.transact(change, actor=actor, action=action, touches=())
        return Unsealed(content, following if self._store.shared else version)


class HeldSecret:
    """A sealed secret as a server has it in memory, read again after another server has replaced it."""

    def __init__(self, kept: SealedSecret, *, version: str, use: Callable[[bytes], None]) -> None:
        """`use` takes the content that another server has put in its place."""
        self._kept = kept
        self._version = version
        self._use = use
        self.changing = asyncio.Lock()  # guards: what is sealed in the store is what is in memory

    def __repr__(self) -> str:
        return f"<HeldSecret {self._version or '-'} of {self._kept!r}>"

    def secret_changed(self, name: str) -> None:
        """Nothing to note: `refresh` compares versions."""

    async def refresh(self) -> None:
        """Know what other servers have made of it."""
        if self._kept.version != self._version:
            async with self.changing:
                await self._reload()

    async def _reload(self) -> None:
        while self._kept.version != self._version:
            found = await self._kept.read()
            if found is None:
                return
            self._version = found.version
            self._use(found.content)

    async def replace(self, content: bytes, *, actor: str, action: str = "secret.put") -> None:
        """Seal it in the place of what is in memory, for whoever holds `changing`.

        Of servers that do so at once, one does; the others have what that one wrote when they are told.
        """
        try:
            found = await self._kept.replace(content, version=self._version, actor=actor, action=action)
        except ReplacedMeanwhile:
            await self._reload()
            raise
        self._version = found.version
