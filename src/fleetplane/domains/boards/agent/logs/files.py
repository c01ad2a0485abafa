"""Logs in files, by the names that the node's owner gave them. Never by a path from a caller.

A position is `inode:offset:mark` of where the next line begins; the mark is of the file's first bytes,
because inodes are used again. A file that was rotated is found again under its next name and read to its end
first; one that was cut short is read from its beginning. Where lines may be missing, the next one is marked
as after a gap. Everything here blocks, and is called on a thread.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Final

from fleetplane.domains.boards.agent.logs.entries import (
    FILE,
    MESSAGE_LIMIT_BYTES,
    EntryQuery,
    Level,
    LogEntry,
    clipped,
)
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, Unavailable
from fleetplane.node.logs.tail import MARK_PATTERN, NotALog, SeenFile, look, open_log

BATCH_LINES: Final = 500
WINDOWS_BYTES: Final = (256 * 1024, 2 * 1024 * 1024, 16 * 1024 * 1024)
"""How far from its end a file is looked through for the last lines that are wanted, one after another."""
ROTATED: Final = (".1", ".0")
POLL_SECONDS: Final = 0.5
_POSITION: Final = re.compile(rf"([0-9]{{1,20}}):([0-9]{{1,20}})(?::({MARK_PATTERN}))?")
"""Cursors of older agents have no mark."""
_TIME: Final = re.compile(
    r"\[?([0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]{1,6})?"
    r"(?:Z|[+-][0-9]{2}:?[0-9]{2})?)"
)
_LEVEL: Final = re.compile(
    r"\b(emerg(?:ency)?|alert|crit(?:ical)?|fatal|err(?:or)?|warn(?:ing)?|notice|info|debug)\b", re.IGNORECASE
)
_LEVELS: Final = {
    "emer": Level.EMERGENCY,
    "aler": Level.ALERT,
    "crit": Level.CRITICAL,
    "fata": Level.CRITICAL,
    "err": Level.ERROR,
    "erro": Level.ERROR,
    "warn": Level.WARNING,
    "noti": Level.NOTICE,
    "info": Level.INFO,
    "debu": Level.DEBUG,
}
_HEAD_CHARACTERS: Final = 120
"""Of a line, where time and level stand if they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePosition:
    inode: int
    offset: int
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.inode}:{self.offset}" + (f":{self.mark}" if self.mark else "")

    @classmethod
    def parse(cls, text: str) -> FilePosition:
        found = _POSITION.fullmatch(text)
        if found is None:
            raise InvalidArgument("cursor is none of ours", field="cursor")
        return cls(inode=int(found[1]), offset=int(found[2]), mark=found[3] or "")

    def is_in(self, seen: SeenFile) -> bool:
        return seen.continues_at(inode=self.inode, offset=self.offset, mark=self.mark)


class LogFile:
    def __init__(self, name: str, path: Path, *, hostname: str = "") -> None:
        self.source = FILE + name
        self._name = name
        self._path = path
        self._hostname = hostname

    def __repr__(self) -> str:
        return f"<LogFile {self._name} {self._path}>"

    def place_before_end(self, window_bytes: int) -> FilePosition:
        """Where the first line begins of those in the last so many bytes."""
        with self._open(self._path) as file:
            seen = look(file)
            start = max(0, seen.size - window_bytes)
            if start:
                file.seek(start)
                start += len(file.readline())  # the first is only the end of one
            return FilePosition(inode=seen.inode, offset=start, mark=seen.mark)

    def after(self, place: FilePosition) -> tuple[list[LogEntry], FilePosition]:
        """The next lines after a place, if there are any yet, and the place after them."""
        if not self._path.exists():
            return [], place  # between two rotations
        with self._open(self._path) as file:
            seen = look(file)
        if place.is_in(seen):
            return self._read(self._path, place)
        rotated = self._rotated(place)
        if rotated is not None:
            entries, after = self._read(rotated, place)
            if entries:
                return entries, after
        entries, after = self._read(self._path, FilePosition(inode=seen.inode, offset=0, mark=seen.mark))
        if rotated is None and entries:
            # The rest of the one before cannot be had any more; whoever reads should know.
            entries[0] = replace(entries[0], fields={**entries[0].fields, "gap": "true"})
        return entries, after

    def require(self) -> None:
        """Unavailable or FailedPrecondition if it cannot be read."""
        with self._open(self._path):
            pass

    def _read(self, path: Path, place: FilePosition) -> tuple[list[LogEntry], FilePosition]:
        with self._open(path) as file:
            seen, changed_ns = look(file), os.fstat(file.fileno()).st_mtime_ns
            offset = place.offset if place.is_in(seen) else 0  # it was cut short just now
            file.seek(offset)
            lines: list[LogEntry] = []
            for raw, long in _lines(file):
                offset += len(raw) + long
                after = FilePosition(inode=seen.inode, offset=offset, mark=seen.mark)
                lines.append(self._entry(raw, after, changed_ns, long))
                if len(lines) >= BATCH_LINES:
                    break
        return lines, FilePosition(inode=seen.inode, offset=offset, mark=seen.mark)

    def _entry(self, raw: bytes, place: FilePosition, changed_ns: int, skipped: int) -> LogEntry:
        text = raw.rstrip(b"\r\n").decode("utf-8", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}")
        message, cut = clipped(text)
        head = message[:_HEAD_CHARACTERS]
        return LogEntry(
            at_ns=_time_in(head) or changed_ns,
            message=message,
            source=self.source,
            position=str(place),
            level=_level_in(head),
            unit=self._name,
            hostname=self._hostname,
            fields={"truncated": "true"} if cut or skipped else {},
        )

    def _rotated(self, place: FilePosition) -> Path | None:
        """The file under the name it was given when it was rotated away, as long as it is not packed."""
        for path in (self._path.with_name(self._path.name + suffix) for suffix in ROTATED):
            try:
                with open_log(path, other_names=True) as file:
                    if place.is_in(look(file)):
                        return path
            except OSError:
                continue
        return None

    def _open(self, path: Path) -> BinaryIO:
        """Open without following links: a user who can write beside a log must not choose what is read."""
        try:
            return open_log(path, other_names=True)
        except NotALog as error:
            if error.errno == errno.ELOOP:
                raise self._unreadable(error) from error
            raise FailedPrecondition(f"{self.source} is no file", details={"cause": "no-file"}) from error
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> Unavailable:
        return Unavailable(f"{self.source} cannot be read: {error.strerror}", details={"cause": "log-file"})


class FileReader:
    """One reader's way through a file: what is there, then what comes."""

    def __init__(self, file: LogFile, query: EntryQuery, clock: Clock) -> None:
        self.source = file.source
        self._file = file
        self._query = query
        self._clock = clock
        position = query.positions.get(file.source)
        self._place = FilePosition.parse(position) if position else None

    def __repr__(self) -> str:
        return f"<FileReader {self.source} at {self._place}>"

    async def backlog(self) -> AsyncGenerator[LogEntry, None]:
        await asyncio.to_thread(self._file.require)
        count = self._query.tail_lines
        if self._place is None:
            window = WINDOWS_BYTES[-1] if count is None else await self._window(count)
            self._place = await asyncio.to_thread(self._file.place_before_end, window)
        while entries := await self._next():
            for entry in entries:
                yield entry

    async def follow(self) -> AsyncGenerator[LogEntry, None]:
        while True:
            for entry in await self._next():
                yield entry
            await self._clock.sleep(POLL_SECONDS)

    async def _next(self) -> list[LogEntry]:
        assert self._place is not None, "what is there comes before what follows"
        entries, self._place = await asyncio.to_thread(self._file.after, self._place)
        return entries

    async def _window(self, count: int) -> int:
        """The smallest that holds as many wanted lines as are asked for."""
        for window in WINDOWS_BYTES[:-1]:
            if await asyncio.to_thread(self._holds, window, count):
                return window
        return WINDOWS_BYTES[-1]

    def _holds(self, window: int, count: int) -> bool:
        place = self._file.place_before_end(window)
        found = count if place.offset == 0 else 0
        while found < count:
            entries, place = self._file.after(place)
            if not entries:
                return False
            found += sum(self._query.wants(entry) for entry in entries)
        return True


def _lines(file: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Whole lines, each with how many bytes of it were too much to keep. One being written is left."""
    while line := file.readline(MESSAGE_LIMIT_BYTES):
        if line.endswith(b"\n"):
            yield line, 0
            continue
        if len(line) < MESSAGE_LIMIT_BYTES:
            return
        skipped = 0
        while more := file.readline(MESSAGE_LIMIT_BYTES):
            skipped += len(more)
            if more.endswith(b"\n"):
                yield line, skipped
                break
        else:
            return


def _time_in(head: str) -> int | None:
    found = _TIME.match(head)
    if found is None:
        return None
    try:
        moment = datetime.fromisoformat(found[1].replace(",", "."))
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1e6) * 1000


def _level_in(head: str) -> Level:
    found = _LEVEL.search(head)
    return _LEVELS[found[1].lower()[:4]] if found is not None else Level.UNSPECIFIED
