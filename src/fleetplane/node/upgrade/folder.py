"""The folder with an agent's releases: what is kept, what is to be tried, what became of it.

The launcher reads and writes the same files; what each of them is, is said there. A version lies in
`versions/VERSION-DIGEST`, complete as soon as it has that name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from fleetplane.kernel.release_documents import is_older
from fleetplane.node.upgrade import launcher

FOLDER_MODE: Final = 0o700
DIGEST_CHARACTERS: Final = 16
MANIFEST: Final = "fleetplane-release.json"
"""In the folder of a version: the manifest that it was installed from."""


class UpgradeFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a version is not in force although it was ordered."""

    version: str
    attempt: int
    reason: str


class ReleaseFolder:
    """Blocking; every write outlives a loss of power."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.versions = root / "versions"
        self.downloads = root / "downloads"

    def __repr__(self) -> str:
        return f"<ReleaseFolder {self.root}>"

    def make(self) -> None:
        """Make the folders that are not there yet; only the agent's user may look into them."""
        for folder in (self.root, self.versions, self.downloads):
            folder.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)

    def place(self, version: str, manifest_digest: str) -> Path:
        """Where a version lies, or will lie."""
        return self.versions / f"{version}-{manifest_digest[:DIGEST_CHARACTERS]}"

    def installed(self) -> Iterator[str]:
        """The names of the versions that are complete."""
        with suppress(OSError):
            for folder in sorted(self.versions.iterdir()):
                if launcher.is_installed(folder) and not folder.name.startswith("."):
                    yield folder.name

    def find(self, version: str) -> str | None:
        """The name of a version that is kept."""
        return next((name for name in self.installed() if version_of(name) == version), None)

    def linked(self, link: str) -> str:
        """The name of the version that `current` or `former` means; empty for the installed one."""
        try:
            return (self.root / link).readlink().name
        except OSError:
            return ""

    # Trials.

    def begin_trial(self, *, trial: str, candidate: str, version: str, attempt: int, seconds: float) -> None:
        """Have the launcher try a version when it is started next."""
        document = {
            "id": trial,
            "candidate": candidate,
            "version": version,
            "attempt": attempt,
            "seconds": float(seconds),
            "started": False,
        }
        launcher.remove(self.root / "confirmed")
        launcher.write(self.root / "trial.json", json.dumps(document))

    def confirm(self, trial: str, name: str) -> None:
        """The version of this name has said hello; the launcher keeps it, and its floor holds."""
        found = launcher.read(self.versions / name / MANIFEST) if name else None
        floor = (found or {}).get("floor", "")
        self.raise_floor(floor if isinstance(floor, str) else "")
        launcher.write(self.root / "confirmed", trial)

    def failure(self) -> UpgradeFailure | None:
        """What became of the last order, if it was not carried out."""
        found = launcher.read(self.root / "outcome.json")
        if found is None:
            return None
        with suppress(msgspec.ValidationError):
            return msgspec.convert(found, UpgradeFailure)
        return None

    def fail(self, failure: UpgradeFailure) -> None:
        """Note why an order was not carried out."""
        launcher.write(self.root / "outcome.json", msgspec.json.encode(failure).decode())

    # The floor.

    def floor(self) -> str:
        """The oldest version that may be installed; empty for any."""
        found = launcher.read(self.root / "floor.json") or {}
        version = found.get("version", "")
        return version if isinstance(version, str) else ""

    def raise_floor(self, version: str) -> None:
        """Install nothing older than a version from now on. A floor is never lowered."""
        if version and (not self.floor() or is_older(self.floor(), version)):
            launcher.write(self.root / "floor.json", json.dumps({"version": version}))

    # Tidying.

    def prune(self, running: str) -> None:
        """Remove versions that are neither in force, nor the one before, nor running; and downloads."""
        kept = {running, self.linked("current"), self.linked("former")}
        with suppress(OSError):
            for folder in self.versions.iterdir():
                if folder.name not in kept:
                    shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(self.downloads, ignore_errors=True)
        self.make()


def version_of(name: str) -> str:
    """The version in the name of its folder."""
    return name.rpartition("-")[0]
