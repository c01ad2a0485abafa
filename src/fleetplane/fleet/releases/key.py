"""The key that releases and orders are signed with: Ed25519, made once, kept sealed.

Agents are told its public half when they are installed (`--release-key`), and believe nothing else.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.sealed_secret import SealedSecret
from fleetplane.kernel.release.documents import key_text
from fleetplane.kernel.store import Store

SECRET = "releases/key"  # noqa: S105  # the name it is kept under
ACTOR = "system/releases"


class ReleaseKey:
    """See `load_or_create`."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.text = key_text(key.public_key().public_bytes_raw())

    def __repr__(self) -> str:
        return f"<ReleaseKey {self.text}>"

    @classmethod
    async def load_or_create(cls, store: Store, master: MasterKey) -> ReleaseKey:
        """The key of this installation."""

        async def made() -> bytes:
            return Ed25519PrivateKey.generate().private_bytes_raw()

        found = await SealedSecret(store, master, name=SECRET).read_or_make(made, actor=ACTOR)
        return cls(Ed25519PrivateKey.from_private_bytes(found.content))

    def sign(self, payload: bytes) -> bytes:
        """A signature of 64 bytes."""
        return self._key.sign(payload)
