"""Errors as they happen, for those who follow them; the latest are kept for later readers.

The same trouble is usually met again and again until someone removes it, so an error that was told a
moment ago is not told again. A listener that cannot keep up loses the oldest of what waits for
it, and is told how much that was; nobody else notices.

Where servers share a database, errors are written there (`complaints.py`), and each server tells of those
that the log brings, whoever met them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from types import TracebackType
from typing import Self

from fleetplane.domains.instances.live.complaints import Complaints, Trouble
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.store import Store

WINDOW_SECONDS = 30.0
"""Seconds within which an identical error is not repeated; half a minute of retries is one event."""
REMEMBERED_LIMIT = 4096
"""Errors remembered for that; the longest ago is forgotten first. About half a kilobyte each."""
QUEUE_LIMIT = 256
"""Errors that wait for one listener."""
TEXT_LIMIT = 1024


class ErrorFeed:
    def __init__(
        self,
        clock: Clock,
        store: Store | None = None,
        *,
        window_seconds: float = WINDOW_SECONDS,
        queue_limit: int = QUEUE_LIMIT,
    ) -> None:
        self._clock = clock
        self._shared = (
            Complaints(store, clock, self.told_anywhere, window_seconds=window_seconds)
            if store is not None and store.shared
            else None
        )
        self._window_ns = round(window_seconds * 1e9)
        self._queue_limit = queue_limit
        self._recent: OrderedDict[tuple[str, str, str, str], int] = OrderedDict()
        self._listeners: dict[str, set[ErrorListener]] = {}
        self.told = 0
        self.repeated = 0
        """Errors that were dropped as repetitions."""
        self.dropped = 0
        """Errors that listeners were too slow for."""

    def __repr__(self) -> str:
        listeners = sum(map(len, self._listeners.values()))
        return f"<ErrorFeed told={self.told} listeners={listeners} dropped={self.dropped}>"

    def tell(self, tenant: str, group: str, instance: str, text: str) -> None:
        now_ns = self._clock.now_ns()
        text = text[:TEXT_LIMIT]
        key = (tenant, group, instance, text)
        before_ns = self._recent.get(key)
        if before_ns is not None and now_ns - before_ns < self._window_ns:
            self.repeated += 1
            return
        trouble = Trouble(tenant=tenant, group=group, instance=instance, text=text, at_ns=now_ns)
        if self._shared is not None:
            self._shared.note(trouble)
        else:
            self.told_anywhere(trouble)

    def told_anywhere(self, trouble: Trouble) -> None:
        """Tell whoever listens here."""
        key = (trouble.tenant, trouble.group, trouble.instance, trouble.text)
        self._recent[key] = trouble.at_ns
        self._recent.move_to_end(key)
        if len(self._recent) > REMEMBERED_LIMIT:
            self._recent.popitem(last=False)
        self.told += 1
        for listening in self._listeners.get(trouble.tenant, ()):
            listening.offer(trouble)

    async def run_here(self) -> None:
        """What every server does, until cancelled."""
        if self._shared is not None:
            await self._shared.run_here()

    async def run_active(self) -> None:
        """What the active server does, until cancelled."""
        if self._shared is not None:
            await self._shared.run_active()

    def recent(self, tenant: str | None, limit: int) -> list[Trouble]:
        """The remembered errors of a tenant, or of all, newest first."""
        if self._shared is not None:
            return self._shared.recent(tenant)[:limit]
        found: list[Trouble] = []
        for (of, group, instance, text), at_ns in reversed(self._recent.items()):
            if len(found) >= limit:
                break
            if tenant in (None, of):
                found.append(Trouble(tenant=of, group=group, instance=instance, text=text, at_ns=at_ns))
        return found

    def subscribe(self, tenant: str) -> ErrorListener:
        """Everything told about a tenant from now on; a context manager to iterate over."""
        listening = ErrorListener(self, tenant, self._queue_limit)
        self._listeners.setdefault(tenant, set()).add(listening)
        return listening

    def leave(self, listening: ErrorListener) -> None:
        listeners = self._listeners.get(listening.tenant, set())
        listeners.discard(listening)
        if not listeners:
            self._listeners.pop(listening.tenant, None)

    def close(self) -> None:
        """End every subscription."""
        for listeners in list(self._listeners.values()):
            for listening in list(listeners):
                listening.close()


class ErrorListener:
    """One listener: iterate from one task."""

    def __init__(self, feed: ErrorFeed, tenant: str, limit: int) -> None:
        self.tenant = tenant
        self._feed = feed
        self._limit = limit
        self._queue: deque[Trouble] = deque()
        self._news = asyncio.Event()
        self._closed = False
        self._lost = 0

    def offer(self, trouble: Trouble) -> None:
        if len(self._queue) >= self._limit:
            self._queue.popleft()
            self._lost += 1
            self._feed.dropped += 1
        self._queue.append(trouble)
        self._news.set()

    def take_lost(self) -> int:
        """How many errors this listener has missed since it last asked."""
        lost, self._lost = self._lost, 0
        return lost

    def close(self) -> None:
        self._closed = True
        self._news.set()
        self._feed.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Trouble:
        while not self._queue:
            if self._closed:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._queue.popleft()
