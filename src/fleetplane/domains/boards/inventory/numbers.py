"""Numbers for things that are known by number on the wire: counted up, never used again.

A transaction must say beforehand what it touches, so the number is taken before it and written
down inside it. A transaction that fails leaves a gap, which is harmless.

Servers that share a database would take the same number from what they remember: there each takes a block
in a transaction of its own, and gives out from that. What is left of a block when the server ends is a gap.
"""

from __future__ import annotations

import asyncio

from fleetplane.domains.boards.kinds import COUNTER, NUMBER_LIMIT, SCOPE, Counter
from fleetplane.kernel.errors import ResourceExhausted
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft, Store

BLOCK = 64
"""Numbers that a server takes at once: one small transaction for so many boards."""
ACTOR = "system/boards"


class Numbers:
    """Allocates the numbers of one sort of resource, such as `board`; one object per sort and process."""

    def __init__(self, store: Store, sort: str) -> None:
        self._store = store
        self._sort = sort
        self._last = 0
        self._block = range(0)
        self._taking = asyncio.Lock()  # no two blocks for callers that come at once

    def __repr__(self) -> str:
        return f"<Numbers {self._sort} last={self._last}>"

    @property
    def key(self) -> Key:
        """What a transaction that records a number touches, beside the thing itself."""
        return COUNTER.key(SCOPE, self._sort)

    async def take(self) -> int:
        """A number that nobody else has; raises `ResourceExhausted` when there is none left."""
        if not self._store.shared:
            return self._after(self._store)
        async with self._taking:
            if not self._block:
                done = await self._store.transact(
                    self._reserve, actor=ACTOR, action="boards.reserve_numbers", touches=[self.key]
                )
                self._block = done.value
            number, self._block = self._block[0], self._block[1:]
            self._last = number
            return number

    def within(self, draft: Draft) -> int:
        """The same for a change that is made in one transaction with its number, and as a whole or not."""
        if self._store.shared:
            return _checked(_last(draft, self._sort) + 1, self._sort)
        return self._after(draft)

    def record(self, draft: Draft, number: int) -> None:
        """Inside the transaction that uses it; these need not run in the order of their numbers."""
        last = _last(draft, self._sort)
        draft.put(COUNTER, SCOPE, self._sort, spec=Counter(last=max(number, last)))

    def _after(self, source: Store | Draft) -> int:
        self._last = _checked(max(self._last, _last(source, self._sort)) + 1, self._sort)
        return self._last

    def _reserve(self, draft: Draft) -> range:
        first = _checked(_last(draft, self._sort) + 1, self._sort)
        after = min(first + BLOCK, NUMBER_LIMIT + 1)
        self.record(draft, after - 1)
        return range(first, after)


def _last(source: Store | Draft, sort: str) -> int:
    kept = source.get(COUNTER, SCOPE, sort)
    return kept.spec.last if kept is not None else 0


def _checked(number: int, sort: str) -> int:
    if number > NUMBER_LIMIT:
        raise ResourceExhausted(f"no number is left for another {sort}")
    return number
