"""Summaries in the file: written in the transaction of their lines, made wider, deleted."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final

from fleetplane.kernel.telemetry.fair_queue import tenant_of
from fleetplane.kernel.telemetry.sqlite import database
from fleetplane.kernel.telemetry.summaries import (
    GRACE_SECONDS,
    KEPT,
    OTHERS,
    SLICE_ROWS,
    SUBJECTS_LIMIT,
    WIDTHS,
    Folded,
    FoundSummary,
    Key,
    Summarizer,
    cover,
    digested,
)
from fleetplane.kernel.telemetry.values import LogRecord
from fleetplane.kernel.values.times import NS

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


def sum_up(
    connection: sqlite3.Connection,
    summarizer: Summarizer,
    channels: Mapping[str, int],
    source: str,
    lines: Sequence[LogRecord],
) -> None:
    """Add new lines of a source to their summaries. Inside the transaction that wrote them.

    `channels` are those of the summarizer's kinds.
    """
    folded = {channel: _folded(connection, channel) for channel in channels.values()}
    _put(connection, summarizer, digested(summarizer, channels, folded, source, lines))


def _folded(connection: sqlite3.Connection, channel: int) -> Mapping[int, Folded]:
    known = {width: Folded(*rest) for width, *rest in connection.execute(_FOLDED, (channel,))}
    return {width: known.get(width, Folded()) for width in WIDTHS}


def _put(connection: sqlite3.Connection, summarizer: Summarizer, groups: Mapping[Key, list[bytes]]) -> None:
    for key, bodies, before in _with_room(connection, groups):
        parts = bodies if before is None else [before, *bodies]
        connection.execute(_PUT, (*key, parts[0] if len(parts) == 1 else summarizer.merged(parts)))


def _with_room(
    connection: sqlite3.Connection, groups: Mapping[Key, list[bytes]]
) -> Iterator[tuple[Key, list[bytes], bytes | None]]:
    """What belongs together, with what is stored of it; what is about too many subjects under `OTHERS`."""
    counts: dict[tuple[int, int, int, str], int] = {}
    others: dict[Key, list[bytes]] = {}
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
            groups: dict[Key, list[bytes]] = {}
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
