"""What happens in runs, as it happens, for whoever looks on; and for a while after.

Each event of a run has a number, so that a reader who was cut off goes on after the last one it
saw. What is kept is bounded: of a long run the oldest output goes first, and a reader that needs
it is told that something is missing. Results are never lost by this: they stand in the ledger.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from fleetplane.kernel.clock import Clock

EVENTS_LIMIT = 20_000
"""Kept of one run."""
BYTES_LIMIT = 2 * 1024 * 1024
"""Output kept of one run."""
RUNS_LIMIT = 256
"""Runs of which anything is kept; the one that ended longest ago goes first."""


class RunEvent(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    epoch: str = ""
    """In which feed it has this number: after a restart, another one counts anew."""
    kind: str
    """started, node_started, progress, result or done."""
    node_id: str = ""
    data: dict[str, Any] = {}
    size: int = 0
    """Bytes of output in it."""

    @property
    def mark(self) -> str:
        """By which a reader says how far it has come."""
        return f"{self.epoch}-{self.number}"


class RunFeed:
    """The events of one run."""

    def __init__(self, epoch: str = "") -> None:
        self.epoch = epoch
        self._events: deque[RunEvent] = deque()
        self._held = 0
        self._next = 1
        self._changed = asyncio.Event()
        self.is_over = False
        self.dropped = 0

    def __repr__(self) -> str:
        return f"<RunFeed events={len(self._events)} over={self.is_over}>"

    def add(self, kind: str, node_id: str = "", *, size: int = 0, **data: Any) -> None:
        if self.is_over:
            return
        self._events.append(
            RunEvent(number=self._next, epoch=self.epoch, kind=kind, node_id=node_id, data=data, size=size)
        )
        self._next += 1
        self._held += size
        while self._held > BYTES_LIMIT or len(self._events) > EVENTS_LIMIT:
            self._held -= self._events.popleft().size
            self.dropped += 1
        self._wake()

    def end(self) -> None:
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def after(self, number: int = 0) -> AsyncIterator[RunEvent | None]:
        """Every event after this number, until the run is over; None where some are missing."""
        while True:
            changed = self._changed
            first = self._events[0].number if self._events else self._next
            if number + 1 < first:
                number = first - 1
                yield None
            for event in [event for event in self._events if event.number > number]:
                number = event.number
                yield event
            if self.is_over and number + 1 >= self._next:
                return
            if changed is self._changed:
                await changed.wait()


class RunFeeds:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._feeds: OrderedDict[str, RunFeed] = OrderedDict()

    def __repr__(self) -> str:
        return f"<RunFeeds {len(self._feeds)}>"

    def open(self, run: str) -> RunFeed:
        feed = self._feeds[run] = RunFeed(self._clock.token_bytes(4).hex())
        over = [name for name, kept in self._feeds.items() if kept.is_over]
        for name in over[: max(0, len(self._feeds) - RUNS_LIMIT)]:
            del self._feeds[name]
        return feed

    def get(self, run: str) -> RunFeed | None:
        return self._feeds.get(run)
