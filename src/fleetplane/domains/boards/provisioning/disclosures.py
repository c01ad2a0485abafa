"""Who was shown a secret: written down before it is shown, so that none is shown without a trace."""

from __future__ import annotations

from fleetplane.domains.boards.kinds import CLUSTER, SCOPE, BoardsSpec
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.resources import Kind, Nothing
from fleetplane.kernel.store import Draft, Store


class DisclosureSpec(BoardsSpec, frozen=True):
    cluster_id: int
    what: str
    count: int
    last_by: str
    last_at_ns: int


DISCLOSURE: Kind[DisclosureSpec, Nothing] = Kind("board-disclosure", DisclosureSpec, Nothing)


class Disclosures:
    def __init__(self, store: Store) -> None:
        self._store = store

    def __repr__(self) -> str:
        return f"<Disclosures {len(self._store.list(DISCLOSURE, SCOPE))}>"

    async def note(self, cluster: int, what: str, *, actor: str) -> None:
        """Every one is an entry of the audit log; the record says how many there were."""
        name = f"{cluster}-{what}"

        def change(draft: Draft) -> None:
            if draft.get(CLUSTER, SCOPE, str(cluster)) is None:
                raise NotFound(f"cluster {cluster} is not known", field="id")
            before = draft.get(DISCLOSURE, SCOPE, name)
            count = before.spec.count if before is not None else 0
            spec = DisclosureSpec(
                cluster_id=cluster, what=what, count=count + 1, last_by=actor, last_at_ns=draft.now_ns
            )
            draft.put(DISCLOSURE, SCOPE, name, spec=spec)

        await self._store.transact(
            change, actor=actor, action=f"boards.reveal_{what}", touches=[DISCLOSURE.key(SCOPE, name)]
        )
