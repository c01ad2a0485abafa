"""`pip install fleetplane-agent`: every agent starts without what only the server needs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fleetplane
from fleetplane.domains import own
from tools.console import libraries

ROOT = Path(__file__).resolve().parent.parent
SERVER = "packages/fleetplane/pyproject.toml"
SOURCES = (
    "src",
    "proto",
    "packages",
    "tools/console",
    "tools/protogen.py",
    "pyproject.toml",
    "hatch_build.py",
    "LICENSE",
    "README.md",
)
SECONDS = 240.0
"""For each step; several processes of these tests may build at the same time."""
AGENTS = sorted(verb.name for declaration in own.declarations() for verb in declaration.agents)


@cache
def project(path: str) -> dict[str, object]:
    found: dict[str, object] = tomllib.loads((ROOT / path).read_text())["project"]
    return found


def needed_by(requirements: list[str]) -> Iterator[str]:
    """The names of all distributions that these require here, their own requirements included."""
    pending, seen = [Requirement(text) for text in requirements], set()
    while pending:
        wanted = pending.pop()
        key = (wanted.name, *sorted(wanted.extras))
        if key in seen or (wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})):
            continue
        seen.add(key)
        yield wanted.name
        for text in importlib.metadata.requires(wanted.name) or ():
            inner = Requirement(text)
            if inner.marker is None or any(
                inner.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)
            ):
                inner.marker = None
                pending.append(inner)


def lend(name: str, site: Path) -> None:
    """Make an installed distribution visible in another environment, and nothing beside it."""
    for file in importlib.metadata.files(name) or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(Path(str(file.locate())))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both wheels, built from a copy: a build writes the generated modules anew."""
    folder = tmp_path_factory.mktemp("distributions")
    tree = folder / "tree"
    for name in SOURCES:
        source, target = ROOT / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "gen"))
        else:
            shutil.copy(source, target)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    places = [str(tree), str(tree / "packages" / "fleetplane")]
    subprocess.run([*build, "--no-index", "-w", str(folder), *places], check=True, timeout=SECONDS)
    return folder


@pytest.fixture(scope="module")
def agent_only(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel of `fleetplane-agent` and what that requires."""
    environment = tmp_path_factory.mktemp("agent-only")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=SECONDS)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = environment / "lib" / version / "site-packages"
    dependencies = project("pyproject.toml")["dependencies"]
    assert isinstance(dependencies, list)
    for name in set(needed_by(dependencies)):
        lend(name, site)
    (wheel,) = wheels.glob("fleetplane_agent-*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True, timeout=SECONDS
    )
    return environment / "bin"


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "FLEETPLANE"))
    }
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=SECONDS, check=False, env=environment
    )


def test_both_distributions_have_one_version() -> None:
    assert project(SERVER)["version"] == fleetplane.__version__
    required = re.findall(r'fleetplane-agent(?:\[\w+\])?==([^"]+)', (ROOT / SERVER).read_text())
    assert required
    assert set(required) == {fleetplane.__version__}


def test_no_file_belongs_to_both_distributions(wheels: Path) -> None:
    (agent,), (server,) = wheels.glob("fleetplane_agent-*.whl"), wheels.glob("fleetplane-*.whl")
    with zipfile.ZipFile(agent) as code, zipfile.ZipFile(server) as thin:
        assert "fleetplane/cli/main.py" in code.namelist()
        assert "fleetplane/gen/nvidia/device/v1alpha1/gpu_pb2.py" in code.namelist()
        assert [name for name in thin.namelist() if ".dist-info/" not in name] == []


def test_the_wheel_carries_the_libraries_of_the_console_with_their_licence(wheels: Path) -> None:
    assert libraries.is_complete(ROOT), "the libraries are missing; run: tools/setup.sh console"
    (agent,) = wheels.glob("fleetplane_agent-*.whl")
    folder = "fleetplane/web/files/libraries"
    with zipfile.ZipFile(agent) as wheel:
        carried = {name.removeprefix(f"{folder}/") for name in wheel.namelist() if name.startswith(folder)}
        assert carried == {"contents.json", "uPlot.esm.js", "uPlot.min.css", "uPlot.LICENSE"}
        assert json.loads(wheel.read(f"{folder}/contents.json")) == libraries.wanted(ROOT)
        assert b"Permission is hereby granted" in wheel.read(f"{folder}/uPlot.LICENSE")
        assert wheel.read(f"{folder}/uPlot.esm.js") == (ROOT / libraries.FOLDER / "uPlot.esm.js").read_bytes()


def test_the_servers_libraries_are_not_there(agent_only: Path) -> None:
    done = run(agent_only / "python", "-c", "import fleetplane.server.root")
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_starts_where_only_agents_are_installed(agent_only: Path, name: str) -> None:
    shown = run(agent_only / "fleetplane", "agent", name, "--help")
    assert shown.stdout.startswith(f"Usage: fleetplane agent {name}"), shown.stderr
    assert shown.returncode == 0
    domain = next(one for one in own.declarations() if any(verb.name == name for verb in one.agents))
    package = domain.server.rpartition(".")[0]
    program = (
        "import importlib, pkgutil\n"
        f"agent = importlib.import_module('{package}.agent')\n"
        "for module in pkgutil.walk_packages(agent.__path__, agent.__name__ + '.'):\n"
        "    importlib.import_module(module.name)\n"
    )
    loaded = run(agent_only / "python", "-c", program)
    assert (loaded.returncode, loaded.stderr) == (0, "")


def test_a_table_for_a_terminal_needs_nothing_more(agent_only: Path) -> None:
    program = (
        "import sys\n"
        "from fleetplane.cli.output import Cell, PrintedTable, emit_table\n"
        "sys.stdout.isatty = lambda: True\n"
        "emit_table(PrintedTable(columns=('NAME',), rows=((Cell(text='one'),),), empty=''))\n"
    )
    shown = run(agent_only / "python", "-c", program)
    assert (shown.returncode, shown.stdout.split(), shown.stderr) == (0, ["\x1b[1mNAME\x1b[0m", "one"], "")


@pytest.mark.parametrize("verb", [["server"], ["backup", "copy.tar"]], ids=" ".join)
def test_a_verb_that_needs_more_names_the_distribution_that_brings_it(
    agent_only: Path, tmp_path: Path, verb: list[str]
) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    done = run(agent_only / "fleetplane", *verb, "--data-dir", str(tmp_path / "data"))
    assert "pip install fleetplane brings it" in done.stderr, done.stderr
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
