"""A private folder of the agent: identity, received configuration and state that must survive.

Every file is replaced as a whole and on disk before a method returns. Names and formats are the domain's:
they are contracts with programs in the field. All methods block.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Final

from fleetplane.kernel.errors import SettingsError
from fleetplane.kernel.files import sync_folder, write_durably
from fleetplane.node import lock

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600


class PrivateFolder:
    def __init__(self, root: Path, *, mode: int = FILE_MODE) -> None:
        """`mode` is that of every file written here."""
        self.root = root
        self._mode = mode

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.root}>"

    def make(self) -> None:
        """Make the folder, or take an existing one from everyone else."""
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
            self.root.chmod(FOLDER_MODE)
        except OSError as error:
            raise SettingsError(f"{self.root} cannot be used: {error.strerror}") from error

    def read(self, path: Path) -> bytes | None:
        """The file's content; None if there is no such file."""
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SettingsError(f"{path} cannot be read: {error.strerror}") from error

    def write(self, path: Path, content: bytes) -> None:
        write_durably(path, content, mode=self._mode)

    def remove(self, *paths: Path) -> list[Path]:
        """Remove these files; which of them there were."""
        removed = []
        for path in paths:
            with suppress(FileNotFoundError):
                path.unlink()
                removed.append(path)
        for folder in {path.parent for path in removed}:
            sync_folder(folder)
        return removed

    def tighten(self, paths: Iterable[Path]) -> list[Path]:
        """Take from everyone else what only the owner may read; which of these were too open.

        Symbolic links are left alone: what they lead to may belong to something else.
        """
        found = []
        for path in paths:
            with suppress(FileNotFoundError):
                mode = path.lstat().st_mode
                if not stat.S_ISLNK(mode) and mode & 0o077:
                    path.chmod(stat.S_IMODE(mode) & 0o700)
                    found.append(path)
        return found

    def sole_user(
        self, name: str, *, whose: str, hint: str = "", wait_seconds: float = 0.0
    ) -> AbstractContextManager[None]:
        """Hold the lock file of that name in this folder; see `lock.sole_user`."""
        return lock.sole_user(self.root / name, whose=whose, hint=hint, wait_seconds=wait_seconds)
