"""Objects as files in a directory.

A file is written beside its place, synced and then moved there, so that a reader, or a crash,
finds the old content or the new. Writers take turns under one file lock, which makes conditions
hold across threads and processes. An etag is the content's hash: it needs no file of its own.
Unlike S3, a file system cannot have both `a` and `a/b` as objects; the second is refused.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fleetplane.kernel.errors import Conflict, FailedPrecondition, InvalidArgument, StorageFull, Unavailable
from fleetplane.kernel.objects.port import (
    OBJECT_LIMIT_BYTES,
    RESERVED,
    StoredObject,
    check_count,
    check_path,
    check_prefix,
    check_put,
    check_size,
)

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""A link could lead anywhere, and a pipe would keep us waiting: neither is an object."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class LocalObjects:
    def __init__(self, directory: Path, *, limit_bytes: int = OBJECT_LIMIT_BYTES) -> None:
        self._root = directory
        self._limit_bytes = limit_bytes

    def __repr__(self) -> str:
        return f"<LocalObjects {self._root}>"

    async def get(self, path: str) -> StoredObject | None:
        check_path(path)
        return await asyncio.to_thread(self._get, path)

    async def put(
        self, path: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        check_put(path, body, self._limit_bytes, if_absent=if_absent, if_match=if_match)
        return await asyncio.to_thread(self._put, path, body, if_absent, if_match)

    async def delete(self, path: str) -> None:
        check_path(path)
        await asyncio.to_thread(self._delete, path)

    async def list(self, prefix: str = "") -> Sequence[str]:
        return await asyncio.to_thread(self._list, check_prefix(prefix))

    # In a thread.

    def _get(self, path: str) -> StoredObject | None:
        with self._translated(path):
            try:
                descriptor = os.open(self._inside(path), READ_FLAGS)
            except (FileNotFoundError, NotADirectoryError):
                return None
            try:
                file = os.fdopen(descriptor, "rb")
            except IsADirectoryError:
                os.close(descriptor)
                return None
            with file:
                check_size(path, (facts := os.fstat(descriptor)).st_size, self._limit_bytes)
                body = file.read()
            return StoredObject(body=body, etag=_etag(body), modified_at_ns=facts.st_mtime_ns)

    def _put(self, path: str, body: bytes, if_absent: bool, if_match: str | None) -> str:
        with self._translated(path), self._turn() as own:
            target = self._inside(path)
            if if_absent or if_match is not None:
                self._check_condition(path, if_match)
            if target.is_dir():
                raise FailedPrecondition(f"{path} is a folder with objects in it")
            staging = own / "staging"
            _write_durably(staging, body)
            self._make_folders(target.parent)
            staging.replace(target)
            _sync_directory(target.parent)
        return _etag(body)

    def _check_condition(self, path: str, if_match: str | None) -> None:
        current = self._get(path)
        if if_match is None and current is not None:
            raise Conflict(f"{path} exists already")
        if if_match is not None and (current is None or current.etag != if_match):
            raise Conflict(f"{path} was changed by someone else")

    def _delete(self, path: str) -> None:
        with self._translated(path), self._turn():
            target = self._inside(path)
            try:
                target.unlink()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return
            _sync_directory(target.parent)
            # Folders exist only for their objects: an empty one would stand in another's way.
            for folder in target.parents:
                if folder == self._root:
                    break
                try:
                    folder.rmdir()
                except OSError:
                    break

    def _list(self, prefix: str) -> Sequence[str]:
        found: list[str] = []
        with self._translated(prefix):
            top = self._inside(f"{prefix}/any").parent if prefix else self._root
            for folder, folders, files in os.walk(top, onerror=_unless_missing):
                if Path(folder) == self._root and RESERVED in folders:
                    folders.remove(RESERVED)
                found.extend((Path(folder) / name).relative_to(self._root).as_posix() for name in files)
                check_count(prefix, len(found))
        return sorted(found)

    def _inside(self, path: str) -> Path:
        target = self._root / path
        if not target.parent.resolve().is_relative_to(self._root.resolve()):
            raise InvalidArgument(f"{path!r} leads out of the storage", field="path")
        return target

    def _make_folders(self, folder: Path) -> None:
        missing = []
        while folder != self._root and not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for made in reversed(missing):
            made.mkdir(mode=DIRECTORY_MODE)
            _sync_directory(made.parent)

    @contextmanager
    def _turn(self) -> Iterator[Path]:
        """Be the only writer, in any process; gives the folder for what is not an object."""
        own = self._root / RESERVED
        own.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        lock = os.open(own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go when closed, also by a crash
            yield own
        finally:
            os.close(lock)

    @contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        """Translate a file system's error into one of the error tree."""
        try:
            yield
        except (NotADirectoryError, FileExistsError) as error:
            raise FailedPrecondition(f"{path} lies below another object") from error
        except OSError as error:
            if error.errno in FULL:
                raise StorageFull(f"no space left for {path}") from error
            raise Unavailable(f"{path} cannot be used: {error}") from error


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _etag(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _write_durably(path: Path, body: bytes) -> None:
    path.unlink(missing_ok=True)  # left behind by a crash
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
