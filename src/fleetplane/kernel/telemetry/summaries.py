"""Lines summed up, so that they can be asked about long after they are gone.

A summary holds what the lines of one source about one subject came to in one stretch of time; lines may be
summed up by several kinds of subjects, each of which has a channel of its own. It is written
in the transaction of its lines, and a line that is sent twice counts once, so that counts are exact.
Every stretch becomes part of the next wider one as soon as it is over, and is deleted when nobody asks about
it that finely any more: a question about a month reads its days, whatever is kept beside them. What a summary
says is the summarizer's.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

from fleetplane.kernel.telemetry import database
from fleetplane.kernel.telemetry.fair_queue import tenant_of
from fleetplane.kernel.telemetry.values import Line
from fleetplane.kernel.values.times import NS

HOUR: Final = 3600
DAY: Final = 24 * HOUR
WIDTHS: Final = (60, HOUR, DAY)
"""Seconds of a stretch, from the finest on."""
KEPT: Final = {60: HOUR, HOUR: 2 * DAY}
"""Seconds after which stretches are there in the next wider one only: of one subject and source there are
about 120 minutes, 72 hours and 35 days at most."""
GRACE_SECONDS: Final = 60
"""After the end of a stretch, before it is folded: agents send what they have every second."""
SLICE_ROWS: Final = 2_000
"""Deleted at once: some tens of milliseconds."""
SUBJECT_LIMIT: Final = 200
"""Characters."""
SUBJECTS_LIMIT: Final = 1_000
"""Of one source in one stretch, twice what a workspace may have: subjects are the source's own word. What is
about further ones is summed up under `OTHERS`, so that no source takes the room of all."""
OTHERS: Final = ""
_FINEST_NS: Final = WIDTHS[0] * NS

_FIND: Final = (
    "SELECT body FROM summaries WHERE channel = ? AND width = ? AND at = ? AND source = ? AND subject = ?"
)
_COUNT: Final = "SELECT count(*) FROM summaries WHERE channel = ? AND width = ? AND at = ? AND source = ?"
_PUT: Final = "INSERT OR REPLACE INTO summaries VALUES (?, ?, ?, ?, ?, ?)"
_FOLDED: Final = "SELECT width, until, oldest FROM folded WHERE channel = ?"
_NOTE_FOLDED: Final = (
    "INSERT INTO folded VALUES (?, ?, ?, 0) ON CONFLICT DO UPDATE SET until = excluded.until"
)
_NOTE_OLDEST: Final = "UPDATE folded SET oldest = ? WHERE channel = ? AND width = ?"
_NEXT: Final = "SELECT min(at) FROM summaries WHERE channel = ? AND width = ? AND at >= ? AND at < ?"
_STRETCH: Final = "SELECT source, subject, body FROM summaries WHERE channel = ? AND width = ? AND at = ?"
_DROP: Final = (
    "DELETE FROM summaries WHERE (channel, width, at, source, subject) IN"
    " (SELECT channel, width, at, source, subject FROM summaries"
    " WHERE channel = ? AND width = ? AND at < ? LIMIT ?)"
)
_EXPIRE: Final = "DELETE FROM summaries WHERE channel = ? AND at < ?"
_SIZES: Final = (
    "SELECT scope, channel, source, sum(length(body) + CASE WHEN length(body) > 800 THEN 4096 ELSE 100 END)"
    " FROM summaries JOIN channels ON channels.id = summaries.channel GROUP BY channel, source"
)
"""About what they take in the file: a body of more than a fifth of a page has pages of its own."""
_OLDEST: Final = (
    "DELETE FROM summaries WHERE (channel, width, at, source, subject) IN"
    " (SELECT channel, width, at, source, subject FROM summaries"
    " WHERE channel = ? AND source = ? ORDER BY at LIMIT ?)"
    " RETURNING length(body) + CASE WHEN length(body) > 800 THEN 4096 ELSE 100 END"
)
_CHANNELS: Final = "SELECT id, stream FROM channels"
_CHANNEL: Final = "SELECT id FROM channels WHERE scope = ? AND stream = ?"
_READ: Final = (
    "SELECT at, source, subject, body FROM summaries"
    " WHERE channel = ? AND width = ? AND at >= ? AND at < ? ORDER BY at"
)

_Key = tuple[int, int, int, str, str]
"""Channel, width, beginning, source and subject."""


class Summarizer(Protocol):
    """What the lines of a stream come to. Pure; called by the thread that writes."""

    @property
    def stream(self) -> str: ...

    @property
    def kinds(self) -> Sequence[str]:
        """Of summaries: the stream's own name, and what else its lines are summed up by."""

    def digest(self, lines: Sequence[Line]) -> Mapping[tuple[str, str], bytes]:
        """Summaries of lines of one source in one stretch, by kind and subject."""

    def merged(self, bodies: Sequence[bytes]) -> bytes:
        """Several summaries as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSummary:
    width_seconds: int
    at_seconds: int
    """Where its stretch begins."""
    source: str
    subject: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Folded:
    """Which stretches of one width are part of the next wider one."""

    until: int = 0
    """All that begin before this second are."""
    oldest: int = 0
    """And those before this one are there no longer."""


def sum_up(
    connection: sqlite3.Connection,
    summarizer: Summarizer,
    channels: Mapping[str, int],
    source: str,
    lines: Sequence[Line],
) -> None:
    """Add new lines of a source to their summaries. Inside the transaction that wrote them.

    `channels` are those of the summarizer's kinds.
    """
    stretches: dict[int, list[Line]] = {}
    for line in lines:
        stretches.setdefault(line.at_ns // _FINEST_NS, []).append(line)
    folded = {kind: _folded(connection, channel) for kind, channel in channels.items()}
    groups: dict[_Key, list[bytes]] = {}
    for stretch, some in stretches.items():
        for (kind, subject), body in summarizer.digest(some).items():
            for width, at in _homes(stretch * WIDTHS[0], folded[kind]):
                key = (channels[kind], width, at, source, subject[:SUBJECT_LIMIT])
                groups.setdefault(key, []).append(body)
    _put(connection, summarizer, groups)


def _homes(at: int, folded: Mapping[int, Folded]) -> Iterator[tuple[int, int]]:
    """Width and beginning of every stretch that new lines belong to: late ones to wider ones as well."""
    yield WIDTHS[0], at
    for width, wider in pairwise(WIDTHS):
        if at - at % width >= folded[width].until:
            return
        yield wider, at - at % wider


def _folded(connection: sqlite3.Connection, channel: int) -> Mapping[int, Folded]:
    known = {width: Folded(*rest) for width, *rest in connection.execute(_FOLDED, (channel,))}
    return {width: known.get(width, Folded()) for width in WIDTHS}


def _put(connection: sqlite3.Connection, summarizer: Summarizer, groups: Mapping[_Key, list[bytes]]) -> None:
    for key, bodies, before in _with_room(connection, groups):
        parts = bodies if before is None else [before, *bodies]
        connection.execute(_PUT, (*key, parts[0] if len(parts) == 1 else summarizer.merged(parts)))


def _with_room(
    connection: sqlite3.Connection, groups: Mapping[_Key, list[bytes]]
) -> Iterator[tuple[_Key, list[bytes], bytes | None]]:
    """What belongs together, with what is stored of it; what is about too many subjects under `OTHERS`."""
    counts: dict[tuple[int, int, int, str], int] = {}
    others: dict[_Key, list[bytes]] = {}
    for key, many in groups.items():
        before = connection.execute(_FIND, key).fetchone()
        stretch = key[:4]
        if before is None and key[4] != OTHERS:
            if stretch not in counts:
                counts[stretch] = connection.execute(_COUNT, stretch).fetchone()[0]
            if counts[stretch] >= SUBJECTS_LIMIT:
                others.setdefault((*stretch, OTHERS), []).extend(many)
                continue
            counts[stretch] += 1
        yield key, many, before[0] if before else None
    for key, many in others.items():
        before = connection.execute(_FIND, key).fetchone()
        yield key, many, before[0] if before else None


def age(
    connection: sqlite3.Connection,
    summarizers: Collection[Summarizer],
    *,
    now_ns: int,
    oldest_ns: int,
) -> Iterator[int]:
    """Make old stretches wider, and delete the oldest; yields the rows that were deleted for their age.

    Between two slices others may write.
    """
    by_kind = {kind: one for one in summarizers for kind in one.kinds}
    for channel, kind in connection.execute(_CHANNELS).fetchall():
        if (summarizer := by_kind.get(kind)) is None:
            continue
        for width, wider in pairwise(WIDTHS):
            over = now_ns // NS - GRACE_SECONDS
            if width != WIDTHS[0]:  # what is part of it must be there first
                over = min(over, _folded(connection, channel)[WIDTHS[WIDTHS.index(width) - 1]].until)
            while _fold(connection, summarizer, channel, (width, wider), over - over % width):
                yield 0
            horizon = now_ns // NS - KEPT[width]
            while _drop(connection, channel, width, horizon - horizon % wider):
                yield 0
        with database.transaction(connection):
            rows = connection.execute(_EXPIRE, (channel, oldest_ns // NS)).rowcount
        yield rows


def _fold(
    connection: sqlite3.Connection,
    summarizer: Summarizer,
    channel: int,
    widths: tuple[int, int],
    over: int,
) -> bool:
    """Make the next stretch that is over part of the wider one; False if there is none."""
    width, wider = widths
    with database.transaction(connection):
        until = _folded(connection, channel)[width].until
        if until >= over:
            return False
        (at,) = connection.execute(_NEXT, (channel, width, until, over)).fetchone()
        if at is not None:
            groups: dict[_Key, list[bytes]] = {}
            for source, subject, body in connection.execute(_STRETCH, (channel, width, at)).fetchall():
                groups.setdefault((channel, wider, at - at % wider, source, subject), []).append(body)
            _put(connection, summarizer, groups)
        connection.execute(_NOTE_FOLDED, (channel, width, over if at is None else at + width))
    return True


def _drop(connection: sqlite3.Connection, channel: int, width: int, horizon: int) -> int:
    """Delete some of what is asked about in wider stretches only."""
    with database.transaction(connection):
        connection.execute(_NOTE_OLDEST, (horizon, channel, width))
        return connection.execute(_DROP, (channel, width, horizon, SLICE_ROWS)).rowcount


def shorten(connection: sqlite3.Connection, *, tenant_bytes: int) -> Iterator[int]:
    """Delete the oldest summaries of tenants that have more than so many bytes; yields rows of each slice.

    For when the file is full: subjects and moments are the sources' own word, and what one tenant's agents
    make up must not cost the others their lines. Between two slices others may write.
    """
    tenants: dict[str, dict[tuple[int, str], int]] = {}
    for scope, channel, source, size in connection.execute(_SIZES).fetchall():
        tenants.setdefault(tenant_of(scope), {})[channel, source] = size
    for theirs in tenants.values():
        while theirs and sum(theirs.values()) > tenant_bytes:
            most = max(theirs, key=lambda one: theirs[one])
            with database.transaction(connection):
                gone = connection.execute(_OLDEST, (*most, SLICE_ROWS)).fetchall()
            theirs[most] -= sum(size for (size,) in gone)
            if len(gone) < SLICE_ROWS:  # all that there was
                del theirs[most]
            yield len(gone)


def found(
    connection: sqlite3.Connection,
    scope: str,
    stream: str,
    *,
    from_ns: int,
    to_ns: int,
    step_seconds: int = 0,
) -> list[FoundSummary]:
    """Summaries of the time between two moments, each line in one of them.

    Stretches are as wide as can be, up to `step_seconds`; wider where finer ones are gone. One that is gone
    counts where it begins.
    """
    channel = connection.execute(_CHANNEL, (scope, stream)).fetchone()
    if channel is None:
        return []
    folded = _folded(connection, channel[0])
    parts = cover(from_ns // NS, -(-to_ns // NS), folded, step_seconds=step_seconds)
    return [
        FoundSummary(width_seconds=width, at_seconds=at, source=source, subject=subject, body=body)
        for width, start, stop in parts
        for at, source, subject, body in connection.execute(_READ, (channel[0], width, start, stop))
    ]


def cover(
    start: int, stop: int, folded: Mapping[int, Folded], *, step_seconds: int, level: int = len(WIDTHS) - 1
) -> list[tuple[int, int, int]]:
    """Width, first and last beginning of the stretches that cover a time, every second of it once."""
    width = WIDTHS[level]
    if start >= stop:
        return []
    if level == 0:
        return [(width, start - start % width, stop)]
    finer = WIDTHS[level - 1]
    part = folded[finer]
    gone = part.oldest
    begin, end = start - start % width, stop - stop % width
    if width > step_seconds:  # only for what is not there any finer
        end = min(gone, end + width if stop % width else end)
    else:
        if start % width and start - start % finer >= gone:
            begin += width
        if part.until <= stop:
            end = part.until
        elif stop % width and end < gone:
            end += width
    if begin >= end:
        return cover(start, stop, folded, step_seconds=step_seconds, level=level - 1)
    return [
        *cover(start, begin, folded, step_seconds=step_seconds, level=level - 1),
        (width, begin, end),
        *cover(end, stop, folded, step_seconds=step_seconds, level=level - 1),
    ]
