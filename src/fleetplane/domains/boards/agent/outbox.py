"""Reports on their way to the server. While it is away they wait, the newest of them; the rest is counted."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from fleetplane.gen.boards import boards_pb2 as pb

REPORTS_LIMIT: Final = 120
"""An hour of them, some 2 KB each."""


class Outbox:
    def __init__(self, limit: int = REPORTS_LIMIT) -> None:
        self._waiting: deque[pb.HealthReport] = deque()
        self._limit = limit
        self._arrived = asyncio.Event()
        self.dropped = 0

    def __repr__(self) -> str:
        return f"<Outbox {len(self._waiting)}/{self._limit} dropped={self.dropped}>"

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, report: pb.HealthReport) -> None:
        self._waiting.append(report)
        if len(self._waiting) > self._limit:
            self._waiting.popleft()
            self.dropped += 1
        self._arrived.set()

    async def oldest(self) -> pb.HealthReport:
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting[0]

    def delivered(self, report: pb.HealthReport) -> None:
        """It may be gone already, to make room."""
        if self._waiting and self._waiting[0] is report:
            self._waiting.popleft()
