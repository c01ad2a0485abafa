"""Accounts with an authority: one per directory and organisation, each key sealed under the master key.

An authority remembers by account what was proved. Organisations that shared an account would share
what each of them has proved, so they never do.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress

import msgspec
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.master_key import ReplacedMeanwhile, SealedSecret
from fleetplane.kernel.store import Store

ACTOR = "system/acme"


class AcmeAccount(msgspec.Struct, frozen=True, kw_only=True):
    key_pem: bytes
    uri: str = ""
    """Where the authority keeps it; empty before it has been registered."""


class AccountVault:
    def __init__(self, store: Store, master: MasterKey) -> None:
        self._store = store
        self._master = master

    async def load_or_create(self, directory_url: str, organization: str) -> AcmeAccount:
        """A new key is kept before it is used: an account whose key is lost cannot revoke anything.

        Of servers that make one at the same time, all have the one that was kept first.
        """

        async def make() -> bytes:
            return msgspec.msgpack.encode(AcmeAccount(key_pem=new_key()))

        kept = await self._kept(_secret(directory_url, organization)).read_or_make(make, actor=ACTOR)
        return msgspec.msgpack.decode(kept.content, type=AcmeAccount)

    async def shared(self, directory_url: str) -> AcmeAccount | None:
        """The account that all organisations had before 0.2. Good for revoking what it issued, no more."""
        found = await self._kept(_shared_secret(directory_url)).read()
        return None if found is None else msgspec.msgpack.decode(found.content, type=AcmeAccount)

    async def save(self, directory_url: str, organization: str, account: AcmeAccount) -> None:
        """Whoever else saves it meanwhile has registered the same key: either address of it will do."""
        kept = self._kept(_secret(directory_url, organization))
        with suppress(ReplacedMeanwhile):
            await kept.replace(msgspec.msgpack.encode(account), version=kept.version, actor=ACTOR)

    def _kept(self, name: str) -> SealedSecret:
        return SealedSecret(self._store, self._master, name=name)


def _secret(directory_url: str, organization: str) -> str:
    return f"{_shared_secret(directory_url)}/{organization}"


def _shared_secret(directory_url: str) -> str:
    return f"proxies/acme/account/{hashlib.sha256(directory_url.encode()).hexdigest()[:32]}"


def new_key() -> bytes:
    """ECDSA P-256, in PEM."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
