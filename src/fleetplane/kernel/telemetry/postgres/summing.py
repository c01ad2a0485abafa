"""Summaries of lines in PostgreSQL: exact, whichever servers write and fold at the same time.

Whoever adds to summaries holds how far their channel is folded (FOR SHARE), and whoever folds changes that:
a line is either part of a stretch before it is folded or goes to the wider ones as well. A summary that is
merged is held; one that another server made meanwhile is merged in another turn.
"""

# ruff: noqa: S608  # every part of a statement is a constant of this module
from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from fleetplane.kernel.telemetry.fair_queue import tenant_of
from fleetplane.kernel.telemetry.postgres.link import transaction
from fleetplane.kernel.telemetry.summaries import (
    GRACE_SECONDS,
    KEPT,
    OTHERS,
    SLICE_ROWS,
    SUBJECTS_LIMIT,
    WIDTHS,
    Folded,
    Key,
    Summarizer,
)
from fleetplane.kernel.values.times import NS

CHANNELS_AT_ONCE: Final = 20
"""Folded in one transaction."""
ROW_BYTES: Final = 150
"""About what a summary takes besides its body."""

_KEYS: Final = "unnest($1::int8[], $2::int4[], $3::int8[], $4::text[], $5::text[]"
_SAME: Final = (
    "s.channel = w.channel AND s.width = w.width AND s.at = w.at AND s.source = w.source"
    " AND s.subject = w.subject"
)
_HOLD: Final = (
    "SELECT s.channel, s.width, s.at, s.source, s.subject, s.body FROM telemetry_summaries s"
    f" JOIN {_KEYS}) AS w(channel, width, at, source, subject) ON {_SAME}"
    " ORDER BY s.channel, s.width, s.at, s.source, s.subject FOR UPDATE OF s"
)
_COUNT: Final = (
    "SELECT s.channel, s.width, s.at, s.source, count(*) FROM telemetry_summaries s"
    " JOIN unnest($1::int8[], $2::int4[], $3::int8[], $4::text[]) AS w(channel, width, at, source)"
    " ON s.channel = w.channel AND s.width = w.width AND s.at = w.at AND s.source = w.source"
    " GROUP BY s.channel, s.width, s.at, s.source"
)
_UPDATE: Final = (
    f"UPDATE telemetry_summaries s SET body = w.body FROM {_KEYS}, $6::bytea[])"
    f" AS w(channel, width, at, source, subject, body) WHERE {_SAME}"
)
_INSERT: Final = (
    f"INSERT INTO telemetry_summaries SELECT * FROM {_KEYS}, $6::bytea[]) ON CONFLICT DO NOTHING"
    " RETURNING channel, width, at, source, subject"
)
_FOLDED: Final = "SELECT channel, width, until, oldest FROM telemetry_folded WHERE channel = ANY($1::int8[])"
_HOLD_FOLDED: Final = f"{_FOLDED} ORDER BY channel, width FOR SHARE"
_FOLDING: Final = (
    "SELECT channel, until FROM telemetry_folded WHERE channel = ANY($1::int8[]) AND width = $2"
    " ORDER BY channel FOR UPDATE"
)
_NEXT: Final = (
    "SELECT w.channel, (SELECT min(s.at) FROM telemetry_summaries s WHERE s.channel = w.channel"
    " AND s.width = $4 AND s.at >= w.until AND s.at < w.over)"
    " FROM unnest($1::int8[], $2::int8[], $3::int8[]) AS w(channel, until, over)"
)
_STRETCHES: Final = (
    "SELECT s.channel, s.at, s.source, s.subject, s.body FROM telemetry_summaries s"
    " JOIN unnest($1::int8[], $2::int8[]) AS w(channel, at) ON s.channel = w.channel AND s.at = w.at"
    " WHERE s.width = $3"
)
_NOTE_FOLDED: Final = (
    "UPDATE telemetry_folded f SET until = w.until FROM unnest($1::int8[], $2::int8[]) AS w(channel, until)"
    " WHERE f.channel = w.channel AND f.width = $3"
)
_NOTE_OLDEST: Final = (
    "UPDATE telemetry_folded SET oldest = least($2, until) WHERE width = $1 AND oldest < least($2, until)"
    " AND channel = ANY($3::int8[])"
)
_DROP: Final = (
    "DELETE FROM telemetry_summaries WHERE ctid = ANY(ARRAY(SELECT s.ctid FROM telemetry_folded f"
    " JOIN telemetry_summaries s ON s.channel = f.channel AND s.width = f.width AND s.at < f.oldest"
    " WHERE f.width = $1 LIMIT $2))"
)
_EXPIRE: Final = (
    "DELETE FROM telemetry_summaries WHERE ctid = ANY(ARRAY(SELECT s.ctid FROM telemetry_summaries s"
    " WHERE s.channel = ANY($1::int8[]) AND s.at < $2 LIMIT $3))"
)
_SIZES: Final = (
    f"SELECT scope, channel, source, sum(pg_column_size(body) + {ROW_BYTES})::int8 FROM telemetry_summaries"
    " JOIN telemetry_channels c ON c.id = channel GROUP BY scope, channel, source"
)
_OLDEST: Final = (
    "DELETE FROM telemetry_summaries WHERE ctid = ANY(ARRAY(SELECT ctid FROM telemetry_summaries"
    f" WHERE channel = $1 AND source = $2 ORDER BY at LIMIT $3)) RETURNING pg_column_size(body) + {ROW_BYTES}"
)

InThread = Callable[[Callable[[], Mapping[Key, bytes]]], Awaitable[Mapping[Key, bytes]]]


async def hold_folded(
    connection: Any, channels: Collection[int], *, hold: bool = True
) -> Mapping[int, Mapping[int, Folded]]:
    """How far each channel is folded; with `hold`, until the transaction ends."""
    found: dict[int, dict[int, Folded]] = {
        channel: {width: Folded() for width in WIDTHS} for channel in channels
    }
    for channel, width, until, oldest in await connection.fetch(
        _HOLD_FOLDED if hold else _FOLDED, list(channels)
    ):
        found[channel][width] = Folded(until, oldest)
    return found


async def put(
    connection: Any,
    groups: Mapping[Key, Sequence[bytes]],
    summarizers: Mapping[int, Summarizer],
    in_thread: InThread,
) -> None:
    """Add to what is stored; inside a transaction. `summarizers` are those of channels."""
    while groups:
        before = {tuple(row)[:5]: row["body"] for row in await connection.fetch(_HOLD, *_columns(groups))}
        fitting, others = await _with_room(connection, groups, before)

        def merge(
            fitting: Mapping[Key, Sequence[bytes]] = fitting, before: Mapping[Any, bytes] = before
        ) -> Mapping[Key, bytes]:
            merged = {}
            for key, bodies in fitting.items():
                parts = [before[key], *bodies] if key in before else bodies
                merged[key] = parts[0] if len(parts) == 1 else summarizers[key[0]].merged(parts)
            return merged

        merged = await in_thread(merge)
        known = [key for key in sorted(merged) if key in before]
        if known:
            await connection.execute(_UPDATE, *_columns(known), [merged[key] for key in known])
        new = [key for key in sorted(merged) if key not in before]
        if new:
            rows = await connection.fetch(_INSERT, *_columns(new), [merged[key] for key in new])
            made = {tuple(row) for row in rows}
            # Another server was first with what is left: it is there now, and merged in the next turn.
            others.update({key: groups[key] for key in new if key not in made})
        groups = others


async def _with_room(
    connection: Any, groups: Mapping[Key, Sequence[bytes]], before: Mapping[Any, bytes]
) -> tuple[dict[Key, Sequence[bytes]], dict[Key, Sequence[bytes]]]:
    """What can be stored, and what is about too many subjects, under `OTHERS`."""
    stretches = sorted({key[:4] for key in groups if key not in before and key[4] != OTHERS})
    counts: dict[Any, int] = {}
    if stretches:
        columns = [[stretch[place] for stretch in stretches] for place in range(4)]
        counts = {tuple(row)[:4]: row["count"] for row in await connection.fetch(_COUNT, *columns)}
    fitting: dict[Key, Sequence[bytes]] = {}
    others: dict[Key, Sequence[bytes]] = {}
    for key, bodies in groups.items():
        stretch = key[:4]
        if key not in before and key[4] != OTHERS:
            if counts.get(stretch, 0) >= SUBJECTS_LIMIT:
                others[*stretch, OTHERS] = [*others.get((*stretch, OTHERS), ()), *bodies]
                continue
            counts[stretch] = counts.get(stretch, 0) + 1
        fitting[key] = bodies
    for key in others.keys() & fitting.keys():  # merged there, in the next turn
        others[key] = [*others[key], *fitting.pop(key)]
    return fitting, others


def _columns(keys: Collection[Key]) -> list[list[Any]]:
    return [[key[place] for key in keys] for place in range(5)]


async def fold(
    connection: Any,
    summarizers: Mapping[int, Summarizer],
    widths: tuple[int, int],
    now_seconds: int,
    in_thread: InThread,
) -> bool:
    """Make the next stretches that are over part of the wider ones; whether there were any."""
    width, wider = widths
    channels = sorted(summarizers)
    async with transaction(connection):
        finer = WIDTHS[WIDTHS.index(width) - 1] if width != WIDTHS[0] else None
        limits = await hold_folded(connection, channels, hold=False)
        held = await connection.fetch(_FOLDING, channels, width)
        over = {}
        for channel in channels:
            until = now_seconds - GRACE_SECONDS
            if finer is not None:  # what is part of it must be there first
                until = min(until, limits[channel][finer].until)
            over[channel] = until - until % width
        due = [(channel, until, over[channel]) for channel, until in held if until < over[channel]]
        if not due:
            return False
        starts = dict(
            tuple(row)
            for row in await connection.fetch(
                _NEXT, *[list(column) for column in zip(*due, strict=True)], width
            )
        )
        begun = {channel: at for channel, at in starts.items() if at is not None}
        groups: dict[Key, list[bytes]] = {}
        for channel, at, source, subject, body in await connection.fetch(
            _STRETCHES, list(begun), list(begun.values()), width
        ):
            groups.setdefault((channel, wider, at - at % wider, source, subject), []).append(body)
        await put(connection, groups, summarizers, in_thread)
        done = {channel: begun[channel] + width if channel in begun else over[channel] for channel in starts}
        await connection.execute(_NOTE_FOLDED, list(done), list(done.values()), width)
    return True


async def drop_folded(connection: Any, channels: Sequence[int], widths: tuple[int, int], now_ns: int) -> bool:
    """Delete some of what is asked about in wider stretches only; whether there may be more."""
    width, wider = widths
    horizon = now_ns // NS - KEPT[width]
    await connection.execute(_NOTE_OLDEST, width, horizon - horizon % wider, channels)
    return _count(await connection.execute(_DROP, width, SLICE_ROWS)) == SLICE_ROWS


async def expire(connection: Any, channels: Sequence[int], oldest_seconds: int) -> int:
    """Delete some of what is too old."""
    return _count(await connection.execute(_EXPIRE, channels, oldest_seconds, SLICE_ROWS))


async def sizes(connection: Any) -> dict[str, dict[tuple[int, str], int]]:
    """Bytes of summaries by tenant, and by channel and source."""
    tenants: dict[str, dict[tuple[int, str], int]] = {}
    for scope, channel, source, size in await connection.fetch(_SIZES):
        tenants.setdefault(tenant_of(scope), {})[channel, source] = size
    return tenants


async def shorten(connection: Any, theirs: dict[tuple[int, str], int]) -> int:
    """Delete the oldest summaries of a tenant's largest source; how many."""
    most = max(theirs, key=lambda one: theirs[one])
    gone = await connection.fetch(_OLDEST, *most, SLICE_ROWS)
    theirs[most] -= sum(row[0] for row in gone)
    if len(gone) < SLICE_ROWS:  # all that there was
        del theirs[most]
    return len(gone)


def steps() -> list[tuple[int, int]]:
    """Every width with the next wider one."""
    return list(pairwise(WIDTHS))


def _count(status: str) -> int:
    return int(status.rsplit(" ", 1)[-1])
