"""Numbers for things that are known by number on the wire: counted up, never used again.

A transaction must say beforehand what it touches, so the number is taken before it and written
down inside it. A transaction that fails leaves a gap, which is harmless.
"""

from __future__ import annotations

from fleetplane.domains.boards.kinds import COUNTER, NUMBER_LIMIT, SCOPE, Counter
from fleetplane.kernel.errors import ResourceExhausted
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft, Store


class Numbers:
    """Allocates the numbers of one sort of resource, such as `board`; one object per sort and process."""

    def __init__(self, store: Store, sort: str) -> None:
        self._store = store
        self._sort = sort
        self._last = 0

    def __repr__(self) -> str:
        return f"<Numbers {self._sort} last={self._last}>"

    @property
    def key(self) -> Key:
        """What a transaction that records a number touches, beside the thing itself."""
        return COUNTER.key(SCOPE, self._sort)

    def take(self) -> int:
        kept = self._store.get(COUNTER, SCOPE, self._sort)
        number = max(self._last, kept.spec.last if kept is not None else 0) + 1
        if number > NUMBER_LIMIT:
            raise ResourceExhausted(f"no number is left for another {self._sort}")
        self._last = number
        return number

    def record(self, draft: Draft, number: int) -> None:
        """Inside the transaction that uses it; these need not run in the order of their numbers."""
        kept = draft.get(COUNTER, SCOPE, self._sort)
        last = kept.spec.last if kept is not None else 0
        draft.put(COUNTER, SCOPE, self._sort, spec=Counter(last=max(number, last)))
