"""NGINX configuration as a tree, and its text. Every argument passes through `quoting` here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fleetplane.domains.proxies.nginx.quoting import argument


@dataclass(frozen=True, slots=True)
class Directive:
    name: str
    arguments: tuple[str, ...] = ()
    line: int = field(default=0, compare=False)
    """Where it stood in the text it was read from."""


@dataclass(frozen=True, slots=True)
class NginxBlock:
    name: str
    arguments: tuple[str, ...] = ()
    body: list[Node] = field(default_factory=list)
    line: int = field(default=0, compare=False)


Node = Directive | NginxBlock


def directive(name: str, *arguments: str) -> Directive:
    return Directive(name, arguments)


def block(name: str, *arguments: str, body: Iterable[Node]) -> NginxBlock:
    return NginxBlock(name, arguments, list(body))


def emit(nodes: Iterable[Node], *, depth: int = 0) -> str:
    return "".join(f"{line}\n" for line in _lines(nodes, depth))


def _lines(nodes: Iterable[Node], depth: int) -> Iterator[str]:
    indent = "    " * depth
    for node in nodes:
        head = " ".join([node.name, *(argument(value) for value in node.arguments)])
        match node:
            case Directive():
                yield f"{indent}{head};"
            case NginxBlock(body=body):
                yield f"{indent}{head} {{"
                yield from _lines(body, depth + 1)
                yield f"{indent}}}"


def emit_in_place(nodes: Iterable[Node]) -> str:
    """As `emit`, with every directive on the line it was read from, so that NGINX's errors name that line."""
    parts: list[str] = []
    _write_in_place(nodes, parts, 1)
    return "".join(parts) + "\n"


def _write_in_place(nodes: Iterable[Node], parts: list[str], line: int) -> int:
    for node in nodes:
        parts.append("\n" * (node.line - line) or " ")
        line = max(line, node.line)
        parts.append(" ".join([argument(node.name), *(argument(value) for value in node.arguments)]))
        match node:
            case Directive():
                parts.append(";")
            case NginxBlock(body=body):
                parts.append(" {")
                line = _write_in_place(body, parts, line)
                parts.append(" }")
    return line
