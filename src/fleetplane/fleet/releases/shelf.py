"""The files of releases, in a folder of the data directory, each named by its digest.

Where servers share a store, files lie in their common object storage as well, in parts, and a server that
does not have one takes it from there when it is first asked for.

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
from fleetplane.kernel.objects import Objects
from fleetplane.kernel.release_documents import WHEEL_LIMIT_BYTES, FileEntry

FOLDER_MODE = 0o700
PIECE_BYTES = 256 * 1024
"""Read and sent at a time; a message may have four megabytes."""
PART_BYTES = 8 * 1024 * 1024
"""Of an object in shared storage, which is written and read in memory."""
SHARED = "releases"
"""The folder of files in shared storage."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Incoming:
    """A file on its way in. Blocking."""

    def __init__(self, shelf: Shelf, name: str) -> None:
        self.name = name
        self._shelf = shelf
        self.path = shelf.root / f".{secrets.token_hex(8)}"
        self._file: IO[bytes] = self.path.open("xb")
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

    @property
    def sha256(self) -> str:
        """Of what has come."""
        return self._digest.hexdigest()

    def finish(self) -> FileEntry:
        """Put the file into its place."""
        if not self._size:
            raise InvalidArgument(f"{self.name} is empty", field="file")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        entry = FileEntry(name=self.name, sha256=self._digest.hexdigest(), size=self._size)
        self.path.replace(self._shelf.path(entry.sha256))
        return entry

    def drop(self) -> None:
        """Leave nothing of a file that was not finished."""
        self._file.close()
        self.path.unlink(missing_ok=True)


class Shelf:
    def __init__(self, root: Path, shared: Objects | None = None) -> None:
        """`shared` is object storage that other servers reach, too."""
        self.root = root
        self._shared = shared
        self._fetching = asyncio.Lock()
        self._arriving: set[str] = set()
        """Names of files on their way from there, which no sweep may remove."""

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
        if self._shared is not None and not path.exists():
            await self._fetch(sha256, self._shared)
        try:
            file = await asyncio.to_thread(path.open, "rb")
        except FileNotFoundError:
            raise NotFound(
                "this server does not have the file",
                hint="where servers share a store, instances.storage must be shared, too, before a release is"
                " added; add it again",
            ) from None
        try:
            file.seek(offset)
            while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                yield piece
        finally:
            file.close()

    # For other servers.

    async def share(self, sha256: str) -> None:
        """Put a file where other servers find it; nothing if there are none."""
        if self._shared is None:
            return
        file = await asyncio.to_thread(self.path(sha256).open, "rb")
        try:
            number = 0
            while part := await asyncio.to_thread(file.read, PART_BYTES):
                await self._shared.put(f"{SHARED}/{sha256}/{number:04d}", part)
                number += 1
        finally:
            file.close()

    async def unshare(self, sha256: str) -> None:
        """Remove a file from there."""
        if self._shared is not None:
            for path in await self._shared.list(f"{SHARED}/{sha256}"):
                await self._shared.delete(path)

    async def _fetch(self, sha256: str, shared: Objects) -> None:
        """Take a file from there, if all of it is there; one at a time, however many agents wait."""
        async with self._fetching:
            if self.path(sha256).exists():
                return
            incoming = await asyncio.to_thread(self.receive, sha256)
            self._arriving.add(incoming.path.name)
            try:
                for path in await shared.list(f"{SHARED}/{sha256}"):
                    part = await shared.get(path)
                    await asyncio.to_thread(incoming.write, b"" if part is None else part.body)
                if incoming.sha256 == sha256:
                    await asyncio.to_thread(incoming.finish)
            finally:
                incoming.drop()
                self._arriving.discard(incoming.path.name)

    def sweep(self, wanted: Collection[str]) -> int:
        """Remove files that no release has; how many that were. Blocking."""
        if not self.root.is_dir():
            return 0
        gone = [
            path
            for path in self.root.iterdir()
            if path.name not in wanted and path.name not in self._arriving
        ]
        for path in gone:
            path.unlink(missing_ok=True)
        return len(gone)
