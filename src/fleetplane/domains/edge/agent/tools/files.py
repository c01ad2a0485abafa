"""`fs.read`, `fs.list`, `fs.write`: files within what the machine's owner allows, in bounded pieces."""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from fleetplane.domains.edge.agent.tools import contract as read
from fleetplane.domains.edge.agent.tools.contract import (
    BadArguments,
    Claims,
    CommandOutcomeReport,
    ErrorKind,
    PermittedCall,
    ProgramStream,
    ToolFailed,
)
from fleetplane.node import safe_open
from fleetplane.node.tasks import in_thread

READ_LIMIT_BYTES: Final = 1024 * 1024
"""In one call; `offset` reaches the rest."""
WRITE_LIMIT_BYTES: Final = 1024 * 1024
ENTRIES_LIMIT: Final = 1000
PIECE_BYTES: Final = 32 * 1024
NEW_FILE_MODE: Final = 0o644

_KINDS: Final = (
    (stat.S_ISREG, "file"),
    (stat.S_ISDIR, "folder"),
    (stat.S_ISLNK, "link"),
)


def _path_claim(arguments: Mapping[str, object]) -> Claims:
    return Claims(paths=(read.absolute_path(arguments, "path"),))


def _path(call: PermittedCall) -> Path:
    (path,) = call.paths.values()
    return path


def _failed(path: Path, error: OSError) -> ToolFailed:
    return ToolFailed(ErrorKind.INTERNAL, f"{path}: {error.strerror or error}", exit_code=error.errno or 0)


class ReadFile:
    """Its bytes come as output; the result says how large the file is and whether this was its end."""

    name = "fs.read"
    known = frozenset({"path", "offset", "length"})

    def __repr__(self) -> str:
        return "<ReadFile>"

    def claims(self, arguments: Mapping[str, object]) -> Claims:
        read.only(arguments, self.known)
        self._piece(arguments)
        return _path_claim(arguments)

    def _piece(self, arguments: Mapping[str, object]) -> tuple[int, int]:
        offset = read.whole(arguments, "offset", 0, low=0, high=2**53)
        length = read.whole(arguments, "length", READ_LIMIT_BYTES, low=0, high=READ_LIMIT_BYTES)
        return offset, length

    async def run(self, call: PermittedCall) -> CommandOutcomeReport:
        path = _path(call)
        offset, length = self._piece(call.arguments)
        try:
            data, size = await asyncio.to_thread(_read, path, offset, min(length, call.output_limit_bytes))
        except OSError as error:
            raise _failed(path, error) from error
        for start in range(0, len(data), PIECE_BYTES):
            await call.emit(ProgramStream.STDOUT, data[start : start + PIECE_BYTES])
        end = offset + len(data)
        return CommandOutcomeReport(
            stdout=data,
            structured={
                "path": str(path),
                "size": size,
                "offset": offset,
                "length": len(data),
                "end": end >= size,
            },
        )


def _read(path: Path, offset: int, length: int) -> tuple[bytes, int]:
    with safe_open.file(path, os.O_RDONLY) as descriptor:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(0, "is no ordinary file")
        if about.st_nlink > 1:
            # Another name of it may stand where nobody may read: the path says nothing about the file.
            raise OSError(0, f"has {about.st_nlink} names (hard links) and is not read")
        pieces = bytearray()
        while len(pieces) < length and (
            piece := os.pread(descriptor, length - len(pieces), offset + len(pieces))
        ):
            pieces += piece
        return bytes(pieces), about.st_size


class ListFolder:
    name = "fs.list"
    known = frozenset({"path"})

    def __repr__(self) -> str:
        return "<ListFolder>"

    def claims(self, arguments: Mapping[str, object]) -> Claims:
        read.only(arguments, self.known)
        return _path_claim(arguments)

    async def run(self, call: PermittedCall) -> CommandOutcomeReport:
        path = _path(call)
        try:
            entries, total = await asyncio.to_thread(_list, path)
        except OSError as error:
            raise _failed(path, error) from error
        complete = total == len(entries)
        return CommandOutcomeReport(
            structured={"path": str(path), "entries": entries, "total": total, "complete": complete}
        )


def _list(path: Path) -> tuple[list[dict[str, object]], int]:
    with safe_open.folder(path) as descriptor:
        names = sorted(os.listdir(descriptor))  # noqa: PTH208  # of a descriptor, not of a path
        entries = [
            _entry(name, about)
            for name in names[:ENTRIES_LIMIT]
            if (about := _about(name, descriptor)) is not None
        ]
        return entries, len(names) - (min(len(names), ENTRIES_LIMIT) - len(entries))


def _about(name: str, folder: int) -> os.stat_result | None:
    with suppress(FileNotFoundError):  # it left while we looked
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    return None


def _entry(name: str, about: os.stat_result) -> dict[str, object]:
    kind = next((word for test, word in _KINDS if test(about.st_mode)), "other")
    return {
        "name": os.fsencode(name).decode(errors="backslashreplace"),
        "kind": kind,
        "size": about.st_size,
        "mode": f"{stat.S_IMODE(about.st_mode):04o}",
        "modified": int(about.st_mtime),
    }


class WriteFile:
    """Replaces a file as a whole, or leaves it as it was; a link in its place is replaced, not followed."""

    name = "fs.write"
    known = frozenset({"path", "content", "content_base64", "mode", "overwrite"})

    def __repr__(self) -> str:
        return "<WriteFile>"

    def claims(self, arguments: Mapping[str, object]) -> Claims:
        read.only(arguments, self.known)
        _content(arguments)
        _mode(arguments)
        read.flag(arguments, "overwrite", default=True)
        return _path_claim(arguments)

    async def run(self, call: PermittedCall) -> CommandOutcomeReport:
        path, content, mode = _path(call), _content(call.arguments), _mode(call.arguments)
        overwrite = read.flag(call.arguments, "overwrite", default=True)
        try:
            await in_thread(lambda: _write(path, content, mode, overwrite=overwrite))
        except OSError as error:
            raise _failed(path, error) from error
        return CommandOutcomeReport(structured={"path": str(path), "size": len(content)})


def _content(arguments: Mapping[str, object]) -> bytes:
    text, encoded = arguments.get("content"), arguments.get("content_base64")
    if (text is None) == (encoded is None):
        raise BadArguments("content: give it, or content_base64, and not both", field="content")
    if isinstance(text, str):
        content = text.encode("utf-8", "surrogatepass")
    elif isinstance(encoded, str):
        try:
            content = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError) as error:
            raise BadArguments("content_base64: is not base64", field="content_base64") from error
    else:
        raise BadArguments("content: is no text", field="content")
    if len(content) > WRITE_LIMIT_BYTES:
        raise BadArguments(f"content: has more than {WRITE_LIMIT_BYTES} bytes", field="content")
    return content


def _mode(arguments: Mapping[str, object]) -> int | None:
    if "mode" not in arguments:
        return None
    written = read.text(arguments, "mode")
    try:
        mode = int(written.removeprefix("0o"), 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise BadArguments(f"mode: {written[:20]!r} is no file mode; write 0644", field="mode")
    return mode


def _write(path: Path, content: bytes, mode: int | None, *, overwrite: bool) -> None:
    with safe_open.folder(path.parent) as parent:
        there = _about(path.name, parent)
        if there is not None and not overwrite:
            raise OSError(0, "is there already")
        if there is not None and not (stat.S_ISREG(there.st_mode) or stat.S_ISLNK(there.st_mode)):
            raise OSError(0, "is no ordinary file")
        if mode is None:
            kept = there is not None and stat.S_ISREG(there.st_mode)
            mode = stat.S_IMODE(there.st_mode) & 0o777 if kept and there is not None else NEW_FILE_MODE
        staged = f".{path.name[:200]}.{os.getpid()}.{os.urandom(6).hex()}"
        descriptor = os.open(
            staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent
        )
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            os.rename(staged, path.name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with suppress(OSError):
                os.unlink(staged, dir_fd=parent)
            raise
        os.fsync(parent)
