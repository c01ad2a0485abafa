"""Short-lived records by which servers on one database know of each other's conversations.

What a single server keeps in a bounded table in memory: between two calls of the same client, the second of
which may come to another server. Bounded as that is, by dropping what expires first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

from fleetplane.kernel.resources import Key, Kind, Nothing
from fleetplane.kernel.store import Draft, Store

DROPPED_AT_ONCE = 256
ACTOR = "system/edge"


class Expiring(Protocol):
    @property
    def expires_at_ns(self) -> int: ...


E = TypeVar("E", bound=Expiring)


class ExpiringRecords(Generic[E]):
    """Those of one kind, by name."""

    def __init__(self, store: Store, kind: Kind[E, Nothing], *, limit: int) -> None:
        self._store = store
        self._kind = kind
        self._limit = limit

    def __repr__(self) -> str:
        return f"<ExpiringRecords {self._kind.name} {self._store.count(self._kind)}/{self._limit}>"

    async def keep(self, name: str, spec: Callable[[int], E], *, actor: str, action: str) -> None:
        """Let all servers know; returns once they can. `spec` makes the record as of the time it is told."""
        doomed = self._crowded_out()

        def change(draft: Draft) -> None:
            self._forget(draft, doomed)
            draft.put(self._kind, "", name, spec=spec(draft.now_ns))

        touches = [self._kind.key("", name), *doomed]
        await self._store.transact(change, actor=actor, action=action, touches=touches)

    def get(self, name: str) -> E | None:
        """What was kept, also if it has expired meanwhile."""
        found = self._store.get(self._kind, "", name)
        return None if found is None else found.spec

    def _crowded_out(self) -> list[Key]:
        if self._store.count(self._kind) < self._limit:
            return []
        oldest = sorted(self._store.list(self._kind), key=lambda found: found.spec.expires_at_ns)
        return [found.key for found in oldest[:DROPPED_AT_ONCE]]

    async def sweep(self) -> int:
        """Forget those that have expired; how many."""
        now_ns = self._store.clock.now_ns()
        ended = [found.key for found in self._store.list(self._kind) if found.spec.expires_at_ns < now_ns]
        for start in range(0, len(ended), DROPPED_AT_ONCE):
            keys = ended[start : start + DROPPED_AT_ONCE]
            await self._store.transact(
                partial(self._forget, keys=keys),
                actor=ACTOR,
                action=f"sweep.{self._kind.name}",
                touches=keys,
            )
        return len(ended)

    def _forget(self, draft: Draft, keys: list[Key]) -> None:
        for key in keys:
            if draft.get(self._kind, key.scope, key.name) is not None:
                draft.delete(self._kind, key.scope, key.name)
