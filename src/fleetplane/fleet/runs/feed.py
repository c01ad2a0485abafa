"""Live events of runs, kept for a while after a run has ended.

Each event of a run has a number, so that a reader who was cut off goes on after the last one it
saw. What is kept is bounded: of a long run the oldest output goes first, and a reader that needs
it is told that something is missing. Results are never lost by this: they stand in the ledger.

Output that comes line by line is put together until a reader takes it or there is enough of it: a hundred
thousand lines are some hundred events.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from fleetplane.fleet.runs.events import RunEvent, TargetOutput
from fleetplane.kernel.clock import Clock

EVENTS_LIMIT = 20_000
"""Kept of one run."""
BYTES_LIMIT = 2 * 1024 * 1024
"""Output kept of one run."""
GATHERED_BYTES = 32 * 1024
TELL_SECONDS = 0.02
"""How long a reader that has everything waits for more after the first of it."""
STATUS = "status"
READ_AT_ONCE = 512
"""Events that a reader takes before others get their turn."""
ALL_BYTES_LIMIT = 64 * 1024 * 1024
"""Output kept of all runs of a domain; beyond it, the run of which most is kept loses its older half."""
RUNS_LIMIT = 256
"""Runs of which anything is kept; the one that ended longest ago goes first."""


@dataclass(slots=True)
class FeedBytes:
    """Bytes of output in the feeds of one domain."""

    size: int = 0


class RunFeed:
    """The events of one run."""

    def __init__(self, epoch: str = "", kept: FeedBytes | None = None) -> None:
        self.epoch = epoch
        self._kept = kept if kept is not None else FeedBytes()
        self._events: deque[RunEvent] = deque()
        self.held = 0
        """Bytes of output in its events."""
        self._next = 1
        self._waiting: list[asyncio.Future[None]] = []
        self._name, self._stream = "", ""
        self._parts: list[bytes] = []
        """Output of that target on that stream which is no event yet."""
        self._parts_size = 0
        self._printing: set[str] = set()
        """Targets of which some output has come."""
        self.is_over = False
        self.dropped = 0

    def __repr__(self) -> str:
        return f"<RunFeed events={len(self._events)} over={self.is_over}>"

    @property
    def readers(self) -> int:
        """Those who have everything and wait for more."""
        return len(self._waiting)

    def add(self, event: RunEvent) -> None:
        """Number an event and tell it. What comes after the end is dropped."""
        if self.is_over:
            return
        self._gather()
        self._append(event)
        self._wake()

    def add_output(self, name: str, stream: str, output: bytes) -> None:
        """Take some output of a target. That it printed nothing is told to nobody."""
        if self.is_over or not (output or stream == STATUS):
            return
        if self._parts and (name, stream) != (self._name, self._stream):
            self._gather()
        self._name, self._stream = name, stream
        if stream != STATUS:
            self._printing.add(name)
        self._parts.append(output)
        self._parts_size += len(output)
        if self._parts_size >= GATHERED_BYTES or stream == STATUS:
            self._gather()
        self._wake()

    def has_output(self, name: str) -> bool:
        """Whether some output of a target has come here."""
        return name in self._printing

    def _gather(self) -> None:
        """Make an event of the output that has come."""
        if not self._parts:
            return
        output, self._parts, self._parts_size = b"".join(self._parts), [], 0
        self._append(TargetOutput(name=self._name, stream=self._stream, output=output))

    def _append(self, event: RunEvent) -> None:
        self._events.append(msgspec.structs.replace(event, number=self._next, epoch=self.epoch))
        self._next += 1
        self._hold(event.size)
        while self.held > BYTES_LIMIT or len(self._events) > EVENTS_LIMIT:
            self._drop_oldest()

    def _hold(self, size: int) -> None:
        self.held += size
        self._kept.size += size

    def _drop_oldest(self) -> None:
        self._hold(-self._events.popleft().size)
        self.dropped += 1

    def halve(self) -> None:
        """Drop the older half of the output that is kept."""
        most = self.held // 2
        while self.held > most:
            self._drop_oldest()

    def forget(self) -> None:
        """It is not kept any more; whoever reads it still reads on."""
        self._kept.size -= self.held
        self._kept = FeedBytes()

    def end(self) -> None:
        self._gather()
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                if not one.done():
                    one.set_result(None)

    def _later(self, number: int) -> list[RunEvent]:
        """Some of the events after this number. They are numbered without a gap, so nothing is searched."""
        if not self._events:
            return []
        start = max(0, number + 1 - self._events[0].number)
        return [self._events[place] for place in range(start, min(start + READ_AT_ONCE, len(self._events)))]

    async def after(self, number: int = 0) -> AsyncIterator[RunEvent | None]:
        """Every event after this number, until the run is over; None where some are missing."""
        while True:
            self._gather()
            first = self._events[0].number if self._events else self._next
            if number + 1 < first:
                number = first - 1
                yield None
            for event in self._later(number):
                number = event.number
                yield event
            if number + 1 < self._next:
                continue  # more than was read at once
            if self.is_over:
                return
            if not self._parts:
                news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiting.append(news)
                await news
                # More may be on its way already: output is told in pieces, and not line by line.
                await asyncio.sleep(TELL_SECONDS)


class RunFeeds:
    """The feeds of runs that go on, or ended not long ago."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._feeds: OrderedDict[str, RunFeed] = OrderedDict()
        self._kept = FeedBytes()

    def __repr__(self) -> str:
        return f"<RunFeeds {len(self._feeds)}>"

    def open(self, run: str) -> RunFeed:
        feed = self._feeds[run] = RunFeed(self._clock.token_bytes(4).hex(), self._kept)
        over = [name for name, kept in self._feeds.items() if kept.is_over]
        for name in over[: max(0, len(self._feeds) - RUNS_LIMIT)]:
            self._feeds.pop(name).forget()
        return feed

    def add_output(self, run: str, name: str, stream: str, output: bytes) -> None:
        """Take some output of a target, and keep all of them within bounds."""
        feed = self._feeds.get(run)
        if feed is None:
            return
        feed.add_output(name, stream, output)
        if self._kept.size > ALL_BYTES_LIMIT:
            max(self._feeds.values(), key=lambda one: one.held).halve()

    def get(self, run: str) -> RunFeed | None:
        return self._feeds.get(run)
