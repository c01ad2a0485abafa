"""Sealing stored bodies: the content of a resource that may hold secrets, encrypted where it leaves memory.

Each body has a key of its own, made of the store's and a random salt, so that there is no bound on how many
are written; the constant nonce is used once with each. A body opens only for the resource that it was sealed
for: moved to another address or incarnation, it is refused.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import IntegrityError

_PURPOSE: Final = b"fleetplane/store/bodies/1"
_SALT_BYTES: Final = 16
_NONCE: Final = bytes(12)
_identity = msgspec.msgpack.Encoder().encode


class Sealer:
    def __init__(self, key: bytes, clock: Clock) -> None:
        """`key` is one that only this installation has; another is derived from it."""
        self._key = hmac.digest(key, _PURPOSE, sha256)
        self._clock = clock

    def __repr__(self) -> str:
        return "<Sealer>"

    def seal(self, content: bytes, *whose: str) -> bytes:
        """Encrypt for the resource with this address and uid; takes some ten microseconds."""
        salt = self._clock.token_bytes(_SALT_BYTES)
        return salt + self._cipher(salt).encrypt(_NONCE, content, _identity(whose))

    def open(self, sealed: bytes, *whose: str) -> bytes:
        salt = sealed[:_SALT_BYTES]
        try:
            return self._cipher(salt).decrypt(_NONCE, sealed[_SALT_BYTES:], _identity(whose))
        except (InvalidTag, ValueError) as error:
            raise IntegrityError(
                f"the stored {' '.join(whose[:3])} does not open with this master key",
                hint="start with the master key that this data directory was made with",
            ) from error

    def _cipher(self, salt: bytes) -> AESGCM:
        return AESGCM(hmac.digest(self._key, salt, sha256))
