"""One process at a time in a folder: a lock that the kernel drops with the process, however that ends.

The file stays, with the holder's process id in it, for whoever asks who holds it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fleetplane.kernel.errors import SettingsError, Unavailable

LOCK_MODE: Final = 0o600
PID_LIMIT_BYTES: Final = 32
POLL_SECONDS: Final = 0.1
"""Between attempts, where the lock is waited for."""


class Occupied(Unavailable):
    """Another process holds the lock; `details["pid"]` names it."""

    @property
    def pid(self) -> int:
        """The holder's process id; 0 where the file does not tell."""
        holder = self.details["pid"]
        return int(holder) if holder.isascii() and holder.isdecimal() else 0


@contextmanager
def sole_user(file: Path, *, whose: str, hint: str = "", wait_seconds: float = 0.0) -> Iterator[None]:
    """Hold the lock in `file` for the length of the block. Blocking.

    `whose` names in the error who else would hold it ("another agent"); `hint` is for a folder that cannot be
    used. Raises Occupied after `wait_seconds`, SettingsError where there can be no such file.
    """
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, LOCK_MODE)
    except OSError as error:
        raise SettingsError(f"{file.parent} cannot be used: {error.strerror}", hint=hint) from error
    try:
        _lock(descriptor, file, whose, give_up=time.monotonic() + wait_seconds)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, file: Path, whose: str, *, give_up: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up:
                holder = os.pread(descriptor, PID_LIMIT_BYTES, 0).decode(errors="replace").strip()
                raise Occupied(
                    f"{whose} (process {holder or 'unknown'}) works in {file.parent}",
                    details={"cause": "lock", "pid": holder or "unknown"},
                ) from None
            time.sleep(POLL_SECONDS)
        else:
            return
