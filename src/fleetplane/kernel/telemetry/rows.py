"""What rows of both engines have in common: how counters stand, and by what a line is known. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fleetplane.kernel.telemetry.values import LogRecord, Point


@dataclass(slots=True)
class SeriesState:
    """Where a series stands: the last point written, and what its counter had lost to restarts."""

    id: int
    at_ns: int = -1
    value: float = 0.0
    base: float = 0.0

    def take(self, point: Point) -> tuple[int, int, float, float] | None:
        """The row of the next point; None if between which restarts it belongs can no longer be told."""
        if point.counter:
            if point.at_ns <= self.at_ns:
                return None
            if point.value < self.value:
                self.base += self.value
        self.at_ns, self.value = max(point.at_ns, self.at_ns), point.value
        return (self.id, point.at_ns, point.value, self.base)


def marks(source: str, lines: Sequence[LogRecord]) -> Iterator[int]:
    """A number for each line, made of who sent it and of its identity; its sequence, if any, comes first."""
    begun = hashlib.blake2b(f"{source}\0".encode(), digest_size=8)
    for line in lines:
        mark = begun.copy()
        mark.update(line.identity.encode())
        hashed = int.from_bytes(mark.digest(), "big") >> 1  # what is left fits a database's integers
        # 40 bits of the sequence, and as many of the hash as there is room for.
        yield line.sequence % (1 << 40) << 23 | hashed >> 40 if line.sequence else hashed
