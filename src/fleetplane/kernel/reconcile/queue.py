"""Which key is to be looked at next, and when. Pure: the moment is an argument.

A key is in the queue at most once. Queued again while it waits, the earlier moment wins; queued
while it is being worked on, it is worked on once more afterwards, however often that happened.

    add     not queued   waits until `due`
            waiting      waits until the earlier of the two
            running      remembered: waits again when done
    take    waiting      running, if it is due
    done    running      waits, if it was remembered or a moment is given; else gone
"""

from __future__ import annotations

import heapq
import itertools
import math

from fleetplane.kernel.errors import ResourceExhausted

KEYS_LIMIT = 100_000
"""Keys in one queue; about 300 bytes each, 30 MB at worst."""
_STALE_SLACK = 64
"""Outdated entries of the heap that are tolerated beyond one per key before it is rebuilt."""


class _QueuedKey:
    __slots__ = ("again", "due", "order", "running")

    def __init__(self, due: float, order: int) -> None:
        self.due = due
        self.order = order
        self.running = False
        self.again: float | None = None
        """When it was asked for while running, at the earliest."""


class WorkQueue:
    def __init__(self, *, limit: int = KEYS_LIMIT) -> None:
        self._limit = limit
        self._entries: dict[str, _QueuedKey] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._orders = itertools.count()
        self.running = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<WorkQueue keys={len(self)} running={self.running}>"

    def add(self, key: str, due: float) -> None:
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= self._limit:
                raise ResourceExhausted(f"{len(self._entries)} keys are queued, the most there may be")
            self._entries[key] = entry = _QueuedKey(due, next(self._orders))
            self._push(key, entry)
        elif entry.running:
            entry.again = due if entry.again is None else min(entry.again, due)
        elif due < entry.due:
            entry.due, entry.order = due, next(self._orders)
            self._push(key, entry)

    def take(self, now: float) -> str | None:
        """The key that has been due for longest, now being worked on; None if none is due."""
        self._drop_stale()
        if not self._heap or self._heap[0][0] > now:
            return None
        _, _, key = heapq.heappop(self._heap)
        self._entries[key].running = True
        self.running += 1
        return key

    def done(self, key: str, due: float | None) -> None:
        """A key has been worked on; it comes again at `due`, or when it was asked for meanwhile."""
        entry = self._entries.pop(key)
        self.running -= 1
        moments = [moment for moment in (entry.again, due) if moment is not None]
        if moments:
            self.add(key, min(moments))

    def failed(self, key: str, due: float) -> None:
        """A key comes again at `due` and not before: what it asked for while failing has to wait.

        Otherwise a controller whose own writes wake it would try again without pause.
        """
        self._entries.pop(key)
        self.running -= 1
        self.add(key, due)

    def next_due(self) -> float:
        """The moment before which there is nothing to take; infinity if nothing waits."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else math.inf

    def due(self, key: str) -> float | None:
        """When a key comes next; None if it is not queued, or only being worked on."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        return entry.again if entry.running else entry.due

    def _push(self, key: str, entry: _QueuedKey) -> None:
        heapq.heappush(self._heap, (entry.due, entry.order, key))
        if len(self._heap) > 2 * len(self._entries) + _STALE_SLACK:
            self._heap = [
                (entry.due, entry.order, key) for key, entry in self._entries.items() if not entry.running
            ]
            heapq.heapify(self._heap)

    def _drop_stale(self) -> None:
        """Entries whose key has been moved or taken since: the order tells, as no two share one."""
        while self._heap:
            _, order, key = self._heap[0]
            entry = self._entries.get(key)
            if entry is not None and entry.order == order and not entry.running:
                return
            heapq.heappop(self._heap)
