"""Logs of boards, for live readers and for the resource API: one stream at the board for each reader.

Entries are passed on at once and not kept here: a slow reader slows its own stream down to the board, which
drops its oldest entries and counts them. When the connection breaks while a log is followed, reading resumes
after the last entry that was delivered, so that the reader misses nothing that the board still has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from fleetplane.domains.boards.calls.channels import CallOrigin, NodeLinks
from fleetplane.domains.boards.calls.errors import AWAY
from fleetplane.domains.boards.inventory.boards import Boards, status_of
from fleetplane.domains.boards.kinds import Board, number_of
from fleetplane.domains.boards.wire import message_json
from fleetplane.fleet.figures import CPU, DISK, MEMORY, Figures, Measure, MeasuredSeries, Stretch
from fleetplane.fleet.resources.declaration import LogCall, LogLine
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.clock import Backoff, Clock
from fleetplane.kernel.errors import (
    FleetplaneError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.values.timestamps import timestamp

LEVELS: Final = {name.lower(): name for name in pb.LogEntry.LogLevel.keys() if name != "UNSPECIFIED"}  # noqa: SIM118
SOURCES: Final = ("journal", "kernel", "agent")
FILE: Final = "file:"
"""Before the name of a file that a board is told to follow."""
MEASURES: Final = {
    "cpu_usage": CPU,
    "memory_usage": MEMORY,
    "disk_usage": DISK,
    "temperature": Measure(
        name="temperatureCelsius", title="Temperature", unit="°C", most=200.0, least=-100.0, high=80.0
    ),
}
"""By series."""


async def logs(call: LogCall) -> AsyncGenerator[LogLine, None]:
    """What a board writes down, read at the board. A source is one of its own, or a unit."""
    query, domain = call.query, call.domain
    if query.level and query.level not in LEVELS:
        raise InvalidArgument(f"is not one of {', '.join(LEVELS)}", field="level")
    is_source = query.source in SOURCES or query.source.startswith(FILE)
    wanted = pb.LogFilter(
        min_level=LEVELS[query.level] if query.level else None,
        units=[query.source] if query.source and not is_source else [],
        sources=[query.source] if is_source else [],
        contains=query.contains,
        # To a board, 0 is nothing said: what is meant is nothing from before.
        since=None if query.tail else timestamp(domain.core.kernel.clock.now_ns()),
        tail_lines=query.tail,
        follow=query.follow,
    )
    asked = CallOrigin(actor=call.actor)
    async with aclosing(domain.nodes.logs.read(int(call.stored.name), wanted, asked=asked)) as entries:
        async for entry in entries:
            if entry.message or entry.dropped:  # the rest are signs of life
                yield _line(entry)


def _line(entry: pb.LogEntry) -> LogLine:
    told = message_json.plain(entry)
    return LogLine(
        at=told["timestamp"] or "",
        level=told["level"],
        source=entry.unit or entry.source,
        message=entry.message,
        dropped=entry.dropped,
    )


async def figures(domain: Any, boards: Sequence[AnyResource]) -> Mapping[str, Figures]:
    """The latest of the last minutes; nothing of boards that reported none."""
    try:
        found = await domain.nodes.history.latest([int(board.name) for board in boards])
    except Unavailable:  # this server keeps none
        return {}
    return {
        str(number): Figures(
            at_ns=max(one.at_ns for one in samples.values()),
            values={MEASURES[name].name: one.value for name, one in samples.items() if name in MEASURES},
        )
        for number, samples in found.items()
        if samples
    }


async def history(domain: Any, board: AnyResource, stretch: Stretch) -> Sequence[MeasuredSeries]:
    """What a board measured over time; nothing where this server keeps none."""
    kept = domain.nodes.history
    try:
        found = [
            MeasuredSeries(measure=measure, buckets=await kept.over([int(board.name)], series, stretch))
            for series, measure in MEASURES.items()
        ]
    except Unavailable:
        return ()
    return [one for one in found if one.buckets]


READERS_LIMIT: Final = 1024
READERS_PER_BOARD: Final = 8
"""Of the sixteen that a board allows: other servers and its operators have some as well."""
TAIL_LIMIT: Final = 10_000
TEXT_LIMIT: Final = 1024
"""Of a pattern or a text to look for."""
NAMES_LIMIT: Final = 32
BACKOFF: Final = Backoff(first_seconds=0.5, ceiling_seconds=30.0)
PATIENCE_SECONDS: Final = 600.0
"""How long a followed board may be away before its readers get an error; a reboot takes two minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayStatistics:
    readers: int
    entries: int
    dropped: int
    """Entries that boards say they did not keep for a slow reader."""
    resumed: int
    refused: int
    """Readers refused because of the limit."""


class LogsRelay:
    def __init__(self, *, boards: Boards, links: NodeLinks, clock: Clock) -> None:
        self._boards = boards
        self._links = links
        self._clock = clock
        self._readers: Counter[int] = Counter()
        self._entries = self._dropped = self._resumed = self._refused = 0

    def __repr__(self) -> str:
        return f"<LogsRelay readers={self._readers.total()} entries={self._entries}>"

    def statistics(self) -> RelayStatistics:
        return RelayStatistics(
            readers=self._readers.total(),
            entries=self._entries,
            dropped=self._dropped,
            resumed=self._resumed,
            refused=self._refused,
        )

    async def read(
        self, board: int, wanted: pb.LogFilter, *, asked: CallOrigin
    ) -> AsyncGenerator[pb.LogEntry, None]:
        """Entries until the end, or, when following, until the reader leaves.

        Close it (`aclosing`) to leave: the stream at the board ends with it.
        """
        found = self._boards.require(board, field="board")
        _check(found, wanted)
        with self._reading(board):
            async with aclosing(self._resuming(board, wanted, asked)) as entries:
                async for entry in entries:
                    self._entries += 1
                    self._dropped += entry.dropped
                    yield entry

    async def _resuming(
        self, board: int, wanted: pb.LogFilter, asked: CallOrigin
    ) -> AsyncGenerator[pb.LogEntry, None]:
        """One log stream that survives lost connections, resuming after the last cursor."""
        asking = pb.LogFilter()
        asking.CopyFrom(wanted)
        failures, lost_at = 0, 0.0
        while True:
            try:
                async with aclosing(self._once(board, asking, asked)) as entries:
                    async for entry in entries:
                        if failures:
                            failures, self._resumed = 0, self._resumed + 1
                        if entry.cursor:
                            asking.cursor = entry.cursor
                            asking.tail_lines = 0
                        yield entry
                return
            except AWAY as error:
                now = self._clock.monotonic()
                lost_at = lost_at if failures else now
                if not (wanted.follow and asking.cursor) or now - lost_at > PATIENCE_SECONDS:
                    raise _lost(error, asking.cursor) from error
            delay = BACKOFF.delay_seconds(failures, jitter=self._clock.random())
            failures += 1
            await self._clock.sleep(delay)

    def _once(self, board: int, asking: pb.LogFilter, asked: CallOrigin) -> AsyncGenerator[pb.LogEntry, None]:
        return self._links.stream(board, lambda link: link.node.StreamLogs, asking, pb.LogEntry, asked=asked)

    @contextmanager
    def _reading(self, board: int) -> Iterator[None]:
        if self._readers.total() >= READERS_LIMIT or self._readers[board] >= READERS_PER_BOARD:
            self._refused += 1
            raise ResourceExhausted(
                f"board {board} has {self._readers[board]} readers of its log, "
                f"of {self._readers.total()} in all"
            )
        self._readers[board] += 1
        try:
            yield
        finally:
            self._readers[board] -= 1
            if not self._readers[board]:
                del self._readers[board]


def _lost(error: FleetplaneError, cursor: str) -> FleetplaneError:
    """The error with the cursor to resume from, if there is one."""
    if cursor:
        error.details["cursor"] = cursor
    return error


def _check(board: Board, wanted: pb.LogFilter) -> None:
    """Refuse what no board would take, before one is bothered. Whether a pattern is sound, it says itself."""
    if status_of(board).speaks_original:
        raise Unimplemented(f"board {number_of(board)} is an original agent, which knows no logs")
    if not 0 <= wanted.tail_lines <= TAIL_LIMIT:
        raise InvalidArgument(f"tail_lines must be 0 to {TAIL_LIMIT}", field="tail_lines")
    for field in ("contains", "regex", "cursor"):
        if len(getattr(wanted, field)) > TEXT_LIMIT:
            raise InvalidArgument(f"{field} has at most {TEXT_LIMIT} characters", field=field)
    for field in ("units", "sources"):
        names = getattr(wanted, field)
        if len(names) > NAMES_LIMIT or any(len(name) > 256 for name in names):
            raise InvalidArgument(f"{field} has at most {NAMES_LIMIT} names", field=field)
