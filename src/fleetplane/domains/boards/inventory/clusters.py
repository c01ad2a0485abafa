"""The clusters of boards, as records in the store, and their scopes.

Each change of a cluster is one transaction. Boards lie in the tenant `default`; the scope of a cluster lies
below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from fleetplane.domains.boards.inventory.numbers import Numbers
from fleetplane.domains.boards.kinds import (
    BOARD,
    CLUSTER,
    SCOPE,
    Cluster,
    ClusterSpec,
    ClusterState,
    ClusterStatus,
    number_of,
)
from fleetplane.fleet.resources.scopes import DEFAULT_TENANT, below, tenant_path
from fleetplane.kernel.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from fleetplane.kernel.identity.bindings import end_at, keys_at
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import ABSENT, Draft, Store

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


NAME_LIMIT = 253
DESCRIPTION_LIMIT = 4096
TEXT_LIMIT = 256
"""Of a version or an endpoint, in characters."""


class Clusters:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._numbers = Numbers(store, "cluster")
        self._listed: tuple[Sequence[Cluster], Sequence[Cluster]] = ((), ())

    def __repr__(self) -> str:
        return f"<Clusters {len(self._store.list(CLUSTER, SCOPE))}>"

    def get(self, number: int) -> Cluster | None:
        return self._store.get(CLUSTER, SCOPE, str(number))

    def require(self, number: int, *, field: str = "id") -> Cluster:
        return _present(self.get(number), number, field)

    def all(self) -> Sequence[Cluster]:
        """By number. The same object until one changes."""
        kept = self._store.list(CLUSTER, SCOPE)
        if self._listed[0] is not kept:
            self._listed = (kept, sorted(kept, key=number_of))
        return self._listed[1]

    async def up_to_date(self) -> None:
        """Wait for what is being written, so that what is read next includes it."""
        await self._store.settled(CLUSTER)

    async def create(self, spec: ClusterSpec, *, actor: str) -> Cluster:
        spec = _checked(spec)
        if self._store.claimed_by(CLUSTER, SCOPE, "name", spec.name) is not None:
            raise AlreadyExists(f"there is a cluster named {spec.name!r} already", field="name")
        number = await self._numbers.take()
        done = await self._store.transact(
            lambda draft: self.make(draft, number, spec),
            actor=actor,
            action="boards.create_cluster",
            touches=[_key(number), self._numbers.key],
        )
        return done.value

    def take_number(self, draft: Draft) -> int:
        """For a cluster that is about to be made in a draft; one that is not made leaves a gap."""
        return self._numbers.within(draft)

    def make(self, draft: Draft, number: int, spec: ClusterSpec) -> Cluster:
        """The change that creates a cluster."""
        spec = _checked(spec)
        draft.claim(CLUSTER, SCOPE, "name", spec.name, str(number))
        self._numbers.record(draft, number)
        return draft.put(CLUSTER, SCOPE, str(number), spec=spec, status=ClusterStatus(), expect=ABSENT)

    async def update(
        self, number: int, *, actor: str, state: ClusterState | None = None, **changes: str
    ) -> Cluster:
        """`changes` are fields of the spec. The name cannot be emptied; the others can."""

        done = await self._store.transact(
            lambda draft: change_cluster(draft, number, state=state, **changes),
            actor=actor,
            action="boards.update_cluster",
            touches=[_key(number), *self._given_at(number)],
        )
        return done.value

    async def delete(self, number: int, *, actor: str) -> Cluster:
        """Forget a cluster without boards; its name is free again."""
        done = await self._store.transact(
            lambda draft: remove_cluster(draft, number),
            actor=actor,
            action="boards.delete_cluster",
            touches=[_key(number), *self._given_at(number)],
        )
        return done.value

    def _given_at(self, number: int) -> Iterator[Key]:
        """What was given at a cluster and ends when it goes, or is called otherwise."""
        cluster = self._store.get(CLUSTER, SCOPE, str(number))
        if cluster is not None:
            yield from keys_at(self._store, _path(cluster), since_ns=_named_since_ns(cluster))


# The changes themselves, as functions of a draft.


def change_cluster(
    draft: Draft, number: int, *, state: ClusterState | None = None, **changes: str
) -> Cluster:
    """Change fields of a cluster's spec, and its state if one is given."""
    cluster = _present(draft.get(CLUSTER, SCOPE, str(number)), number, "id")
    spec = _checked(msgspec.structs.replace(cluster.spec, **changes))
    if spec.name != cluster.spec.name:
        end_at(draft, _path(cluster), since_ns=_named_since_ns(cluster))
        spec = msgspec.structs.replace(spec, named_at_ns=draft.now_ns)
        draft.release(CLUSTER, SCOPE, "name", cluster.spec.name, cluster.name)
        draft.claim(CLUSTER, SCOPE, "name", spec.name, cluster.name)
    status = ClusterStatus(state=state) if state is not None else cluster.status
    return draft.put(CLUSTER, SCOPE, cluster.name, spec=spec, status=status, conditions=cluster.conditions)


def remove_cluster(draft: Draft, number: int) -> Cluster:
    """Delete a cluster that has no boards."""
    cluster = _present(draft.get(CLUSTER, SCOPE, str(number)), number, "id")
    members = [board.name for board in draft.list(BOARD, SCOPE) if board.spec.cluster_id == number]
    if members:
        raise FailedPrecondition(
            f"cluster {number} still has {len(members)} boards, such as board {members[0]}",
            hint="take its boards out of it first",
        )
    end_at(draft, _path(cluster), since_ns=_named_since_ns(cluster))
    draft.release(CLUSTER, SCOPE, "name", cluster.spec.name, cluster.name)
    return draft.delete(CLUSTER, SCOPE, cluster.name)


def _named_since_ns(cluster: Cluster) -> int:
    """What was given at its path before it was called so was given by others."""
    return cluster.spec.named_at_ns or cluster.created_at_ns


def _path(cluster: Cluster) -> str:
    return below(tenant_path(DEFAULT_TENANT), "clusters", cluster.spec.name)


def _key(number: int) -> Key:
    return CLUSTER.key(SCOPE, str(number))


def _present(cluster: Cluster | None, number: int, field: str) -> Cluster:
    if cluster is None:
        raise NotFound(f"cluster {number} is not known", field=field)
    return cluster


def _checked(spec: ClusterSpec) -> ClusterSpec:
    spec = msgspec.structs.replace(spec, name=spec.name.strip())
    if not spec.name:
        raise InvalidArgument("name must not be empty", field="name")
    limits = (("name", NAME_LIMIT), ("version", TEXT_LIMIT), ("master_endpoint", TEXT_LIMIT))
    for field, limit in (*limits, ("description", DESCRIPTION_LIMIT)):
        text = getattr(spec, field)
        if len(text) > limit:
            raise InvalidArgument(f"{field} is longer than {limit} characters", field=field)
        if field != "description" and not text.isprintable():
            raise InvalidArgument(f"{field} contains characters that cannot be printed", field=field)
    return spec
