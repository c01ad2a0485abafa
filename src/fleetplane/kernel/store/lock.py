"""One process per database: two writers would each believe in their own memory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetplane.kernel.errors import Unavailable

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
