"""A bounded queue of events for one client: it forgets its oldest, and counts what it forgot.

Posting never waits, so no client's slowness delays the one who posts or another client.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

E = TypeVar("E")

MAILBOX_LIMIT = 256
"""Events waiting for one client: about half a kilobyte each."""


class Mailbox(Generic[E]):
    def __init__(self, *, bell: asyncio.Event | None = None, limit: int = MAILBOX_LIMIT) -> None:
        """`bell` is set whenever there is something to take."""
        self._limit = limit
        self._waiting: deque[E] = deque()
        self.bell = bell or asyncio.Event()
        self.missed = 0
        """Forgotten since `take_missed`."""

    def __repr__(self) -> str:
        return f"<Mailbox waiting={len(self._waiting)} missed={self.missed}>"

    def __len__(self) -> int:
        return len(self._waiting)

    def post(self, event: E) -> None:
        if len(self._waiting) >= self._limit:
            self._waiting.popleft()
            self.missed += 1
        self._waiting.append(event)
        self.bell.set()

    def take(self) -> E | None:
        """The oldest event; None if there is none."""
        return self._waiting.popleft() if self._waiting else None

    def take_missed(self) -> int:
        """How many events were forgotten since the last call."""
        missed, self.missed = self.missed, 0
        return missed
