"""Errors as they happen, for those who follow them; the latest are kept for later readers.

The same trouble is usually met again and again until someone removes it, so an error that was told a
moment ago is not told again. A listener that cannot keep up loses the oldest of what waits for
it, and is told how much that was; nobody else notices.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from fleetplane.kernel.clock import Clock

WINDOW_SECONDS = 30.0
"""Seconds within which an identical error is not repeated; half a minute of retries is one event."""
REMEMBERED_LIMIT = 4096
"""Errors remembered for that; the longest ago is forgotten first. About half a kilobyte each."""
QUEUE_LIMIT = 256
"""Errors that wait for one listener."""
TEXT_LIMIT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """One error of one tenant."""

    tenant: str
    group: str
    instance: str
    """Empty if it concerns the whole group."""
    text: str
    at_ns: int


class ErrorFeed:
    def __init__(
        self, clock: Clock, *, window_seconds: float = WINDOW_SECONDS, queue_limit: int = QUEUE_LIMIT
    ) -> None:
        self._clock = clock
        self._window_ns = round(window_seconds * 1e9)
        self._queue_limit = queue_limit
        self._recent: OrderedDict[tuple[str, str, str, str], int] = OrderedDict()
        self._listeners: dict[str, set[Listening]] = {}
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
        self._recent[key] = now_ns
        self._recent.move_to_end(key)
        if len(self._recent) > REMEMBERED_LIMIT:
            self._recent.popitem(last=False)
        self.told += 1
        trouble = Trouble(tenant=tenant, group=group, instance=instance, text=text, at_ns=now_ns)
        for listening in self._listeners.get(tenant, ()):
            listening.offer(trouble)

    def recent(self, tenant: str, limit: int) -> list[Trouble]:
        """The remembered errors of a tenant, newest first."""
        found: list[Trouble] = []
        for (of, group, instance, text), at_ns in reversed(self._recent.items()):
            if len(found) >= limit:
                break
            if of == tenant:
                found.append(Trouble(tenant=of, group=group, instance=instance, text=text, at_ns=at_ns))
        return found

    def subscribe(self, tenant: str) -> Listening:
        """Everything told about a tenant from now on; a context manager to iterate over."""
        listening = Listening(self, tenant, self._queue_limit)
        self._listeners.setdefault(tenant, set()).add(listening)
        return listening

    def leave(self, listening: Listening) -> None:
        listeners = self._listeners.get(listening.tenant, set())
        listeners.discard(listening)
        if not listeners:
            self._listeners.pop(listening.tenant, None)

    def close(self) -> None:
        """End every subscription."""
        for listeners in list(self._listeners.values()):
            for listening in list(listeners):
                listening.close()


class Listening:
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
