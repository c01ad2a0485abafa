"""The agent's own latest log entries, in memory: the one log source that every node has.

Whatever runs on a thread logs from there, so entries are added by any thread; they are read on the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import suppress
from typing import Any, Final

from fleetplane.domains.boards.agent.logs.entries import AGENT, EntryQuery, Level, LogEntry, clipped
from fleetplane.kernel.clock import Clock

ENTRIES_LIMIT: Final = 1000
VALUE_LIMIT: Final = 512
UNIT: Final = "fleetplane-agent"
_LEVELS: Final = {
    "debug": Level.DEBUG,
    "info": Level.INFO,
    "warning": Level.WARNING,
    "error": Level.ERROR,
    "exception": Level.ERROR,
    "critical": Level.CRITICAL,
}


class LogRing:
    """A ring of log entries that is also a structlog processor, placed before the renderer."""

    def __init__(self, clock: Clock, *, run: str, hostname: str = "", limit: int = ENTRIES_LIMIT) -> None:
        """`run` tells this run of the agent from others: positions are only good within it."""
        self._clock = clock
        self._run = run
        self._hostname = hostname
        self._kept: deque[LogEntry] = deque(maxlen=limit)
        self._count = 0
        self._adding = threading.Lock()  # guards: as many were counted as were kept
        self._arrived = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        """Of whoever waits for entries."""

    def __repr__(self) -> str:
        return f"<LogRing {len(self._kept)} of {self._count}>"

    def __call__(
        self, _logger: object, name: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        self.add(name, event)
        return event

    def add(self, level: str, event: MutableMapping[str, Any]) -> None:
        message, _ = clipped(str(event.get("event", "")))
        fields = {
            str(name): str(value)[:VALUE_LIMIT]
            for name, value in event.items()
            if name not in ("event", "level", "timestamp")
        }
        at_ns = self._clock.now_ns()
        with self._adding:
            self._count += 1
            self._kept.append(
                LogEntry(
                    at_ns=at_ns,
                    message=message,
                    source=AGENT,
                    position=f"{self._run}:{self._count}",
                    level=_LEVELS.get(level, Level.INFO),
                    unit=UNIT,
                    hostname=self._hostname,
                    fields=fields,
                )
            )
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the process is ending
                self._loop.call_soon_threadsafe(self._arrived.set)

    def after(self, count: int) -> tuple[list[LogEntry], int]:
        """What came after the first `count` entries and is still kept, and how many came in all."""
        with self._adding:
            new = min(self._count - count, len(self._kept))
            return (list(self._kept)[-new:] if new > 0 else []), self._count

    async def arrival(self, count: int) -> None:
        """Wait until more than the first `count` entries came."""
        self._loop = asyncio.get_running_loop()
        self._arrived.clear()
        if self._count <= count:  # looked at last: whoever adds one from now on wakes us
            await self._arrived.wait()

    def count_in(self, position: str) -> int:
        run, _, count = position.partition(":")
        return int(count) if run == self._run and count.isdecimal() and len(count) < 16 else 0


class RingReader:
    def __init__(self, ring: LogRing, query: EntryQuery) -> None:
        self.source = AGENT
        self._ring = ring
        self._seen = ring.count_in(query.positions.get(AGENT, ""))

    def __repr__(self) -> str:
        return f"<RingReader after {self._seen}>"

    async def backlog(self) -> AsyncGenerator[LogEntry, None]:
        entries, self._seen = self._ring.after(self._seen)
        for entry in entries:
            yield entry

    async def follow(self) -> AsyncGenerator[LogEntry, None]:
        while True:
            entries, self._seen = self._ring.after(self._seen)
            for entry in entries:
                yield entry
            await self._ring.arrival(self._seen)
