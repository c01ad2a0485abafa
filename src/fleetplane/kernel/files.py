"""Write small files durably, and check that a directory of secrets is private.

A crash during a write leaves the old file or the new one, never half of either.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fleetplane.kernel.errors import SettingsError

OTHERS_READ_OR_WRITE = 0o066
"""Search permission alone (0711) lists and reads nothing, and lets a Unix socket inside be reached."""


def write_durably(path: Path, content: bytes, *, mode: int) -> None:
    """Replace `path` as a whole; on return it is on disk. Each file has a single writer."""
    staged = path.with_name(f".{path.name}.tmp")
    try:
        write_synced(staged, content, mode=mode)
        staged.replace(path)
    except OSError:
        staged.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_synced(path: Path, content: bytes, *, mode: int) -> None:
    """Write in place and wait for the disk. The owner's alone until its mode is set."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(file.fileno(), mode)  # by hand: the process's umask has no say
        os.fsync(file.fileno())


def link_durably(link: Path, target: str) -> None:
    """Point a symbolic link elsewhere in one step; nobody ever finds it missing."""
    staged = link.with_name(f".{link.name}.tmp")
    staged.unlink(missing_ok=True)
    staged.symlink_to(target)
    staged.replace(link)
    sync_folder(link.parent)


def sync_folder(folder: Path) -> None:
    """Make the folder's names durable; a rename is only on disk once this returned."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def ensure_private(path: Path, *, setting: str) -> None:
    """Make `path` with mode 0700, or refuse an existing one that others can read, write or own.

    The mode of an existing directory is never changed: whoever opened it may have done so for a reason,
    and what was in it may have been read already. `setting` names the option to mention in errors.
    """
    try:
        path.mkdir(parents=True, mode=0o700, exist_ok=True)
        found = path.stat()
    except FileExistsError:
        raise SettingsError(f"{setting}: {path} is not a directory") from None
    except OSError as error:
        raise SettingsError(f"{setting}: {path} cannot be used: {error.strerror}") from error
    mode = stat.S_IMODE(found.st_mode)
    if mode & OTHERS_READ_OR_WRITE:
        raise SettingsError(
            f"{setting}: {path} can be read or written by other users (mode {mode:04o})",
            hint=f"chmod 700 {path}, and consider what was in it known to them",
        )
    if found.st_uid not in (os.geteuid(), 0):
        raise SettingsError(
            f"{setting}: {path} belongs to user {found.st_uid}, who can read everything in it",
            hint="give a directory of the server's own user",
        )
