"""Where boards lie in the scope tree: in the tenant `default`, and their clusters below it."""

from __future__ import annotations

from collections.abc import Iterator

from fleetplane.domains.boards.kinds import CLUSTER, SCOPE
from fleetplane.fleet.resources.scopes import DEFAULT_TENANT
from fleetplane.kernel.store import Store

_CLUSTER = f"{SCOPE}/cluster/"


def cluster_scope(number: str) -> str:
    """What holds for one cluster only holds here."""
    return _CLUSTER + number


class BoardPlaces:
    def __init__(self, store: Store) -> None:
        self._store = store

    def stored(self, tenant: str, place: str, name: str) -> Iterator[str]:
        if tenant != DEFAULT_TENANT:
            return
        if not place:
            yield SCOPE
        elif place == "clusters":
            number = self._store.claimed_by(CLUSTER, SCOPE, "name", name)
            if number is not None:
                yield cluster_scope(number)

    def path(self, scope: str) -> str | None:
        above = f"/tenants/{DEFAULT_TENANT}"
        if scope == SCOPE:
            return above
        found = self._store.get(CLUSTER, SCOPE, scope.removeprefix(_CLUSTER))
        if found is None or scope != cluster_scope(found.name):
            return None
        return f"{above}/clusters/{found.spec.name}"
