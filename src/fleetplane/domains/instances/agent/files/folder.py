"""The folder that received files live in.

A patch is applied as a whole or not at all, through crashes too. Its files are staged beside
their places, the staged folder is renamed to say that they count from now on (the moment of
commit), and only then are they moved over the old ones. A start that finds a committed
folder carries on moving; one that finds a staged folder forgets it.

    .staged/      being written; means nothing
    .committed/   counts; its files may be here or in their places already
    errors/NAME   why the file NAME was refused last time
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from fleetplane.domains.instances.agent.files.patch import FilePatch
from fleetplane.domains.instances.rules import files as file_rules
from fleetplane.kernel.errors import FailedPrecondition
from fleetplane.kernel.files import sync_folder, write_durably, write_synced

STAGED: Final = ".staged"
COMMITTED: Final = ".committed"
HASH: Final = ".config.hash"
"""Inside a staged patch: no received file can have this name, since it begins with a dot."""
ERRORS: Final = "errors"
REPORTED_FILES_LIMIT: Final = 2048
"""Twice what one patch can bring; a report stays below a quarter of a megabyte."""
ERROR_LIMIT_BYTES: Final = 1024


class PatchRefused(FailedPrecondition):
    """Some file of the patch is not acceptable, so none was taken."""

    reason = "PATCH_REFUSED"


class ReceiveFolder:
    """All methods block on the disk."""

    def __init__(
        self,
        folder: Path,
        *,
        mode: int,
        store_hash: Callable[[str], None],
        now_ms: Callable[[], int],
        check: Callable[[Mapping[str, bytes]], Mapping[str, str]] = file_rules.complaints,
    ) -> None:
        """`check` tells what is wrong with which files of a patch."""
        self._folder = folder
        self._mode = mode
        self._store_hash = store_hash
        self._now_ms = now_ms
        self._check = check
        self.applied = 0

    def __repr__(self) -> str:
        return f"<ReceiveFolder {self._folder} applied={self.applied}>"

    def recover(self) -> bool:
        """Finish what a crash interrupted; whether there was anything to finish."""
        shutil.rmtree(self._folder / STAGED, ignore_errors=True)
        if not (self._folder / COMMITTED).is_dir():
            return False
        self._finish()
        return True

    def apply(self, patch: FilePatch) -> None:
        """Take the whole patch, or raise and leave every file as it was."""
        wrong = self._check(patch.files)
        complaints = {
            name: words for name in patch.files if (words := wrong.get(name) or self._place_complaint(name))
        }
        if complaints:
            self._record(complaints)
            named = "; ".join(f"{name!r}: {words}" for name, words in sorted(complaints.items()))
            raise PatchRefused(f"the patch was refused: {named}")
        self.recover()
        try:
            self._stage(patch)
        except OSError as error:
            shutil.rmtree(self._folder / STAGED, ignore_errors=True)
            self._record(dict.fromkeys(patch.files, f"not written: {error.strerror}"))
            raise
        self._finish()
        self.applied += 1

    def _place_complaint(self, name: str) -> str | None:
        place = self._folder / name
        return "a folder of that name is in the way" if place.is_dir() and not place.is_symlink() else None

    def _stage(self, patch: FilePatch) -> None:
        staged = self._folder / STAGED
        staged.mkdir(mode=0o700)
        for name, content in patch.files.items():
            write_synced(staged / name, content, mode=self._mode)
        write_synced(staged / HASH, patch.config_hash.encode(), mode=0o600)
        sync_folder(staged)
        staged.rename(self._folder / COMMITTED)
        sync_folder(self._folder)

    def _finish(self) -> None:
        """Move committed files into place, then say so. May be repeated at any point."""
        committed = self._folder / COMMITTED
        for staged in sorted(committed.iterdir()):
            if staged.name != HASH:
                # The complaint goes first: should we stop in between, the server sends the file again.
                (self._folder / ERRORS / staged.name).unlink(missing_ok=True)
                staged.replace(self._folder / staged.name)
        sync_folder(self._folder)
        if (committed / HASH).exists():
            self._store_hash((committed / HASH).read_text())
        written = str(self._now_ms()).encode()
        write_durably(self._folder / file_rules.LAST_WRITTEN, written, mode=self._mode)
        shutil.rmtree(committed)
        sync_folder(self._folder)

    def _record(self, complaints: Mapping[str, str]) -> None:
        """Keep the complaints for the next report. A full disk may refuse them too; the log has them."""
        errors = self._folder / ERRORS
        try:
            errors.mkdir(mode=0o750, exist_ok=True)
            for name, words in complaints.items():
                content = words.encode()[:ERROR_LIMIT_BYTES]
                write_durably(errors / _harmless(name), content, mode=self._mode)
        except OSError:
            return

    def modified_ns(self) -> dict[str, int]:
        """Received files and when each last changed."""
        found: dict[str, int] = {}
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name == file_rules.LAST_WRITTEN:
                    continue
                try:
                    facts = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # its owner has just removed it
                if stat.S_ISREG(facts.st_mode) and len(found) < REPORTED_FILES_LIMIT:
                    found[entry.name] = facts.st_mtime_ns
        return found

    def errors(self) -> dict[str, str]:
        """Refused files and why."""
        try:
            names = sorted(os.listdir(self._folder / ERRORS))  # noqa: PTH208  # names are all we need
        except FileNotFoundError:
            return {}
        found: dict[str, str] = {}
        for name in names[:REPORTED_FILES_LIMIT]:
            if not name.startswith("."):
                with suppress(FileNotFoundError):  # a patch that is applied meanwhile has brought the file
                    words = (self._folder / ERRORS / name).read_bytes()
                    found[name] = words[:ERROR_LIMIT_BYTES].decode("utf-8", "replace")
        return found


def _harmless(name: str) -> str:
    """A file name to keep a complaint under, also when the complaint is about the name."""
    if file_rules.name_complaint(name) is None:
        return name
    kept = "".join(character if character.isalnum() or character in "-_." else "_" for character in name)
    return "_" + kept.lstrip(".")[: file_rules.NAME_LIMIT_BYTES // 4]
