"""Writing small files so that a crash leaves the old one or the new one, never half of either."""

from __future__ import annotations

import os
from pathlib import Path


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
