"""Reads a log in batches and forgets nothing: not at a rotation, not at a restart. Blocking.

The log's own files are the buffer. What has been read counts only once it is committed, and
what is not committed is read again; so a server that is slow or away costs disk and no memory. Beyond
a bound the oldest file goes, read or not, and the loss is counted.

A log is a row of segments: files that were rotated away, oldest first, and the one being written.
A segment is known by its inode and the first bytes in it, never by its name, since names move. Each
gets a generation of its own, so that a place in the log (generation, offset) is never named twice,
and a line that is sent again is recognised by its receiver. A reader's cursor recognises its file by a
digest (`mark`), because a cursor must not show what the log says.

Only an ordinary file with one name is opened: a symbolic or hard link could send another file to the server.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

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


class NotALog(OSError):
    """What lies under a log's name is something else."""


def open_log(path: Path, *, other_names: bool = False) -> BinaryIO:
    """Open a log for reading; FileNotFoundError if there is none, `NotALog` if something else is there.

    `other_names` permits hard links, for logs in folders that only their owner writes to.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NotALog(error.errno, "is a link or no file", str(path)) from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or (status.st_nlink > 1 and not other_names):
        os.close(descriptor)
        raise NotALog(errno.EPERM, "is no ordinary file with one name", str(path))
    return os.fdopen(descriptor, "rb")


def look(file: BinaryIO) -> SeenFile:
    """What an open log can be recognised by. Moves the file's position."""
    status = os.fstat(file.fileno())
    file.seek(0)
    return SeenFile(inode=status.st_ino, size=status.st_size, head=file.read(HEAD_BYTES).hex())


BATCH_LINES: Final = 500
BATCH_BYTES: Final = 1024 * 1024
LINE_LIMIT_BYTES: Final = 64 * 1024
ROTATE_BYTES: Final = 100 * 1024 * 1024
ROTATED_KEPT: Final = 3
LATE_SECONDS: Final = 60.0
"""A worker that has not reopened its log yet still writes into the old file; it is watched this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailedLine:
    place: str
    """Unique to this line, and the same whenever it is read."""
    text: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LineBatch:
    lines: tuple[TailedLine, ...]
    after: SegmentPosition

    @property
    def full(self) -> bool:
        return len(self.lines) >= BATCH_LINES


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """What is on disk. One file, so that what was counted and what was read never disagree."""

    position: SegmentPosition
    note: str = ""


class FileTail:
    def __init__(
        self,
        log: Path,
        position_file: Path,
        *,
        epoch: str,
        rotate_bytes: int = ROTATE_BYTES,
        late_seconds: float = LATE_SECONDS,
    ) -> None:
        self._log = log
        self._position_file = position_file
        self._rotate_bytes = rotate_bytes
        self._late_seconds = late_seconds
        stored = self._read_stored(epoch)
        self._position = stored.position
        self.note = stored.note
        """Whatever was to be remembered together with the last commit."""
        self.lost_bytes = 0
        self.oversize_lines = 0
        self.refused: tuple[str, ...] = ()
        """Files under the log's names that are none, at the last look."""

    def __repr__(self) -> str:
        return f"<Tail {self._log.name} segments={len(self._position.segments)} lost={self.lost_bytes}>"

    def _read_stored(self, epoch: str) -> Stored:
        try:
            return msgspec.json.decode(self._position_file.read_bytes(), type=Stored)
        except (FileNotFoundError, msgspec.MsgspecError):
            return Stored(position=SegmentPosition(epoch=epoch))

    # Reading.

    def read(self) -> LineBatch:
        """The next lines that were not committed yet; none if all were."""
        paths, seen = self._logs()
        position = observe(self._position, seen)
        lines: list[TailedLine] = []
        room = BATCH_BYTES
        for path, segment in zip(paths, position.segments, strict=True):
            if len(lines) >= BATCH_LINES or room <= 0:
                break
            taken, offset = self._take(path, segment, BATCH_LINES - len(lines), room)
            prefix = f"{position.epoch}:{segment.generation}"
            lines += [TailedLine(place=f"{prefix}:{at}", text=text) for at, text in taken]
            room -= offset - segment.offset
            position = advance(position, segment.generation, offset)
        return LineBatch(lines=tuple(lines), after=position)

    def _take(
        self, path: Path, segment: Segment, count: int, room: int
    ) -> tuple[list[tuple[int, bytes]], int]:
        """Whole lines from its offset on, each with its own, and where the next one begins."""
        start = segment.offset
        with open_log(path) as file:
            if os.fstat(file.fileno()).st_ino != segment.inode:
                return [], start  # rotated since we looked: it has another name the next time
            file.seek(start)
            chunk = file.read(max(room, LINE_LIMIT_BYTES + 1))
        found: list[tuple[int, bytes]] = []
        at = 0
        while len(found) < count and (end := chunk.find(b"\n", at)) >= 0:
            if end - at > LINE_LIMIT_BYTES:
                self.oversize_lines += 1
            else:
                found.append((start + at, chunk[at:end]))
            at = end + 1
        if at == 0 and len(chunk) > LINE_LIMIT_BYTES:  # no end in sight: what is left of it will not parse
            self.oversize_lines += 1
            at = len(chunk)
        return found, start + at

    def commit(self, batch: LineBatch, note: str = "") -> None:
        """The lines of this batch need never be read again.

        Not synced to disk: after a power failure they may come once more, under the same places.
        """
        self._position, self.note = batch.after, note
        staged = self._position_file.with_name(f".{self._position_file.name}.tmp")
        staged.write_bytes(msgspec.json.encode(Stored(position=batch.after, note=note)))
        staged.replace(self._position_file)

    # Rotating.

    @property
    def due(self) -> bool:
        """Is the log too long?"""
        try:
            return self._log.stat().st_size > self._rotate_bytes
        except FileNotFoundError:
            return False

    def rotate(self) -> None:
        """Rotate the log; its writer must then be asked to reopen it."""
        last = max((_number(path) for path in self._rotated()), default=0)
        self._log.rename(self._log.with_name(f"{self._log.name}.{last + 1}"))

    def retire(self) -> None:
        """Remove files that have been read to their end and are left alone, and those too many."""
        rotated = self._rotated()
        for index, path in enumerate(rotated):
            try:
                seen = _seen(path)
            except NotALog:
                continue
            read = any(seen.continues(one) and one.offset >= seen.size for one in self._position.segments)
            left_alone = time.time() - path.stat().st_mtime > self._late_seconds
            if read and left_alone:
                path.unlink()
            elif index < len(rotated) - ROTATED_KEPT:
                known = next((one.offset for one in self._position.segments if seen.continues(one)), 0)
                self.lost_bytes += seen.size - known
                path.unlink()

    def _rotated(self) -> list[Path]:
        found = [path for path in self._log.parent.glob(f"{self._log.name}.*") if _number(path) > 0]
        return sorted(found, key=_number)

    def _log_and_rotated(self) -> Iterator[Path]:
        """Those that were rotated are looked for once the log itself has been looked at."""
        yield self._log
        yield from self._rotated()

    def _logs(self) -> tuple[list[Path], list[SeenFile]]:
        """The files that are logs, oldest first.

        The log itself is looked at first: rotated meanwhile, it is found twice and not missed. What is missed
        is forgotten with the next commit, and would come again under other places.
        """
        files: dict[int, tuple[Path, SeenFile]] = {}
        refused = []
        for path in self._log_and_rotated():
            try:
                seen = _seen(path)
            except FileNotFoundError:
                continue
            except NotALog:
                refused.append(path.name)
            else:
                files[seen.inode] = (path, seen)
        self.refused = tuple(refused)
        oldest_first = sorted(files.values(), key=lambda file: _number(file[0]) or math.inf)
        return [path for path, _ in oldest_first], [seen for _, seen in oldest_first]


def _number(path: Path) -> int:
    suffix = path.suffix.removeprefix(".")
    return int(suffix) if suffix.isdecimal() else 0


def _seen(path: Path) -> SeenFile:
    with open_log(path) as file:
        return look(file)
