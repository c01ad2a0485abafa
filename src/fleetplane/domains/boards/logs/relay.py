"""Live logs of boards: one stream at the board for each reader.

Entries are passed on as they are taken, and not kept here: a slow reader slows its own stream down to
the board, which drops its oldest and counts them. When the connection breaks while a log is
followed, reading goes on after the last entry that came through, so that the reader misses nothing
that the board still has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Final

from fleetplane.domains.boards.calls.channels import CallOrigin, NodeLinks
from fleetplane.domains.boards.calls.errors import AWAY
from fleetplane.domains.boards.inventory.boards import Boards, status_of
from fleetplane.domains.boards.kinds import Board, number_of
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.backoff import Backoff
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, ResourceExhausted, Unimplemented

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
