"""The systemd journal, read through `journalctl` as a child: what it prints is its stable interface.

All choosing that journalctl can do safely is left to it; patterns and texts are matched here, because its
own matcher can be made to run for ever. What a reader asks for goes into its arguments only as a
number, or as a name that was checked. One child reads what is there, another what comes after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from fleetplane.domains.boards.agent.logs.entries import JOURNAL, KERNEL, EntryQuery, Level, LogEntry, clipped
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument, Unavailable

PROGRAM: Final = "journalctl"
FOLDERS: Final = (Path("/run/log/journal"), Path("/var/log/journal"))
LINE_LIMIT_BYTES: Final = 1024 * 1024
"""Of one entry as JSON: a message of 64 KiB, escaped, and the fields we ask for."""
SCAN_LINES: Final = 200_000
"""From the end, when the last entries with some content are asked for."""
ERRORS_LIMIT_BYTES: Final = 4096
RESTART_SECONDS: Final = 2.0
"""Before a child that ended while following is started again."""
PATH: Final = "/usr/local/bin:/usr/bin:/bin"
FIELDS: Final = (
    "MESSAGE",
    "PRIORITY",
    "_SYSTEMD_UNIT",
    "UNIT",
    "_SYSTEMD_USER_UNIT",
    "_HOSTNAME",
    "_PID",
    "SYSLOG_IDENTIFIER",
    "_TRANSPORT",
    "_COMM",
    "_BOOT_ID",
    "MESSAGE_ID",
    "CODE_FILE",
    "CODE_LINE",
)
_KEPT: Final = ("SYSLOG_IDENTIFIER", "_TRANSPORT", "_COMM", "_BOOT_ID", "MESSAGE_ID")
FIELD_LIMIT: Final = 256
_CURSOR_CHARACTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789=;")


class SystemJournal:
    """Whether there is one here, and how to read it."""

    def __init__(self, *, program: str = "", folders: Sequence[Path] = FOLDERS) -> None:
        """Without a program, journalctl is searched for; one that is given must exist."""
        self._named = bool(program)
        self._program = program or shutil.which(PROGRAM, path=PATH) or ""
        self._folders = folders

    def __repr__(self) -> str:
        return f"<Journal {self._program or 'none'}>"

    @property
    def unavailable_reason(self) -> str:
        if not self._program or not Path(self._program).exists():
            return "there is no journalctl on this node"
        if not self._named and not any(folder.is_dir() for folder in self._folders):
            return "no journal is kept on this node"
        return ""

    def reader(self, query: EntryQuery, clock: Clock, *, kernel: bool) -> JournalReader:
        if reason := self.unavailable_reason:
            raise Unavailable(reason, details={"cause": "no-journal"}, field="sources")
        return JournalReader(self._program, query, clock, kernel=kernel)


class JournalReader:
    def __init__(self, program: str, query: EntryQuery, clock: Clock, *, kernel: bool) -> None:
        self.source = KERNEL if kernel else JOURNAL
        self._program = program
        self._query = query
        self._clock = clock
        self._cursor = _checked(query.positions.get(self.source, ""))
        self._started_ns = clock.now_ns()

    def __repr__(self) -> str:
        return f"<JournalReader {self.source}>"

    async def backlog(self) -> AsyncGenerator[LogEntry, None]:
        async with contextlib.aclosing(self._entries(self._backlog_arguments())) as entries:
            async for entry in entries:
                yield entry

    async def follow(self) -> AsyncGenerator[LogEntry, None]:
        while True:
            async with contextlib.aclosing(self._entries(self._follow_arguments())) as entries:
                async for entry in entries:
                    yield entry
            await self._clock.sleep(RESTART_SECONDS)  # the journal was rotated under it, or it was ended

    def _backlog_arguments(self) -> list[str]:
        query = self._query
        arguments = self._common()
        if self._cursor:
            arguments.append(f"--after-cursor={self._cursor}")
        if query.since_ns is not None:
            arguments.append(f"--since={_at(query.since_ns)}")
        if query.until_ns is not None:
            arguments.append(f"--until={_at(query.until_ns)}")
        if query.tail_lines is not None:
            arguments.append(f"--lines={SCAN_LINES if query.reads_content else query.tail_lines}")
        return arguments

    def _follow_arguments(self) -> list[str]:
        arguments = [*self._common(), "--follow"]
        if self._cursor:
            return [*arguments, "--lines=all", f"--after-cursor={self._cursor}"]
        return [*arguments, "--lines=all", f"--since={_at(self._started_ns)}"]

    def _common(self) -> list[str]:
        query = self._query
        # Without --all, what is longer than 4 KiB comes as nothing.
        arguments = ["--output=json", "--all", "--quiet", "--no-pager"]
        arguments.append(f"--output-fields={','.join(FIELDS)}")
        if query.min_level:
            arguments.append(f"--priority={query.min_level.priority}")
        if self.source == KERNEL:
            arguments.append("--dmesg")
            if not query.current_boot_only:
                arguments.append("--boot=all")
        else:
            arguments += [f"--unit={unit}" for unit in sorted(query.units)]
            arguments += ["--boot"] if query.current_boot_only else []
        return arguments

    async def _entries(self, arguments: Sequence[str]) -> AsyncGenerator[LogEntry, None]:
        child = await asyncio.create_subprocess_exec(
            self._program,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT_BYTES,
            start_new_session=True,
            env={"PATH": PATH, "LANG": "C.UTF-8", "SYSTEMD_COLORS": "0", "TZ": "UTC"},
        )
        assert child.stdout is not None
        try:
            while (line := await _line(child.stdout)) is not None:
                entry = parse(line, self.source)
                if entry is not None:
                    self._cursor = entry.position
                    yield entry
            await self._check(child)
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await asyncio.shield(child.wait())

    async def _check(self, child: asyncio.subprocess.Process) -> None:
        assert child.stderr is not None
        words = (await child.stderr.read(ERRORS_LIMIT_BYTES)).decode(errors="replace").strip()
        if await child.wait() == 0:
            return
        if "cursor" in words.lower():
            raise InvalidArgument("cursor: the journal does not know it", field="cursor")
        last = words.splitlines()[-1] if words else f"code {child.returncode}"
        raise Unavailable(f"the journal cannot be read: {last[:200]}", details={"cause": "journal"})


def parse(line: bytes, source: str) -> LogEntry | None:
    """An entry from its line of JSON; None for one that is none."""
    try:
        said: dict[str, Any] = msgspec.json.decode(line)
        position = said["__CURSOR"]
        at_ns = int(said["__REALTIME_TIMESTAMP"]) * 1000
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return None
    if not isinstance(position, str) or not isinstance(said, dict):
        return None
    message, cut = clipped(_text(said.get("MESSAGE")))
    fields = {name: text[:FIELD_LIMIT] for name in _KEPT if (text := _text(said.get(name)))}
    if cut:
        fields["truncated"] = "true"
    return LogEntry(
        at_ns=at_ns,
        message=message,
        source=source,
        position=position,
        level=Level.of_priority(_number(said, "PRIORITY", -1)),
        unit="kernel" if source == KERNEL else _unit(said),
        hostname=_text(said.get("_HOSTNAME"))[:FIELD_LIMIT],
        pid=_number(said, "_PID", 0),
        fields=fields,
    )


def _unit(said: Mapping[str, Any]) -> str:
    """The unit that an entry is from; of the service manager itself, the one that it speaks of."""
    for name in ("UNIT", "_SYSTEMD_UNIT", "_SYSTEMD_USER_UNIT"):
        if text := _text(said.get(name)):
            return text[:FIELD_LIMIT]
    return "kernel" if said.get("_TRANSPORT") == KERNEL else ""


def _text(value: object) -> str:
    """Bytes that are no text come as numbers; a field that was given twice, as a list of its values."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        if all(isinstance(byte, int) and 0 <= byte < 256 for byte in value):
            return bytes(value).decode("utf-8", "replace")
        return " ".join(_text(one) for one in value if not isinstance(one, int))
    return ""


def _number(said: Mapping[str, Any], name: str, otherwise: int) -> int:
    text = _text(said.get(name))
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else otherwise


def _at(moment_ns: int) -> str:
    return f"@{moment_ns // 1_000_000_000}.{moment_ns % 1_000_000_000 // 1000:06d}"


def _checked(cursor: str) -> str:
    if not _CURSOR_CHARACTERS.issuperset(cursor):
        raise InvalidArgument("cursor is none of ours", field="cursor")
    return cursor


async def _line(reader: asyncio.StreamReader) -> bytes | None:
    """The next line; one that is too long is left out."""
    while True:
        try:
            line = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError:
            return None
        except asyncio.LimitOverrunError as error:
            await _skip_line(reader, error.consumed)
            continue
        return line


async def _skip_line(reader: asyncio.StreamReader, consumed: int) -> None:
    while True:
        await reader.readexactly(consumed)
        try:
            await reader.readuntil(b"\n")
        except asyncio.LimitOverrunError as error:
            consumed = error.consumed
            continue
        except asyncio.IncompleteReadError:
            return
        return
