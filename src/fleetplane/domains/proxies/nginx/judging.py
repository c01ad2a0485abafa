"""Whether a configuration holds only what the table allows: the gate before NGINX. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from fleetplane.domains.proxies.nginx import checks
from fleetplane.domains.proxies.nginx.blocks import Directive, NginxBlock, Node, Unrenderable
from fleetplane.domains.proxies.nginx.paths import PathPolicy
from fleetplane.domains.proxies.nginx.reading import read_arguments
from fleetplane.domains.proxies.nginx.table import (
    DirectiveContext,
    DirectiveEntry,
    TextAuthor,
    block_entry,
    entries,
)

SETTINGS: Final = frozenset({DirectiveContext.MAIN, DirectiveContext.EVENTS, DirectiveContext.HTTP})
"""Where the directives of a workspace's settings may go, each to the place it belongs to."""
_NOT_ALLOWED: Final = "is not allowed"
_NAME: Final = re.compile(r"[A-Za-z0-9_.:/*%-]+|'[^'\\]*'|\"(?:[^\"\\]|\\.)*\"")
"""What the agent writes before a value of a table, as it is: a word, or a text between quotes."""


def directive_fault(
    node: Directive, contexts: Collection[DirectiveContext], paths: PathPolicy, *, author: TextAuthor
) -> str:
    """Why a directive may not stand in any of these contexts; empty if it may."""
    known = entries(node.name, author)
    if not known:
        return _NOT_ALLOWED
    fitting = [entry for entry in known if not entry.contexts.isdisjoint(contexts)]
    if not fitting:
        return f"{_NOT_ALLOWED} in {' or '.join(sorted(contexts))}"
    faults = [_arguments_fault(entry, node.arguments, paths) for entry in fitting]
    return "" if "" in faults else faults[-1]


def _arguments_fault(entry: DirectiveEntry, arguments: tuple[str, ...], paths: PathPolicy) -> str:
    if (fault := entry.check(arguments, paths)) or entry.check in (checks.text, checks.own_listening):
        return fault
    return "must not name a Unix socket" if any(map(checks.names_socket, arguments)) else ""


def not_allowed(name: str, contexts: Collection[DirectiveContext]) -> bool:
    """Whether an administrator may not write this directive there, whatever its value."""
    return all(entry.contexts.isdisjoint(contexts) for entry in entries(name, TextAuthor.RAW))


def raw(
    directives: Mapping[str, str], contexts: Collection[DirectiveContext], paths: PathPolicy, *, where: str
) -> list[Directive]:
    """Directives that an administrator wrote, each read, checked, and ready to be written anew."""
    made = []
    for name, value in sorted(directives.items()):
        if not_allowed(name, contexts):
            raise Unrenderable(f"{where}: the directive {name[:80]!r} {_NOT_ALLOWED}")
        node = Directive(name, read_arguments(name, value))
        if fault := directive_fault(node, contexts, paths, author=TextAuthor.RAW):
            raise Unrenderable(f"{where}: {name}: {fault}")
        made.append(node)
    return made


def faults(
    nodes: Iterable[Node], context: DirectiveContext, paths: PathPolicy, *, author: TextAuthor
) -> Iterator[tuple[int, str]]:
    """What a tree holds that is not allowed, each with its line."""
    for node in nodes:
        if context is DirectiveContext.PAIRS:
            written = author is TextAuthor.AGENT and not _NAME.fullmatch(node.name)
            if isinstance(node, NginxBlock) or node.name == "include" or len(node.arguments) > 8 or written:
                yield node.line, f"{node.name[:80]!r} {_NOT_ALLOWED} in a table of values"
            continue
        match node:
            case Directive(name=name):
                if fault := directive_fault(node, {context}, paths, author=author):
                    yield node.line, f"the directive {name[:80]!r} {fault}"
            case NginxBlock(name=name, body=body):
                entry = block_entry(name, context, author)
                if entry is None:
                    yield node.line, f"the block {name[:80]!r} {_NOT_ALLOWED} in {context}"
                elif fault := _block_fault(node, entry, paths, author):
                    yield node.line, f"the block {name!r}: {fault}"
                else:
                    assert entry.opens is not None
                    yield from faults(body, entry.opens, paths, author=author)


def _block_fault(node: NginxBlock, entry: DirectiveEntry, paths: PathPolicy, author: TextAuthor) -> str:
    if fault := entry.check(node.arguments, paths):
        return fault
    own = author < TextAuthor.AGENT and entry.opens is DirectiveContext.PAIRS
    if own and any(one.startswith(checks.OWN_VARIABLES) for one in node.arguments[-1:]):
        return "must not set a variable of the agent's"
    return ""


def accept(
    nodes: Iterable[Node], context: DirectiveContext, paths: PathPolicy, *, author: TextAuthor
) -> None:
    """Raise on the first thing that is not allowed."""
    for line, fault in faults(nodes, context, paths, author=author):
        raise Unrenderable(f"{fault} (line {line})" if line else fault)
