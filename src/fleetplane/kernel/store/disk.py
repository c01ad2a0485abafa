"""The data directory: one process holds its lock, and free space is checked before writes fail."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetplane.kernel.errors import Unavailable

LEAST_FREE_BYTES = 1024 * 1024
"""Below it a commit may fail at any moment: a group is up to 1 MiB."""
PROBE_BYTES = 64 * 1024
"""Written and removed again to learn why a write failed: more than fits beside a full disk's last block."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
LOOK_SECONDS = 1.0


def is_full(path: Path) -> bool:
    """Whether an I/O error was for want of space, which SQLite only says of a plain full disk."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY:
        log = path.with_name(path.name + "-wal")
        sizes = [file.stat().st_size for file in (path, log) if file.exists()]
        if any(size + PROBE_BYTES > limit for size in sizes):
            return True
    probe = path.with_name(path.name + ".probe")
    try:
        probe.write_bytes(bytes(PROBE_BYTES))
    except OSError as error:
        return error.errno in FULL
    finally:
        probe.unlink(missing_ok=True)
    return False


class Space:
    """Looks at the database's file system once a second, without writing to it while all is well."""

    def __init__(self, path: Path, writable: Callable[[], bool]) -> None:
        self._path = path
        self._writable = writable
        self.is_full = False

    def __repr__(self) -> str:
        return f"<Space {self._path.parent} full={self.is_full}>"

    def look(self) -> None:
        try:
            facts = os.statvfs(self._path.parent)
        except OSError:  # a file system that does not answer: the next write says what is wrong
            return
        short = facts.f_bavail * facts.f_frsize < LEAST_FREE_BYTES
        # A quota, or a limit of the process, shows only to one who writes.
        self.is_full = short or (not self._writable() and is_full(self._path))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(LOOK_SECONDS)


PID_LIMIT_BYTES = 32


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`, which says who holds it; makes its directory if need be.

    The kernel drops the lock with the process, however it ends; the file itself stays, because
    removing it would let two processes hold locks on two files of the same name.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Unavailable(
            f"{path.parent} cannot be used: {error.strerror}", hint="give another data directory"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, PID_LIMIT_BYTES).decode(errors="replace").strip() or "unknown"
            raise Unavailable(
                f"{path.with_suffix('')} is in use by process {holder}",
                hint="stop that process, or give this one another data directory",
                details={"pid": holder},
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)
