"""Whose points and lines were written lately: for those who show them, and want to know when to ask again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from fleetplane.kernel.telemetry.values import LogRecord, Point

SENDERS_LIMIT = 50_000
"""Sources that are remembered, some 200 bytes each: five times as many as one server is made for."""

Sender = tuple[str, str]
"""Scope and source."""


class News:
    """Numbers what was written, and remembers of every source the last number."""

    def __init__(self) -> None:
        self._last: OrderedDict[Sender, int] = OrderedDict()
        self.number = 0

    def __repr__(self) -> str:
        return f"<News number={self.number} senders={len(self._last)}>"

    def note(self, rows: Iterable[Point | LogRecord]) -> None:
        """Rows that were written together."""
        self.number += 1
        for sender in {(row.scope, row.source) for row in rows}:
            self._last[sender] = self.number
            self._last.move_to_end(sender)
        while len(self._last) > SENDERS_LIMIT:
            self._last.popitem(last=False)

    def since(self, number: int) -> Iterator[Sender]:
        """Of whom something was written after a number."""
        for sender in reversed(self._last):
            if self._last[sender] <= number:
                return
            yield sender
