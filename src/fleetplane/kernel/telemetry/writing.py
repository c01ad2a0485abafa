"""The writing half: batches in, old rows out. Used by one thread; knows no event loop.

Raises the database's errors as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleetplane.kernel.telemetry import database
from fleetplane.kernel.telemetry.values import NS_PER_SECOND, Line, Point, TelemetryLimits

SLICE_ROWS = 10_000
"""Deleted at once: some tens of milliseconds, in which nothing is written."""
SLICE_SERIES = 500
ROOM = 0.95
"""Of the size to get down to when it was exceeded, so as not to delete at every turn."""
NARROWINGS = 8
"""How often the points' age is halved to make room: from a month down to hours."""

_FIND_SERIES = "SELECT id FROM series WHERE scope = ? AND name = ? AND source = ?"
_INSERT_SERIES = "INSERT INTO series (scope, name, source) VALUES (?, ?, ?)"
_COUNT_SERIES = "SELECT count(*) FROM series"
_NEXT_SERIES = "SELECT id FROM series WHERE id > ? ORDER BY id LIMIT ?"
_DROP_EMPTY_SERIES = (
    "DELETE FROM series WHERE NOT EXISTS (SELECT 1 FROM points WHERE points.series = series.id)"
)
_LAST_POINT = "SELECT at_ns, value, base FROM points WHERE series = ? ORDER BY at_ns DESC LIMIT 1"
_INSERT_POINT = "INSERT OR IGNORE INTO points VALUES (?, ?, ?, ?)"
_EXPIRE_POINTS = "DELETE FROM points WHERE series = ? AND at_ns < ?"
_FIND_CHANNEL = "SELECT id FROM channels WHERE scope = ? AND stream = ?"
_INSERT_CHANNEL = "INSERT OR IGNORE INTO channels (scope, stream) VALUES (?, ?)"
_INSERT_LINE = (
    "INSERT OR IGNORE INTO lines (channel, at_ns, mark, code, source, subject, action, body)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
_EXPIRE_LINES = "DELETE FROM lines WHERE id IN (SELECT id FROM lines WHERE channel = ? AND at_ns < ? LIMIT ?)"
_OLDEST_LINES = "DELETE FROM lines WHERE id IN (SELECT id FROM lines ORDER BY id LIMIT ?)"


@dataclass(slots=True)
class _Series:
    """Where a series stands: the last point written, and what its counter had lost to restarts."""

    id: int
    at_ns: int = -1
    value: float = 0.0
    base: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    rows: int
    ignored: int


class Writer:
    def __init__(self, path: Path, limits: TelemetryLimits) -> None:
        self._limits = limits
        self._connection = database.connect(path, for_writing=True)
        self._known: dict[tuple[str, str, str], _Series] = {}
        self._channels: dict[tuple[str, str], int] = {}
        (self.series,) = self._connection.execute(_COUNT_SERIES).fetchone()

    def close(self) -> None:
        self._connection.close()

    # Batches.

    def write(self, points: Sequence[Point], lines: Sequence[Line]) -> Written:
        """All of it, or nothing and an error."""
        try:
            with database.transaction(self._connection):
                rows = self._many(_INSERT_POINT, list(self._point_rows(points)))
                rows += self._many(_INSERT_LINE, [self._line_row(line) for line in lines])
        except BaseException:
            self._forget()  # what was learnt on the way was rolled back
            raise
        return Written(rows=rows, ignored=len(points) + len(lines) - rows)

    def _many(self, statement: str, rows: Sequence[tuple[object, ...]]) -> int:
        return self._connection.executemany(statement, rows).rowcount if rows else 0

    def _point_rows(self, points: Sequence[Point]) -> Iterator[tuple[object, ...]]:
        for point in points:
            series = self._series(point)
            if series is None:
                continue
            if point.counter:
                if point.at_ns <= series.at_ns:
                    continue  # between which restarts it belongs can no longer be told
                if point.value < series.value:
                    series.base += series.value
            series.at_ns, series.value = max(point.at_ns, series.at_ns), point.value
            yield (series.id, point.at_ns, point.value, series.base)

    def _series(self, point: Point) -> _Series | None:
        """None if there are too many."""
        key = (point.scope, point.series, point.source)
        if (known := self._known.get(key)) is not None:
            return known
        found = self._connection.execute(_FIND_SERIES, key).fetchone()
        if found is not None:
            last = self._connection.execute(_LAST_POINT, found).fetchone()
            known = _Series(found[0], *(last or ()))
        elif self.series >= self._limits.series:
            return None
        else:
            made = self._connection.execute(_INSERT_SERIES, key).lastrowid
            assert made is not None
            self.series += 1
            known = _Series(made)
        self._known[key] = known
        return known

    def _line_row(self, line: Line) -> tuple[object, ...]:
        key = (line.scope, line.stream)
        channel = self._channels.get(key)
        if channel is None:
            self._connection.execute(_INSERT_CHANNEL, key)
            (channel,) = self._connection.execute(_FIND_CHANNEL, key).fetchone()
            self._channels[key] = channel
        return (
            channel, line.at_ns, _mark(line), line.code, line.source, line.subject, line.action, line.body
        )  # fmt: skip

    def _forget(self) -> None:
        self._known.clear()
        self._channels.clear()
        (self.series,) = self._connection.execute(_COUNT_SERIES).fetchone()

    # Retention.

    @property
    def used_bytes(self) -> int:
        """Of the file's pages, those in use: what is deleted is used again before the file grows."""
        (pages,) = self._connection.execute("PRAGMA page_count").fetchone()
        (free,) = self._connection.execute("PRAGMA freelist_count").fetchone()
        (size,) = self._connection.execute("PRAGMA page_size").fetchone()
        return int((pages - free) * size)

    def sweep(self, *, now_ns: int) -> Iterator[int]:
        """Delete what is too old, then what is too much; yields the rows of each slice.

        Between two slices others may write.
        """
        limits = self._limits
        yield from self._expire_lines(now_ns - round(limits.lines_age_seconds * NS_PER_SECOND))
        yield from self._expire_points(now_ns - round(limits.points_age_seconds * NS_PER_SECOND))
        yield from self._drop_empty_series()
        if self.used_bytes > limits.size_bytes:
            yield from self._make_room(now_ns, round(limits.size_bytes * ROOM))

    def _expire_lines(self, horizon_ns: int) -> Iterator[int]:
        channels = self._connection.execute("SELECT id FROM channels").fetchall()
        for (channel,) in channels:
            while rows := self._delete(_EXPIRE_LINES, (channel, horizon_ns, SLICE_ROWS)):
                yield rows

    def _expire_points(self, horizon_ns: int) -> Iterator[int]:
        after = -1
        while True:
            ids = self._connection.execute(_NEXT_SERIES, (after, SLICE_SERIES)).fetchall()
            if not ids:
                return
            with database.transaction(self._connection):
                rows = self._many(_EXPIRE_POINTS, [(series, horizon_ns) for (series,) in ids])
            after = ids[-1][0]
            yield rows

    def _drop_empty_series(self) -> Iterator[int]:
        if self._delete(_DROP_EMPTY_SERIES, ()):
            self._forget()
        yield 0

    def _make_room(self, now_ns: int, target_bytes: int) -> Iterator[int]:
        """Lines first, oldest first: there are far more of them, and numbers are asked for longer."""
        while self.used_bytes > target_bytes and (rows := self._delete(_OLDEST_LINES, (SLICE_ROWS,))):
            yield rows
        age_seconds = self._limits.points_age_seconds
        for _ in range(NARROWINGS):
            if self.used_bytes <= target_bytes:
                return
            age_seconds /= 2
            yield from self._expire_points(now_ns - round(age_seconds * NS_PER_SECOND))

    def _delete(self, statement: str, arguments: tuple[object, ...]) -> int:
        with database.transaction(self._connection):
            return self._connection.execute(statement, arguments).rowcount


def _mark(line: Line) -> int:
    digest = hashlib.blake2b(f"{line.source}\0{line.identity}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # what is left fits the database's integers
