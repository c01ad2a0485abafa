"""Logs of this node as one stream: what is there, then what comes, from one source or several.

Existing entries are read at the reader's pace, so none is lost. New entries do not wait: between the sources
and a slow reader stands a bounded queue, which drops its oldest entries and counts them. A stream that
follows sends a sign of life every half minute, so that both sides know it is alive.

The agent's own latest entries are kept in memory, as the one log source that every node has. Any thread adds
to them; they are read on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import threading
from collections import deque
from collections.abc import AsyncGenerator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from fleetplane.domains.boards.agent.logs.entries import (
    AGENT,
    FILE,
    JOURNAL,
    KERNEL,
    EntryQuery,
    Level,
    LogEntry,
    Redaction,
    clipped,
    make_cursor,
)
from fleetplane.domains.boards.agent.logs.files import FileReader, LogFile
from fleetplane.domains.boards.agent.logs.journal import SystemJournal
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument
from fleetplane.node.tasks import beside

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
