"""Imports go downward only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import fleetplane

PACKAGE = Path(fleetplane.__file__).parent

# From the roof to the ground. A module may import what stands below it, and its own room.
LAYERS = (
    "cli",
    "client",
    "server.root",
    "agents",
    "server.serving",
    "server.migration",
    "server.backups",
    "server.offline",
    "server.front",
    "server.assembly",
    "server.audit_keeper",
    "server.endpoints",
    "server.grpc_apps",
    "server.housekeeping",
    "server.read_gate",
    "server.ready_file",
    "settings",
    "logs",
    "domains",
    "fleet",
    "web",
    "node",
    "rpc",
    "sections",
    "environment",
    "sim",
    "kernel",
    "gen",
)
SAME_FLOOR = (
    {"server.root", "agents", "server.backups"},
    {
        "server.assembly",
        "server.audit_keeper",
        "server.endpoints",
        "server.grpc_apps",
        "server.housekeeping",
        "server.read_gate",
        "server.ready_file",
    },
    {"settings", "logs"},
    {"sections", "environment"},
)


def room(module: str) -> str:
    """The floor that a module stands on. Verbs and composition roots stand above their domain."""
    parts = module.split(".")
    if parts[1:2] == ["domains"] and len(parts) > 3:
        if parts[3] == "cli":
            return "cli"
        if parts[3:5] == ["agent", "root"]:
            return "agents"
    if parts[1:2] == ["server"] and len(parts) > 2:
        return ".".join(parts[1:3])
    return parts[1] if len(parts) > 1 else ""


@cache
def modules() -> tuple[tuple[str, Path], ...]:
    return tuple(
        (".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"), path)
        for path in sorted(PACKAGE.rglob("*.py"))
        if "gen" not in path.relative_to(PACKAGE).parts[:1]
    )


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a module that says something about what it uses."""
    wanted = (ast.Import, ast.ImportFrom, ast.Attribute)
    return tuple(node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, wanted))


def imports(path: Path) -> Iterator[str]:
    for node in nodes(path):
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
    assert {room(name) for name, _ in modules()} - {"", "server"} <= set(LAYERS)


def test_imports_go_downward_only() -> None:
    upward = [
        f"{name} imports {target}"
        for name, path in modules()
        for target in imports(path)
        if target.startswith("fleetplane.") and not allowed(room(name), room(target))
    ]
    assert upward == []


def test_the_server_side_and_the_node_side_do_not_know_each_other() -> None:
    apart = (({"fleet", "web", "rpc"}, ("node",)), ({"node"}, ("fleet", "web", "rpc", "sections")))
    crossings = [
        (name, target)
        for importers, forbidden in apart
        for name, path in modules()
        if room(name) in importers
        for target in imports(path)
        if target.startswith("fleetplane.") and room(target) in forbidden
    ]
    assert crossings == []


def test_the_node_side_knows_neither_the_store_nor_the_authority() -> None:
    forbidden = ("fleetplane.kernel.store", "fleetplane.kernel.identity")
    crossings = [
        (name, target)
        for name, path in modules()
        if room(name) == "node"
        for target in imports(path)
        if target.startswith(forbidden)
    ]
    assert crossings == []


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
    assert naming == {"fleetplane.rpc.listening.listeners"}


def test_the_environment_is_read_in_one_module_only() -> None:
    def reads_environment(path: Path) -> bool:
        return any(
            isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") for node in nodes(path)
        )

    assert {name for name, path in modules() if reads_environment(path)} == {"fleetplane.environment"}
