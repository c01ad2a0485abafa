"""Opens a path that was checked before, and no other: between check and opening, symbolic links may appear.

Every folder on the way is opened by its name in the one before it, and none may be a symbolic link. So what
was resolved and permitted is what is opened, or nothing is.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def folder(path: Path) -> Iterator[int]:
    """A descriptor of this folder, reached without following anything."""
    if not path.is_absolute() or ".." in path.parts:
        raise OSError(errno.EINVAL, "is not resolved", str(path))
    descriptor = os.open("/", _FOLDER)
    try:
        for name in path.parts[1:]:
            inner = os.open(name, _FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def file(path: Path, flags: int, mode: int = 0o600) -> Iterator[int]:
    """A descriptor of this file. Never waits for the other end of a pipe."""
    with folder(path.parent) as parent:
        descriptor = os.open(
            path.name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, mode, dir_fd=parent
        )
        try:
            yield descriptor
        finally:
            os.close(descriptor)
