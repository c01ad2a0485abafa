"""Imports go downward only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fleetplane

PACKAGE = Path(fleetplane.__file__).parent

# From the roof to the ground. A module may import what stands below it, and its own room.
LAYERS = (
    "cli",
    "server", "agents",
    "assembly", "endpoints", "housekeeping", "presenting", "ready_file",
    "settings", "logs",
    "sections",
    "domains",
    "web",
    "rpc",
    "sim",
    "kernel",
    "gen",
)  # fmt: skip
SAME_FLOOR = (
    {"server", "agents"},
    {"assembly", "endpoints", "housekeeping", "presenting", "ready_file"},
    {"settings", "logs"},
)


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if "gen" not in path.relative_to(PACKAGE).parts[:1]:
            relative = path.relative_to(PACKAGE.parent).with_suffix("")
            yield ".".join(relative.parts).removesuffix(".__init__"), path


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; layers need absolute names"
            if node.module:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def allowed(importer: str, imported: str) -> bool:
    if importer == imported or not importer or imported not in LAYERS:
        return True
    if any({importer, imported} <= floor for floor in SAME_FLOOR):
        return False
    return LAYERS.index(importer) < LAYERS.index(imported)


def test_every_module_stands_on_a_known_floor() -> None:
    assert {room(name) for name, _ in modules()} - {""} <= set(LAYERS)


@pytest.mark.parametrize(
    ("name", "path"), list(modules()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_imports_go_downward_only(name: str, path: Path) -> None:
    upward = [
        target
        for target in imports(path)
        if target.startswith("fleetplane.") and not allowed(room(name), room(target))
    ]
    assert upward == []


def test_domains_never_import_each_other() -> None:
    def domain(module: str) -> str:
        parts = module.split(".")
        return parts[2] if parts[:2] == ["fleetplane", "domains"] and len(parts) > 2 else ""

    folders = {path.name for path in (PACKAGE / "domains").iterdir() if path.is_dir()}
    crossings = [
        (name, target)
        for name, path in modules()
        for target in imports(path)
        if domain(name) in folders and domain(target) in folders - {domain(name)}
    ]
    assert crossings == []


def test_only_the_module_that_opens_listeners_names_the_http_server() -> None:
    naming = {
        name for name, path in modules() if any(target.startswith("h2corn") for target in imports(path))
    }
    assert naming == {"fleetplane.rpc.listeners"}


def test_the_environment_is_read_in_settings_only() -> None:
    def reads_environment(path: Path) -> bool:
        return any(
            isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            for node in ast.walk(ast.parse(path.read_text()))
        )

    assert {name for name, path in modules() if reads_environment(path)} == {"fleetplane.settings"}
