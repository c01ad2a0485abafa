"""The files of releases, in a folder of the data directory, each named by its digest.

A file comes in piece by piece beside its place, and gets its name when it is whole and on disk. It is read
piece by piece as well, so that no file is ever in memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import IO

from fleetplane.kernel.errors import InvalidArgument, NotFound, ResourceExhausted
from fleetplane.kernel.release.documents import WHEEL_LIMIT_BYTES, FileEntry

FOLDER_MODE = 0o700
PIECE_BYTES = 256 * 1024
"""Read and sent at a time; a message may have four megabytes."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Incoming:
    """A file on its way in. Blocking."""

    def __init__(self, shelf: Shelf, name: str) -> None:
        self.name = name
        self._shelf = shelf
        self._path = shelf.root / f".{secrets.token_hex(8)}"
        self._file: IO[bytes] = self._path.open("xb")
        self._digest = hashlib.sha256()
        self._size = 0

    def __repr__(self) -> str:
        return f"<Incoming {self.name} {self._size}>"

    def write(self, piece: bytes) -> None:
        """Take one piece; raises as soon as the file is too large."""
        self._size += len(piece)
        if self._size > WHEEL_LIMIT_BYTES:
            raise ResourceExhausted(f"{self.name} is larger than {WHEEL_LIMIT_BYTES} bytes")
        self._digest.update(piece)
        self._file.write(piece)

    def finish(self) -> FileEntry:
        """Put the file into its place."""
        if not self._size:
            raise InvalidArgument(f"{self.name} is empty", field="file")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        entry = FileEntry(name=self.name, sha256=self._digest.hexdigest(), size=self._size)
        self._path.replace(self._shelf.path(entry.sha256))
        return entry

    def drop(self) -> None:
        """Leave nothing of a file that was not finished."""
        self._file.close()
        self._path.unlink(missing_ok=True)


class Shelf:
    def __init__(self, root: Path) -> None:
        self.root = root

    def __repr__(self) -> str:
        return f"<Shelf {self.root}>"

    def path(self, sha256: str) -> Path:
        """Where a file lies, or would lie."""
        if _DIGEST.fullmatch(sha256) is None:
            raise InvalidArgument(f"{sha256[:80]!r} is not a SHA-256 digest", field="sha256")
        return self.root / sha256

    def receive(self, name: str) -> Incoming:
        """Begin to take a file. Blocking."""
        self.root.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
        return Incoming(self, name)

    async def read(self, sha256: str, offset: int) -> AsyncIterator[bytes]:
        """A file from an offset on, piece by piece."""
        path = self.path(sha256)
        if offset < 0:
            raise InvalidArgument(f"must not be negative, as {offset} is", field="offset")
        try:
            file = await asyncio.to_thread(path.open, "rb")
        except FileNotFoundError:
            raise NotFound(
                "this server does not have the file",
                hint="`fleetplane releases add` on each server that has a data directory of its own",
            ) from None
        try:
            file.seek(offset)
            while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                yield piece
        finally:
            file.close()

    def sweep(self, wanted: Collection[str]) -> int:
        """Remove files that no release has; how many that were. Blocking."""
        if not self.root.is_dir():
            return 0
        gone = [path for path in self.root.iterdir() if path.name not in wanted]
        for path in gone:
            path.unlink(missing_ok=True)
        return len(gone)
