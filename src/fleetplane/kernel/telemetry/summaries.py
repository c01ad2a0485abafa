"""Lines summed up, so that they can be asked about long after they are gone.

A summary holds what the lines of one source about one subject came to in one stretch of time; lines may be
summed up by several kinds of subjects, each of which has a channel of its own. It is written
in the transaction of its lines, and a line that is sent twice counts once, so that counts are exact.
Every stretch becomes part of the next wider one as soon as it is over, and is deleted when nobody asks about
it that finely any more: a question about a month reads its days, whatever is kept beside them. What a summary
says is the summarizer's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

from fleetplane.kernel.telemetry.values import LogRecord
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
FINEST_NS: Final = WIDTHS[0] * NS

Key = tuple[int, int, int, str, str]
"""Channel, width, beginning, source and subject."""


class Summarizer(Protocol):
    """What the lines of a stream come to. Pure; called by the thread that writes."""

    @property
    def stream(self) -> str: ...

    @property
    def kinds(self) -> Sequence[str]:
        """Of summaries: the stream's own name, and what else its lines are summed up by."""

    def digest(self, lines: Sequence[LogRecord]) -> Mapping[tuple[str, str], bytes]:
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


def digested(
    summarizer: Summarizer,
    channels: Mapping[str, int],
    folded: Mapping[int, Mapping[int, Folded]],
    source: str,
    lines: Sequence[LogRecord],
) -> dict[Key, list[bytes]]:
    """Summaries of new lines of a source, by where they belong.

    `channels` are those of the summarizer's kinds, and `folded` says how far each of them is folded.
    """
    stretches: dict[int, list[LogRecord]] = {}
    for line in lines:
        stretches.setdefault(line.at_ns // FINEST_NS, []).append(line)
    groups: dict[Key, list[bytes]] = {}
    for stretch, some in stretches.items():
        for (kind, subject), body in summarizer.digest(some).items():
            channel = channels[kind]
            for width, at in homes(stretch * WIDTHS[0], folded[channel]):
                key = (channel, width, at, source, subject[:SUBJECT_LIMIT])
                groups.setdefault(key, []).append(body)
    return groups


def homes(at: int, folded: Mapping[int, Folded]) -> Iterator[tuple[int, int]]:
    """Width and beginning of every stretch that new lines belong to: late ones to wider ones as well."""
    yield WIDTHS[0], at
    for width, wider in pairwise(WIDTHS):
        if at - at % width >= folded[width].until:
            return
        yield wider, at - at % wider


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
