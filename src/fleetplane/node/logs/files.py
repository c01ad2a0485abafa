"""Opening a log as what it must be: an ordinary file with one name.

Whoever may write in the folder of the logs could put another file there under a log's name, by a
symbolic or a hard link, and have it sent to the server. Such a file is no log.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from fleetplane.node.logs.segments import HEAD_BYTES, SeenFile


class NotALog(OSError):
    """What lies under a log's name is something else."""


def open_log(path: Path, *, other_names: bool = False) -> BinaryIO:
    """Open a log for reading; FileNotFoundError if there is none, `NotALog` if something else is there.

    `other_names` permits hard links, for logs in folders that only their owner writes to.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NotALog(error.errno, "is a link or no file", str(path)) from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or (status.st_nlink > 1 and not other_names):
        os.close(descriptor)
        raise NotALog(errno.EPERM, "is no ordinary file with one name", str(path))
    return os.fdopen(descriptor, "rb")


def look(file: BinaryIO) -> SeenFile:
    """What an open log can be recognised by. Moves the file's position."""
    status = os.fstat(file.fileno())
    file.seek(0)
    return SeenFile(inode=status.st_ino, size=status.st_size, head=file.read(HEAD_BYTES).hex())
