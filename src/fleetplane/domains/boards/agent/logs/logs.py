"""Logs of this node as one stream: what is there, then what comes, from one source or several.

What is there is read at the reader's pace, so nothing of it is lost. What comes does not wait: between
the sources and a slow reader stands a queue with a bound, and when that is full the oldest go and are
counted. A stream that follows says something every half minute, so that both sides know it is alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from fleetplane.domains.boards.agent.logs.entries import (
    AGENT,
    FILE,
    JOURNAL,
    KERNEL,
    EntryQuery,
    LogEntry,
    Redaction,
    make_cursor,
)
from fleetplane.domains.boards.agent.logs.files import FileReader, LogFile
from fleetplane.domains.boards.agent.logs.journal import SystemJournal
from fleetplane.domains.boards.agent.logs.ring import LogRing, RingReader
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument
from fleetplane.node.tasks import beside

QUEUE_ENTRIES: Final = 1000
QUEUE_BYTES: Final = 8 * 1024 * 1024
TAIL_BYTES: Final = 8 * 1024 * 1024
"""Of the last entries, while they are being looked for."""
KEEP_ALIVE_SECONDS: Final = 30.0


class LogSourceReader(Protocol):
    """One reader's way through one source. `backlog` is read to its end before `follow`."""

    source: str

    def backlog(self) -> AsyncGenerator[LogEntry, None]: ...

    def follow(self) -> AsyncGenerator[LogEntry, None]: ...


class EntryTail:
    """The last entries, by number and by size."""

    def __init__(self, count: int, limit_bytes: int = TAIL_BYTES) -> None:
        self._kept: deque[LogEntry] = deque()
        self._count = count
        self._limit_bytes = limit_bytes
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<Tail {len(self._kept)}/{self._count} {self._bytes} bytes>"

    def add(self, entry: LogEntry) -> None:
        self._kept.append(entry)
        self._bytes += entry.size
        while len(self._kept) > self._count or (self._bytes > self._limit_bytes and len(self._kept) > 1):
            self._bytes -= self._kept.popleft().size

    def entries(self) -> list[LogEntry]:
        return list(self._kept)


class Queue:
    """Between sources that do not wait and a reader that may be slow: the oldest go, and are counted."""

    def __init__(self, *, entries: int = QUEUE_ENTRIES, limit_bytes: int = QUEUE_BYTES) -> None:
        self._entries: deque[LogEntry] = deque()
        self._limit = entries
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._dropped = 0
        self._failure: FleetplaneError | None = None
        self._arrived = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Queue {len(self._entries)} entries, {self._bytes} bytes, {self._dropped} dropped>"

    def put(self, entry: LogEntry) -> None:
        self._entries.append(entry)
        self._bytes += entry.size
        while len(self._entries) > self._limit or self._bytes > self._limit_bytes:
            self._bytes -= self._entries.popleft().size
            self._dropped += 1
        self._arrived.set()

    def fail(self, error: FleetplaneError) -> None:
        self._failure = error
        self._arrived.set()

    async def get(self) -> LogEntry:
        """The next entry, with how many were lost before it; raises what a source failed with."""
        while not self._entries:
            if self._failure is not None:
                raise self._failure
            self._arrived.clear()
            await self._arrived.wait()
        entry = self._entries.popleft()
        self._bytes -= entry.size
        dropped, self._dropped = self._dropped, 0
        return replace(entry, dropped=dropped) if dropped else entry


class Logs:
    def __init__(
        self,
        *,
        journal: SystemJournal,
        ring: LogRing,
        files: Mapping[str, Path],
        clock: Clock,
        redaction: Redaction | None = None,
        hostname: str = "",
        keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
    ) -> None:
        self._journal = journal
        self._ring = ring
        self._files = {name: LogFile(name, path, hostname=hostname) for name, path in files.items()}
        self._clock = clock
        self._redaction = redaction or Redaction()
        self._hostname = hostname
        self._keep_alive_seconds = keep_alive_seconds
        self.streams = 0

    def __repr__(self) -> str:
        return f"<Logs {', '.join(self.sources)} streams={self.streams}>"

    @property
    def sources(self) -> tuple[str, ...]:
        """What can be asked for here now."""
        journals = () if self._journal.unavailable_reason else (JOURNAL, KERNEL)
        return (*journals, AGENT, *(FILE + name for name in self._files))

    @property
    def journal_unavailable_reason(self) -> str:
        return self._journal.unavailable_reason

    async def stream(self, query: EntryQuery) -> AsyncGenerator[LogEntry, None]:
        """Entries in order, each with the cursor after which to resume."""
        readers = [self._reader(source, query) for source in self._chosen(query)]
        positions = {reader.source: query.positions.get(reader.source, "") for reader in readers}
        self.streams += 1
        try:
            async with contextlib.aclosing(self._entries(readers, query)) as entries:
                async for entry in entries:
                    yield self._finished(entry, positions)
        finally:
            self.streams -= 1

    async def _entries(
        self, readers: Sequence[LogSourceReader], query: EntryQuery
    ) -> AsyncGenerator[LogEntry, None]:
        async with contextlib.aclosing(self._backlog(readers, query)) as backlog:
            async for entry in backlog:
                yield entry
        if query.follow:
            async with contextlib.aclosing(self._follow(readers, query)) as following:
                async for entry in following:
                    yield entry

    async def _backlog(
        self, readers: Sequence[LogSourceReader], query: EntryQuery
    ) -> AsyncGenerator[LogEntry, None]:
        if query.tail_lines is None:
            for reader in readers:
                async with contextlib.aclosing(_wanted(reader.backlog(), query)) as entries:
                    async for entry in entries:
                        yield entry
            return
        tails = []
        for reader in readers:
            tail = EntryTail(query.tail_lines)
            async with contextlib.aclosing(_wanted(reader.backlog(), query)) as entries:
                async for entry in entries:
                    tail.add(entry)
            tails.append(tail.entries())
        merged = list(heapq.merge(*tails, key=lambda entry: entry.at_ns))
        for entry in merged[-query.tail_lines :]:
            yield entry

    async def _follow(
        self, readers: Sequence[LogSourceReader], query: EntryQuery
    ) -> AsyncGenerator[LogEntry, None]:
        queue = Queue()
        async with beside(_pump(reader, query, queue) for reader in readers) as pumps:
            while (seconds := self._patience_seconds(query)) > 0:
                try:
                    async with asyncio.timeout(seconds):
                        entry = await queue.get()
                except TimeoutError:
                    for pump in pumps:
                        if pump.done():
                            pump.result()
                    entry = self._sign_of_life()
                yield entry

    def _patience_seconds(self, query: EntryQuery) -> float:
        if query.until_ns is None:
            return self._keep_alive_seconds
        return min(self._keep_alive_seconds, (query.until_ns - self._clock.now_ns()) / 1e9)

    def _sign_of_life(self) -> LogEntry:
        return LogEntry(
            at_ns=self._clock.now_ns(), message="", source=AGENT, position="", hostname=self._hostname
        )

    def _finished(self, entry: LogEntry, positions: dict[str, str]) -> LogEntry:
        if entry.position:
            positions[entry.source] = entry.position
        known = {source: position for source, position in positions.items() if position}
        return replace(entry, message=self._redaction.clean(entry.message), cursor=make_cursor(known))

    def _chosen(self, query: EntryQuery) -> Sequence[str]:
        """The selected sources. Default: the journal; without one, all other sources."""
        if query.sources:
            return query.sources
        if query.positions:
            return tuple(query.positions)
        known = self.sources
        return (JOURNAL,) if JOURNAL in known else known

    def _reader(self, source: str, query: EntryQuery) -> LogSourceReader:
        if source in (JOURNAL, KERNEL):
            return self._journal.reader(query, self._clock, kernel=source == KERNEL)
        if source == AGENT:
            return RingReader(self._ring, query)
        file = self._files.get(source.removeprefix(FILE)) if source.startswith(FILE) else None
        if file is None:
            raise InvalidArgument(
                f"there is no source {source[:64]!r} on this node",
                field="sources",
                hint=f"it has {', '.join(self.sources)}",
            )
        return FileReader(file, query, self._clock)


async def _wanted(
    entries: AsyncGenerator[LogEntry, None], query: EntryQuery
) -> AsyncGenerator[LogEntry, None]:
    async with contextlib.aclosing(entries):
        async for entry in entries:
            if query.wants(entry):
                yield entry


async def _pump(reader: LogSourceReader, query: EntryQuery, queue: Queue) -> None:
    try:
        async with contextlib.aclosing(_wanted(reader.follow(), query)) as entries:
            async for entry in entries:
                queue.put(entry)
    except FleetplaneError as error:
        queue.fail(error)
