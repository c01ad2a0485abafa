"""What a cluster's server told in confidence: its join token and its kubeconfig, kept sealed."""

from __future__ import annotations

from fleetplane.kernel.errors import FailedPrecondition, NotFound
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.store import Store

PREFIX = "boards/cluster/"


class ClusterSecrets:
    def __init__(self, store: Store, master: MasterKey) -> None:
        self._store = store
        self._master = master

    def __repr__(self) -> str:
        return "<ClusterSecrets>"

    async def keep(self, cluster: int, *, token: str, kubeconfig: str, actor: str) -> None:
        for kind, text in (("token", token), ("kubeconfig", kubeconfig)):
            name = f"{PREFIX}{cluster}/{kind}"
            await self._store.put_secret(name, self._master.seal(text.encode(), purpose=name), actor=actor)

    async def token(self, cluster: int | None) -> str:
        """With which workers join; raises where there is none yet."""
        found = await self._get(cluster, "token")
        if found is None:
            raise FailedPrecondition("the cluster has no server yet that a worker could join")
        return found

    async def kubeconfig(self, cluster: int) -> str:
        found = await self._get(cluster, "kubeconfig")
        if found is None:
            raise NotFound(f"cluster {cluster} has no kubeconfig yet")
        return found

    async def forget(self, cluster: int, *, actor: str) -> None:
        for name in await self._store.secret_names(f"{PREFIX}{cluster}/"):
            await self._store.delete_secret(name, actor=actor)

    async def _get(self, cluster: int | None, kind: str) -> str | None:
        if cluster is None:
            return None
        name = f"{PREFIX}{cluster}/{kind}"
        sealed = await self._store.get_secret(name)
        return self._master.open(sealed, purpose=name).decode() if sealed is not None else None
