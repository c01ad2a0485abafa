"""Accounts with an authority: one per directory and organisation, each key sealed under the master key.

An authority remembers by account what was proved. Organisations that shared an account would share
what each of them has proved, so they never do.
"""

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

    async def load_or_create(self, directory_url: str, organization: str) -> Account:
        """A new key is kept before it is used: an account whose key is lost cannot revoke anything."""
        found = await self._load(_secret(directory_url, organization))
        if found is not None:
            return found
        made = Account(key_pem=new_key())
        await self.save(directory_url, organization, made)
        return made

    async def shared(self, directory_url: str) -> Account | None:
        """The account that all organisations had before 0.2. Good for revoking what it issued, no more."""
        return await self._load(_shared_secret(directory_url))

    async def _load(self, name: str) -> Account | None:
        sealed = await self._store.get_secret(name)
        if sealed is None:
            return None
        return msgspec.msgpack.decode(self._master.open(sealed, purpose=name), type=Account)

    async def save(self, directory_url: str, organization: str, account: Account) -> None:
        name = _secret(directory_url, organization)
        sealed = self._master.seal(msgspec.msgpack.encode(account), purpose=name)
        await self._store.put_secret(name, sealed, actor=ACTOR)


def _secret(directory_url: str, organization: str) -> str:
    return f"{_shared_secret(directory_url)}/{organization}"


def _shared_secret(directory_url: str) -> str:
    return f"proxies/acme/account/{hashlib.sha256(directory_url.encode()).hexdigest()[:32]}"


def new_key() -> bytes:
    """ECDSA P-256, in PEM."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
