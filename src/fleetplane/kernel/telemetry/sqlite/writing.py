"""The writing half: batches in, old rows out. Used by one thread; knows no event loop.

Raises the database's errors as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path

from fleetplane.kernel.telemetry.engine import SeriesState, Written, marks
from fleetplane.kernel.telemetry.fair_queue import tenant_of
from fleetplane.kernel.telemetry.series_quota import EVICT_SHARE, Admission, Admissions, SeriesQuota
from fleetplane.kernel.telemetry.sqlite import database, summing
from fleetplane.kernel.telemetry.summaries import Summarizer
from fleetplane.kernel.telemetry.values import LogRecord, Point, TelemetryLimits
from fleetplane.kernel.values.times import NS

SLICE_ROWS = 10_000
"""Deleted at once: some tens of milliseconds, in which nothing is written."""
SLICE_SERIES = 500
ROOM = 0.95
"""Of the size to get down to when it was exceeded, so as not to delete at every turn."""
ROOM_ROWS = 1_000
"""Of lines deleted at once to make room, before it is asked again who has most."""
SUMMARIES_SHARE = 0.25
"""Of the size, that summaries of one tenant may take while there is not enough."""
POINT_BYTES = 40
"""About what a point takes in the file."""

_FIND_SERIES = "SELECT id FROM series WHERE scope = ? AND name = ? AND source = ?"
_INSERT_SERIES = "INSERT INTO series (scope, name, source) VALUES (?, ?, ?)"
_COUNT_SERIES = "SELECT scope, source, count(*) FROM series GROUP BY scope, source"
_NEXT_SERIES = "SELECT id, scope, source FROM series WHERE id > ? ORDER BY id LIMIT ?"
_SERIES_OF = "SELECT id, name FROM series WHERE scope = ? AND source = ?"
_LAST_OF = "SELECT coalesce(max(at_ns), 0) FROM points WHERE series = ?"
_FIRST_OF = "SELECT coalesce(min(at_ns), 0) FROM points WHERE series = ?"
_DROP_SERIES = "DELETE FROM series WHERE id = ?"
_DROP_POINTS = "DELETE FROM points WHERE series = ?"
_ADD_SHARE = (
    "INSERT INTO shares VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE"
    " SET rows = max(0, rows + excluded.rows), bytes = max(0, bytes + excluded.bytes)"
)
_ALL_SHARES = "SELECT scope, channel, source, rows, bytes FROM shares WHERE rows > 0"
_DROP_SHARES = "DELETE FROM shares WHERE rows = 0"
_NO_SHARE = "UPDATE shares SET rows = 0, bytes = 0 WHERE scope = ? AND channel = ? AND source = ?"
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
_EXPIRE_LINES = (
    "DELETE FROM lines WHERE id IN (SELECT id FROM lines WHERE channel = ? AND at_ns < ? LIMIT ?)"
    " RETURNING source, length(body)"
)
_OLDEST_LINES = (
    "DELETE FROM lines WHERE id IN"
    " (SELECT id FROM lines WHERE channel = ? AND source = ? ORDER BY at_ns LIMIT ?)"
    " RETURNING source, length(body)"
)


_SENDER = attrgetter("scope", "stream", "source")
_LineRow = tuple[int, int, int, int, str, str, str, bytes]


class SqliteSeriesWriter:
    def __init__(self, path: Path, limits: TelemetryLimits) -> None:
        self._limits = limits
        self._connection = database.connect(path, for_writing=True)
        self.summarizers: dict[str, Summarizer] = {}
        """By stream."""
        self._known: dict[tuple[str, str, str], SeriesState] = {}
        self._channels: dict[tuple[str, str], int] = {}
        self._quota = self._counted()
        self._shares: Counter[tuple[str, int, str]] = Counter()
        """Rows of this batch, and their bytes, that are not in the table of shares yet."""
        self._share_bytes: Counter[tuple[str, int, str]] = Counter()
        self._over_quota = self._evicted = 0
        self._admissions = Admissions(self._quota)

    @property
    def series(self) -> int:
        return self._quota.total

    def _counted(self) -> SeriesQuota:
        quota = SeriesQuota(self._limits)
        for scope, source, number in self._connection.execute(_COUNT_SERIES):
            quota.count(scope, source, number)
        return quota

    def close(self) -> None:
        self._connection.close()

    # Batches.

    def write(self, points: Sequence[Point], lines: Sequence[LogRecord]) -> Written:
        """All of it, or nothing and an error."""
        self._over_quota = self._evicted = 0
        self._admissions = Admissions(self._quota)
        try:
            with database.transaction(self._connection):
                rows = self._many(_INSERT_POINT, list(self._point_rows(points)))
                rows += self._write_lines(lines)
                self._note_shares()
        except BaseException:
            self._forget()  # what was learnt on the way was rolled back
            raise
        return Written(
            rows=rows,
            ignored=len(points) + len(lines) - rows - self._over_quota,
            over_quota=self._over_quota,
            evicted=self._evicted,
            notices=self._admissions.notices,
        )

    def _write_lines(self, lines: Sequence[LogRecord]) -> int:
        by_source: dict[tuple[str, str, str], list[LogRecord]] = {}
        for key, some in groupby(lines, _SENDER):  # they lie together already, a few of each
            by_source.setdefault(key, []).extend(some)
        rows: list[tuple[_LineRow, LogRecord]] = []
        for (scope, stream, source), theirs in by_source.items():
            channel = self._channel(scope, stream)
            rows += zip(_line_rows(channel, source, theirs), theirs, strict=True)
            self._shares[scope, channel, source] += len(theirs)
            self._share_bytes[scope, channel, source] += sum([len(line.body) for line in theirs])
        rows.sort(key=itemgetter(0))  # in the order of the index, each page of which is then touched once
        again = self._insert_lines(rows)
        for (scope, stream, source), theirs in by_source.items():
            if (summarizer := self.summarizers.get(stream)) is not None:
                channels = {kind: self._channel(scope, kind) for kind in summarizer.kinds}
                fresh = [line for line in theirs if id(line) not in again] if again else theirs
                summing.sum_up(self._connection, summarizer, channels, source, fresh)
        return len(rows) - len(again)

    def _insert_lines(self, rows: Sequence[tuple[_LineRow, LogRecord]]) -> AbstractSet[int]:
        """The ids of those that were there before: nearly always none, which is found out at once."""
        if not rows:
            return set()
        self._connection.execute("SAVEPOINT many")
        if self._many(_INSERT_LINE, [row for row, _ in rows]) == len(rows):
            self._connection.execute("RELEASE many")
            return set()
        self._connection.execute("ROLLBACK TO many")
        self._connection.execute("RELEASE many")
        insert = self._connection.execute
        return {id(line) for row, line in rows if not insert(_INSERT_LINE, row).rowcount}

    def _channel(self, scope: str, stream: str) -> int:
        key = (scope, stream)
        if (channel := self._channels.get(key)) is None:
            self._connection.execute(_INSERT_CHANNEL, key)
            (channel,) = self._connection.execute(_FIND_CHANNEL, key).fetchone()
            self._channels[key] = channel
        return channel

    def _note_shares(self) -> None:
        changed = self._shares.keys() | self._share_bytes.keys()
        rows = [(*key, self._shares[key], self._share_bytes[key]) for key in changed]
        self._shares.clear()
        self._share_bytes.clear()
        self._many(_ADD_SHARE, rows)

    def _many(self, statement: str, rows: Sequence[tuple[object, ...]]) -> int:
        return self._connection.executemany(statement, rows).rowcount if rows else 0

    def _point_rows(self, points: Sequence[Point]) -> Iterator[tuple[object, ...]]:
        for point in points:
            series = self._series(point)
            if series is None:
                self._over_quota += 1
                continue
            if (row := series.take(point)) is not None:
                self._shares[(point.scope, 0, point.source)] += 1
                yield row

    def _series(self, point: Point) -> SeriesState | None:
        """None if there are too many."""
        key = (point.scope, point.series, point.source)
        if (known := self._known.get(key)) is not None:
            return known
        found = self._connection.execute(_FIND_SERIES, key).fetchone()
        if found is not None:
            last = self._connection.execute(_LAST_POINT, found).fetchone()
            known = SeriesState(found[0], *(last or ()))
        elif not self._admits(point.scope, point.source):
            return None
        else:
            made = self._connection.execute(_INSERT_SERIES, key).lastrowid
            assert made is not None
            self._quota.count(point.scope, point.source)
            known = SeriesState(made)
        self._known[key] = known
        return known

    def _admits(self, scope: str, source: str) -> bool:
        """Whether there is room for another series of a source, if need be by making some."""
        found = self._admissions.admit(scope, source)
        if found is Admission.EVICT:
            self._evict(*self._admissions.quota.largest())
        return found in (Admission.YES, Admission.EVICT)

    def _evict(self, scope: str, source: str) -> None:
        """Drop the stalest series of a source that has more than others."""
        theirs = self._connection.execute(_SERIES_OF, (scope, source)).fetchall()
        aged = sorted(
            (self._connection.execute(_LAST_OF, (number,)).fetchone()[0], number, name)
            for number, name in theirs
        )
        for _, number, name in aged[: max(1, int(len(aged) * EVICT_SHARE))]:
            self._shares[(scope, 0, source)] -= self._connection.execute(_DROP_POINTS, (number,)).rowcount
            self._connection.execute(_DROP_SERIES, (number,))
            self._known.pop((scope, name, source), None)
            self._quota.count(scope, source, -1)
            self._evicted += 1
        self._admissions.evicted(scope, source, before=len(theirs))

    def _forget(self) -> None:
        self._known.clear()
        self._channels.clear()
        self._shares.clear()
        self._share_bytes.clear()
        self._quota = self._counted()

    # Retention.

    @property
    def used_bytes(self) -> int:
        """Bytes of the file's used pages: deleted pages are reused before the file grows."""
        (pages,) = self._connection.execute("PRAGMA page_count").fetchone()
        (free,) = self._connection.execute("PRAGMA freelist_count").fetchone()
        (size,) = self._connection.execute("PRAGMA page_size").fetchone()
        return int((pages - free) * size)

    def sweep(self, *, now_ns: int) -> Iterator[int]:
        """Delete what is too old, then what is too much; yields the rows of each slice.

        Between two slices others may write.
        """
        limits = self._limits
        yield from self._expire_lines(now_ns - round(limits.lines_age_seconds * NS))
        yield from self._expire_points(now_ns - round(limits.points_age_seconds * NS))
        oldest_ns = now_ns - round(limits.points_age_seconds * NS)
        yield from summing.age(
            self._connection, self.summarizers.values(), now_ns=now_ns, oldest_ns=oldest_ns
        )
        yield from self._drop_empty_series()
        self._delete(_DROP_SHARES, ())
        if self.used_bytes > limits.size_bytes:
            yield from self._make_room(round(limits.size_bytes * ROOM))

    def _expire_lines(self, horizon_ns: int) -> Iterator[int]:
        channels = self._connection.execute("SELECT id, scope FROM channels").fetchall()
        for channel, scope in channels:
            while rows := self._delete_lines(
                _EXPIRE_LINES, (channel, horizon_ns, SLICE_ROWS), scope=scope, channel=channel
            ):
                yield rows

    def _delete_lines(
        self, statement: str, arguments: tuple[object, ...], *, scope: str, channel: int
    ) -> int:
        with database.transaction(self._connection):
            gone = self._connection.execute(statement, arguments).fetchall()
            for source, size in gone:
                self._shares[(scope, channel, source)] -= 1
                self._share_bytes[(scope, channel, source)] -= size
            self._note_shares()
        return len(gone)

    def _expire_points(self, horizon_ns: int) -> Iterator[int]:
        after = -1
        while True:
            ids = self._connection.execute(_NEXT_SERIES, (after, SLICE_SERIES)).fetchall()
            if not ids:
                return
            yield self._expire_points_of(ids, horizon_ns)
            after = ids[-1][0]

    def _expire_points_of(self, series: Sequence[tuple[int, str, str]], horizon_ns: int) -> int:
        total = 0
        with database.transaction(self._connection):
            for number, scope, source in series:
                rows = self._connection.execute(_EXPIRE_POINTS, (number, horizon_ns)).rowcount
                if rows:
                    self._shares[(scope, 0, source)] -= rows
                    total += rows
            self._note_shares()
        return total

    def _drop_empty_series(self) -> Iterator[int]:
        if self._delete(_DROP_EMPTY_SERIES, ()):
            self._forget()
        yield 0

    def _make_room(self, target_bytes: int) -> Iterator[int]:
        """Delete the oldest entries of the largest sources until enough is free: lines before points.

        There are far more lines, and numbers are asked for longer. Summaries are small and asked for longest:
        they go only where a tenant has made up too many.
        """
        tenant_bytes = round(self._limits.size_bytes * SUMMARIES_SHARE)
        yield from summing.shorten(self._connection, tenant_bytes=tenant_bytes)
        while self.used_bytes > target_bytes and (victim := self._largest(lines=True)) is not None:
            scope, channel, source = victim
            rows = self._delete_lines(
                _OLDEST_LINES, (channel, source, ROOM_ROWS), scope=scope, channel=channel
            )
            if not rows:  # what was sent twice was counted twice
                self._delete(_NO_SHARE, victim)
            yield rows
        while self.used_bytes > target_bytes and (victim := self._largest(lines=False)) is not None:
            scope, _, source = victim
            rows = self._shorten(scope, source)
            if not rows:
                self._delete(_NO_SHARE, victim)
            yield rows

    def _largest(self, *, lines: bool) -> tuple[str, int, str] | None:
        """The source that takes most, of the tenant that takes most."""
        sizes = {
            (scope, channel, source): size + rows * POINT_BYTES
            for scope, channel, source, rows, size in self._connection.execute(_ALL_SHARES)
            if bool(channel) is lines
        }
        if not sizes:
            return None
        tenants: Counter[str] = Counter()
        for (scope, _, _), size in sizes.items():
            tenants[tenant_of(scope)] += size
        largest = tenants.most_common(1)[0][0]
        return max((key for key in sizes if tenant_of(key[0]) == largest), key=lambda key: sizes[key])

    def _shorten(self, scope: str, source: str) -> int:
        """Delete the older half of what a source has measured."""
        series = [
            (number, scope, source)
            for number, _ in self._connection.execute(_SERIES_OF, (scope, source)).fetchall()
        ]
        firsts = [self._connection.execute(_FIRST_OF, (number,)).fetchone()[0] for number, _, _ in series]
        lasts = [self._connection.execute(_LAST_OF, (number,)).fetchone()[0] for number, _, _ in series]
        first = min((at_ns for at_ns in firsts if at_ns), default=0)
        last = max(lasts, default=0)
        return self._expire_points_of(series, (first + last) // 2 + 1) if last else 0

    def _delete(self, statement: str, arguments: tuple[object, ...]) -> int:
        with database.transaction(self._connection):
            return self._connection.execute(statement, arguments).rowcount


def _line_rows(channel: int, source: str, lines: Sequence[LogRecord]) -> Iterator[_LineRow]:
    """As they lie in the table."""
    for line, mark in zip(lines, marks(source, lines), strict=True):
        yield channel, line.at_ns, mark, line.code, source, line.subject, line.action, line.body
