"""The key by which daemons know this server: Ed25519, made once, kept sealed.

Its public half is told at enrolment, so that a daemon can pin it; what is signed with it is others'
business.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.sealed_secret import SealedSecret
from fleetplane.kernel.store import Store

SECRET = "edge/server-key"  # noqa: S105  # the name it is kept under
ACTOR = "system/edge"


class ServerKey:
    """See `load_or_create`."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key = key.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"<ServerKey {self.public_key.hex()[:16]}>"

    @classmethod
    async def load_or_create(cls, store: Store, master: MasterKey) -> ServerKey:

        async def made() -> bytes:
            return Ed25519PrivateKey.generate().private_bytes_raw()

        found = await SealedSecret(store, master, name=SECRET).read_or_make(made, actor=ACTOR)
        return cls(Ed25519PrivateKey.from_private_bytes(found.content))

    def sign(self, payload: bytes) -> bytes:
        return self._key.sign(payload)
