"""How far a log has been read, across rotation, truncation and our own restarts. Pure.

A log is a row of segments: files that were rotated away, oldest first, and the one being written.
A segment is known by its inode and the first bytes in it, never by its name, since names move. Each
gets a generation of its own, so that a place in the log (generation, offset) is never named twice,
and a line that is sent again is recognised by whoever has it already.

Whoever keeps only a place in one file, such as a reader's cursor, recognises the file by its `mark`: a
digest, because a cursor must not show what the log says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

HEAD_BYTES: Final = 64
MARK_PATTERN: Final = "[0-9]{1,2}-[0-9a-f]{8}"
"""How many of the first bytes were there, and their digest."""


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    generation: int
    inode: int
    offset: int = 0
    """What lies before it has been dealt with."""
    head: str = ""
    """The first bytes, in hexadecimal."""


class SegmentPosition(msgspec.Struct, frozen=True, kw_only=True):
    epoch: str
    """Of this row of segments; a new one begins if the position was lost."""
    generation: int = 0
    """The last one given."""
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenFile:
    """A file as it is now."""

    inode: int
    size: int
    head: str

    def continues(self, segment: Segment) -> bool:
        """Whether this is the file of a segment, with all that was read of it."""
        return self._reaches(segment.inode, segment.offset) and self.head.startswith(segment.head)

    def continues_at(self, *, inode: int, offset: int, mark: str) -> bool:
        """Whether this is the file that a mark was taken of, with all that lies before an offset.

        An empty mark is that of a cursor made before there were marks, and fits any file.
        """
        count = int(mark.partition("-")[0] or 0)
        return self._reaches(inode, offset) and (not mark or self._mark(count) == mark)

    @property
    def mark(self) -> str:
        return self._mark(len(self.head) // 2)

    def _reaches(self, inode: int, offset: int) -> bool:
        return self.inode == inode and self.size >= offset

    def _mark(self, count: int) -> str:
        head = bytes.fromhex(self.head)[:count]
        return f"{len(head)}-{hashlib.blake2s(head, digest_size=4).hexdigest()}"


def observe(position: SegmentPosition, files: Sequence[SeenFile]) -> SegmentPosition:
    """The segments of the files that are there, oldest first: known ones go on, others begin."""
    generation = position.generation
    segments = []
    for file in files:
        known = next((one for one in position.segments if file.continues(one)), None)
        if known is None:
            generation += 1
            known = Segment(generation=generation, inode=file.inode)
        segments.append(msgspec.structs.replace(known, head=file.head))
    return msgspec.structs.replace(position, generation=generation, segments=tuple(segments))


def advance(position: SegmentPosition, generation: int, offset: int) -> SegmentPosition:
    return msgspec.structs.replace(
        position,
        segments=tuple(
            msgspec.structs.replace(one, offset=offset) if one.generation == generation else one
            for one in position.segments
        ),
    )


def unread(position: SegmentPosition, files: Sequence[SeenFile]) -> int:
    """Bytes that would be lost with these files."""
    known = observe(position, files)
    return sum(file.size - one.offset for file, one in zip(files, known.segments, strict=True))
