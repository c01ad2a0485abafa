"""Private keys of certificates: sealed under the master key, opened for agents only."""

from __future__ import annotations

from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.store import Draft, Store


class Vault:
    def __init__(self, store: Store, master: MasterKey) -> None:
        self._store = store
        self.master = master
        """Seals whatever of proxies only servers may read."""

    def put(self, draft: Draft, certificate: str, fingerprint: str, key_pem: bytes) -> None:
        """Keep a key, as part of the transaction that makes its certificate known."""
        name = _secret(certificate, fingerprint)
        draft.put_secret(name, self.master.seal(key_pem, purpose=name))

    def remove(self, draft: Draft, certificate: str, fingerprint: str) -> None:
        draft.delete_secret(_secret(certificate, fingerprint))

    async def private_key(self, certificate: str, fingerprint: str) -> bytes:
        """In PEM. For the agents' stream and nothing else: no API returns it."""
        name = _secret(certificate, fingerprint)
        sealed = await self._store.get_secret(name)
        if sealed is None:
            raise NotFound(f"there is no private key for certificate {certificate}")
        return self.master.open(sealed, purpose=name)


def _secret(certificate: str, fingerprint: str) -> str:
    return f"proxies/certificate/{certificate}/{fingerprint}"
