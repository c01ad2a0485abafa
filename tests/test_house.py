"""The size of the code in numbers: none of them may rise, and one that falls is written down here."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "fleetplane"

MOST: Mapping[str, int] = {
    "code lines": 142364,
    "code lines of boards": 23703,
    "modules": 904,
    "modules with one importer": 230,
    "imports, in a thousand lines of code": 105,
    "class names that are defined twice": 32,
    "lines of routes": 1006,
}
"""What each number is today. A change that brings one down lowers it here, too."""

SLACK = 0.01
"""How far below its bound a number may lie before the bound has to follow: one in a hundred."""

ROUTE_METHODS = frozenset({"get", "post", "put", "patch", "delete"})
LAYOUT = frozenset(
    {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT}
)


@dataclass(frozen=True, slots=True)
class Module:
    """One module of the package, without the generated code."""

    name: str
    path: Path
    source: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


@cache
def modules() -> Mapping[str, Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] == "gen":
            continue
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        source = path.read_text()
        found[name] = Module(name, path, source, ast.parse(source))
    return found


def spanned(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and type(first.value.value) is str
            ):
                yield first


def code_lines(module: Module) -> set[int]:
    """Lines with code; blank lines, comments and docstrings are none."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for text in docstrings(module.tree):
        lines.difference_update(spanned(text))
    return lines


def imported(module: Module, known: Iterable[str]) -> set[str]:
    """Modules of the package that this one names: in an import, or as "module:attribute"."""
    names: set[str] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                names.add(whole if whole in known else node.module)
    names.update(re.findall(r"[\"']([a-z_.]+):[A-Za-z_]+[\"']", module.source))
    return (names & set(known)) - {module.name}


def route_lines(module: Module) -> int:
    """Lines of calls that declare a route: `Route(...)`, and the methods of each `RouteGroup`."""
    groups = {
        target.id
        for node in module.tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("RouteGroup(")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    lines = 0
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        made = node.func
        is_row = isinstance(made, ast.Name) and made.id == "Route"
        if isinstance(made, ast.Attribute) and made.attr in ROUTE_METHODS:
            is_row = isinstance(made.value, ast.Name) and made.value.id in groups
        if is_row:
            lines += len(spanned(node))
    return lines


@cache
def measured() -> Mapping[str, int]:
    found = modules()
    code: Counter[str] = Counter()
    importing = routes = 0
    importers: dict[str, set[str]] = defaultdict(set)
    classes: Counter[str] = Counter()
    for module in found.values():
        lines = code_lines(module)
        code[module.name] = len(lines)
        statements = (node for node in module.tree.body if isinstance(node, ast.Import | ast.ImportFrom))
        importing += len(lines.intersection(*[{line for node in statements for line in spanned(node)}]))
        routes += route_lines(module)
        classes.update(node.name for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef))
        for other in imported(module, found):
            importers[other].add(module.name)
    files = [module.name for module in found.values() if not module.is_package]
    return {
        "code lines": code.total(),
        "code lines of boards": sum(
            count for name, count in code.items() if name.startswith("fleetplane.domains.boards")
        ),
        "modules": len(files),
        "modules with one importer": sum(len(importers[name]) == 1 for name in files),
        "imports, in a thousand lines of code": round(1000 * importing / code.total()),
        "class names that are defined twice": sum(count > 1 for count in classes.values()),
        "lines of routes": routes,
    }


@pytest.mark.parametrize("name", MOST)
def test_no_number_of_the_house_rises_and_what_falls_is_written_down(name: str) -> None:
    now, most = measured()[name], MOST[name]
    assert now <= most, f"{name}: {now}, and there were {most}; look for what the change makes superfluous"
    assert now >= most * (1 - SLACK), f"{name}: {now} now; lower the bound of {most} in this file"


def test_every_number_is_measured() -> None:
    assert measured().keys() == MOST.keys()


def test_a_route_in_a_group_counts_as_many_lines_as_it_takes() -> None:
    source = 'A = RouteGroup("A")\nROWS = (A.get("/", f), A.post(\n    "/", g\n), other.get("/", h))\n'
    module = Module("m", Path("m.py"), source, ast.parse(source))
    assert route_lines(module) == 1 + 3
