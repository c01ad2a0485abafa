"""Our account with an authority: one per directory, its key sealed under the master key."""

from __future__ import annotations

import hashlib

import msgspec
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.store import Store

ACTOR = "system/acme"


class Account(msgspec.Struct, frozen=True, kw_only=True):
    key_pem: bytes
    uri: str = ""
    """Where the authority keeps it; empty before it has been registered."""


class AccountVault:
    def __init__(self, store: Store, master: MasterKey) -> None:
        self._store = store
        self._master = master

    async def load_or_create(self, directory_url: str) -> Account:
        """A new key is kept before it is used: an account whose key is lost cannot revoke anything."""
        name = _secret(directory_url)
        sealed = await self._store.get_secret(name)
        if sealed is not None:
            return msgspec.msgpack.decode(self._master.open(sealed, purpose=name), type=Account)
        made = Account(key_pem=new_key())
        await self.save(directory_url, made)
        return made

    async def save(self, directory_url: str, account: Account) -> None:
        name = _secret(directory_url)
        sealed = self._master.seal(msgspec.msgpack.encode(account), purpose=name)
        await self._store.put_secret(name, sealed, actor=ACTOR)


def _secret(directory_url: str) -> str:
    return f"proxies/acme/account/{hashlib.sha256(directory_url.encode()).hexdigest()[:32]}"


def new_key() -> bytes:
    """ECDSA P-256, in PEM."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
