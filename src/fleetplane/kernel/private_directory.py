"""Keep a directory of secrets readable by its owner alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fleetplane.kernel.errors import SettingsError

OTHERS_READ_OR_WRITE = 0o066
"""Search permission alone (0711) lists and reads nothing, and lets a Unix socket inside be reached."""


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
