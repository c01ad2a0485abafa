"""What the server must hear even if the connection breaks: kept until it is known to have it.

Bounded and in order: with a server away for long the oldest goes, and is counted. What is only of passing
interest is not kept here but made anew. What counts as confirmation is the protocol's: an answer to the
oldest (`oldest`, `confirmed`), a receipt by key (`unsent`, `sent`, `confirmed`, `again`), or a stream that
has stood for a while since (`sent` with its time, `sent_before`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class _OutboxEntry(Generic[V]):
    value: V
    sent_at: float | None = None


class Outbox(Generic[K, V]):
    def __init__(self, *, limit: int) -> None:
        self._entries: OrderedDict[K, _OutboxEntry[V]] = OrderedDict()
        self._limit = limit
        self._changed = asyncio.Event()
        self.dropped = 0
        """Values that went without confirmation, to make room."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._entries)}/{self._limit} dropped={self.dropped}>"

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: K, value: V) -> None:
        """Keep a value. One that is there under the key is replaced, and goes to the end and out again."""
        self._entries.pop(key, None)
        self._entries[key] = _OutboxEntry(value)
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)
            self.dropped += 1
        self._changed.set()

    def confirmed(self, key: K) -> V | None:
        """The server has it. What was kept under the key, if anything was."""
        entry = self._entries.pop(key, None)
        return None if entry is None else entry.value

    # For streams, on which everything goes out once.

    def new_stream(self) -> None:
        """Nothing has been sent on the stream that begins now."""
        for entry in self._entries.values():
            entry.sent_at = None
        self._changed.set()

    def unsent(self) -> list[tuple[K, V]]:
        return [(key, entry.value) for key, entry in self._entries.items() if entry.sent_at is None]

    def sent(self, key: K, value: V, *, at: float = 0.0) -> None:
        """It went out on this stream, unless it was replaced or has gone meanwhile."""
        entry = self._entries.get(key)
        if entry is not None and entry.value is value:
            entry.sent_at = at

    def sent_before(self, at: float) -> list[K]:
        """Keys of what went out on this stream at that time or earlier."""
        return [
            key for key, entry in self._entries.items() if entry.sent_at is not None and entry.sent_at <= at
        ]

    def again(self, key: K) -> bool:
        """It is to go out once more on this stream, when `wake` is called; whether it had gone out."""
        entry = self._entries.get(key)
        if entry is None or entry.sent_at is None:
            return False
        entry.sent_at = None
        return True

    def wake(self) -> None:
        """Somebody should look again at what is unsent."""
        self._changed.set()

    async def changed(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    # For calls, one after another.

    async def oldest(self) -> tuple[K, V]:
        """What comes first, as soon as there is anything. It stays until it is confirmed or makes room."""
        while not self._entries:
            self._changed.clear()
            await self._changed.wait()
        key, entry = next(iter(self._entries.items()))
        return key, entry.value
