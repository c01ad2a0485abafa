"""Wheels of our own agent in other versions, some of which are no good."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import fleetplane

ROOT = Path(__file__).resolve().parents[3]
SOURCES = (
    "src",
    "proto",
    "tools/console",
    "tools/protogen.py",
    "pyproject.toml",
    "hatch_build.py",
    "LICENSE",
    "README.md",
)
HANGS = b"import time\n\n\ndef main() -> None:\n    time.sleep(3600)\n\n\nmain()\n"
"""Instead of `fleetplane/cli/main.py`: an agent that starts and never says anything."""
MAIN = "fleetplane/cli/main.py"


def build_wheel(folder: Path, version: str) -> Path:
    """The wheel of `fleetplane-agent` as another version, built from a copy as `make wheel` does."""
    tree = folder / "tree"
    for name in SOURCES:
        source, target = ROOT / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "gen"))
        else:
            shutil.copy(source, target)
    own = tree / "src/fleetplane/__init__.py"
    own.write_text(own.read_text().replace(f'"{fleetplane.__version__}"', f'"{version}"'))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--no-index", "-w", str(folder), str(tree)], check=True, timeout=120)
    (wheel,) = folder.glob("fleetplane_agent-*.whl")
    return wheel


def tiny_wheel(folder: Path, version: str, files: Mapping[str, bytes] | None = None) -> Path:
    """A wheel with hardly anything in it, for those who only carry it about."""
    info = f"fleetplane_agent-{version}.dist-info"
    own = {"fleetplane/__init__.py": f'__version__ = "{version}"\n'.encode(), **(files or {})}
    target = folder / f"fleetplane_agent-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as made:
        for name, content in own.items():
            made.writestr(name, content)
        rows = [f"{name},{record_digest(content)},{len(content)}\n" for name, content in own.items()]
        made.writestr(f"{info}/RECORD", "".join([*rows, f"{info}/RECORD,,\n"]))
    return target


def record_digest(content: bytes) -> str:
    """As a wheel's record has it."""
    digest = hashlib.sha256(content).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
