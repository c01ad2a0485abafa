"""The clusters that boards belong to, as records in the store: each change of one is one transaction."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

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
from fleetplane.domains.boards.numbers import Numbers
from fleetplane.kernel.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import ABSENT, Draft, Store

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
        number = self._numbers.take()

        def change(draft: Draft) -> Cluster:
            draft.claim(CLUSTER, SCOPE, "name", spec.name, str(number))
            self._numbers.record(draft, number)
            return draft.put(CLUSTER, SCOPE, str(number), spec=spec, status=ClusterStatus(), expect=ABSENT)

        done = await self._store.transact(
            change, actor=actor, action="boards.create_cluster", touches=[_key(number), self._numbers.key]
        )
        return done.value

    async def update(
        self, number: int, *, actor: str, state: ClusterState | None = None, **changes: str
    ) -> Cluster:
        """`changes` are fields of the spec. The name cannot be emptied; the others can."""

        def change(draft: Draft) -> Cluster:
            cluster = _present(draft.get(CLUSTER, SCOPE, str(number)), number, "id")
            spec = _checked(msgspec.structs.replace(cluster.spec, **changes))
            if spec.name != cluster.spec.name:
                draft.release(CLUSTER, SCOPE, "name", cluster.spec.name, cluster.name)
                draft.claim(CLUSTER, SCOPE, "name", spec.name, cluster.name)
            status = ClusterStatus(state=state) if state is not None else cluster.status
            return draft.put(
                CLUSTER, SCOPE, cluster.name, spec=spec, status=status, conditions=cluster.conditions
            )

        done = await self._store.transact(
            change, actor=actor, action="boards.update_cluster", touches=[_key(number)]
        )
        return done.value

    async def delete(self, number: int, *, actor: str) -> Cluster:
        """Forget a cluster without boards; its name is free again."""

        def change(draft: Draft) -> Cluster:
            cluster = _present(draft.get(CLUSTER, SCOPE, str(number)), number, "id")
            members = [board.name for board in draft.list(BOARD, SCOPE) if board.spec.cluster_id == number]
            if members:
                raise FailedPrecondition(
                    f"cluster {number} still has {len(members)} boards, such as board {members[0]}",
                    hint="take its boards out of it first",
                )
            draft.release(CLUSTER, SCOPE, "name", cluster.spec.name, cluster.name)
            return draft.delete(CLUSTER, SCOPE, cluster.name)

        done = await self._store.transact(
            change, actor=actor, action="boards.delete_cluster", touches=[_key(number)]
        )
        return done.value


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
