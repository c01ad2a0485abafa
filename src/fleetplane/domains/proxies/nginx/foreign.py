"""Whether a whole configuration that somebody sent may be tested, and in which form. Pure.

Testing is not harmless: `nginx -t` opens what a configuration names. So the text is read, checked
against the same table as everything else, and written anew; NGINX sees only what was checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from fleetplane.domains.proxies.nginx import judging
from fleetplane.domains.proxies.nginx.blocks import Directive, NginxBlock, Node, directive, emit_in_place
from fleetplane.domains.proxies.nginx.paths import PathPolicy
from fleetplane.domains.proxies.nginx.quoting import Unrenderable
from fleetplane.domains.proxies.nginx.reading import read
from fleetplane.domains.proxies.nginx.table import DirectiveContext, TextAuthor

_SCRATCH: Final = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
_STAND_IN: Final = "127.0.0.1"
"""For the names of other machines: a test reaches no network, and so resolves none."""
_FAULTS_TOLD: Final = 10


def foreign_fault(content: str, paths: PathPolicy) -> str:
    """Why a configuration may not be tested; empty if it may."""
    try:
        nodes = read(content)
    except Unrenderable as error:
        return f"The configuration cannot be read: {error.message}"
    found = [
        f"line {line}: {fault}"
        for line, fault in judging.faults(nodes, DirectiveContext.MAIN, paths, author=TextAuthor.WHOLE)
    ]
    more = f"; and {len(found) - _FAULTS_TOLD} more" if len(found) > _FAULTS_TOLD else ""
    return "; ".join(found[:_FAULTS_TOLD]) + more


def text_to_test(content: str, folder: Path) -> str:
    """A checked configuration as NGINX gets it, with what it would open by default moved into a folder.

    Each directive stays on its line, so that NGINX complains about the right one.
    """
    nodes = read(content)
    groups = {block.arguments[0] for block in _blocks(nodes) if block.name == "upstream" and block.arguments}
    own: list[Node] = [directive("pid", f"{folder}/nginx.pid"), directive("daemon", "off")]
    return emit_in_place([*own, *_prepared(nodes, folder, frozenset(groups))])


def _blocks(nodes: Iterable[Node]) -> Iterator[NginxBlock]:
    for node in nodes:
        if isinstance(node, NginxBlock):
            yield node
            yield from _blocks(node.body)


def _prepared(nodes: Iterable[Node], folder: Path, groups: frozenset[str]) -> Iterator[Node]:
    for node in nodes:
        if isinstance(node, NginxBlock):
            body = [*_prepared(node.body, folder, groups)]
            yield replace(node, body=[*(_defaults(node, folder) if node.name == "http" else ()), *body])
        elif node.name != "pid" and not node.name.endswith("_temp_path"):
            yield _unresolved(node, groups)


def _defaults(http: NginxBlock, folder: Path) -> Iterator[Directive]:
    named = {node.name for node in http.body}
    for kind in _SCRATCH:
        yield Directive(f"{kind}_temp_path", (f"{folder}/{kind}",), line=http.line)
    if "access_log" not in named:
        yield Directive("access_log", ("off",), line=http.line)
    served = [node for block in _blocks(http.body) for node in block.body]
    if any(node.name == "listen" and {"ssl", "quic"} & set(node.arguments) for node in served):
        # Certificates are the agent's business: none is named, and none is missed.
        yield Directive("ssl_reject_handshake", ("on",), line=http.line)


def _unresolved(node: Directive, groups: frozenset[str]) -> Directive:
    """The directive with a placeholder address instead of another machine's name."""
    if not node.arguments or not (node.name.endswith("_pass") or node.name == "server"):
        return node
    first = node.arguments[0]
    scheme, separator, rest = first.rpartition("://") if "://" in first else ("", "", first)
    authority, slash, path = rest.partition("/")
    host, colon, port = authority.partition(":")
    if authority.startswith("[") or (authority in groups and node.name != "server"):
        return node
    if not any(letter.isalpha() for letter in host):
        return node
    stood_in = f"{scheme}{separator}{_STAND_IN}{colon}{port}{slash}{path}"
    return replace(node, arguments=(stood_in, *node.arguments[1:]))
