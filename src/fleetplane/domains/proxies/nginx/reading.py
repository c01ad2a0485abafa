"""Foreign NGINX text as a tree, read by `crossplane`, and the check before such text is tested.

NGINX and any other reader may part a text differently at its edges. That is no danger here: what
was read is what is checked, and what was checked is written anew (`blocks.emit`), so NGINX never
sees the text itself. What can be read in two ways is refused all the same. A test is not harmless, because
`nginx -t` opens the files that a configuration names; so the tree is checked against the table first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from fleetplane.domains.proxies.nginx import judging
from fleetplane.domains.proxies.nginx.blocks import (
    Directive,
    NginxBlock,
    Node,
    Unrenderable,
    check_text,
    directive,
    emit_in_place,
    split_arguments,
    unescaped,
)
from fleetplane.domains.proxies.nginx.paths import PathPolicy
from fleetplane.domains.proxies.nginx.table import DirectiveContext, TextAuthor

TEXT_LIMIT_BYTES: Final = 1024 * 1024
DEPTH_LIMIT: Final = 12
"""Blocks inside blocks: main, http, server, three locations and two conditions are eight."""
_END: Final = "fleetplane_end_of_text"
_BREAKS: Final = str.maketrans("", "", "\n\r\t")

_PLAIN: Final = re.compile(r"[A-Za-z0-9_./:=,%*+@!|$^~()?-]+(?: [A-Za-z0-9_./:=,%*+@!|$^~()?-]+)*")
"""Nothing that means anything to a tokeniser but blanks: needs no parser, which takes a quarter of a
millisecond for each directive of a workspace with thousands."""

Token = tuple[str, int, bool]
"""Its text, its line, and whether it stood between quotes."""


def read(text: str) -> list[Node]:
    """The directives of a whole text, each with its line."""
    if len(text.encode("utf-8", "replace")) > TEXT_LIMIT_BYTES:
        raise Unrenderable(f"longer than {TEXT_LIMIT_BYTES} bytes")
    return _body(_tokens(text), depth=0)


def read_arguments(name: str, text: str) -> tuple[str, ...]:
    """The arguments of one directive, read alike by crossplane and the mirror of NGINX's tokeniser."""
    check_text(text)
    if _PLAIN.fullmatch(text):
        return tuple(text.split(" "))
    mirrored = split_arguments(text)
    nodes = _body(_tokens(f"{name} {text};"), depth=0)
    match nodes:
        case [Directive(arguments=arguments)] if arguments == mirrored:
            return arguments
        case _:
            raise Unrenderable(f"cannot be read in one way; put arguments between quotes: {text[:80]!r}")


def _tokens(text: str) -> Iterator[Token]:
    if any(ord(one) < 0x20 or ord(one) == 0x7F for one in text.translate(_BREAKS)):
        raise Unrenderable("control characters cannot be written into a configuration")
    if any(0xD800 <= ord(one) <= 0xDFFF for one in text):
        raise Unrenderable("not valid Unicode text")
    # crossplane ends silently inside quotes and after a backslash; then the end mark is missing.
    found = _lexed(f"{text}\n{_END};")
    if [token for token, _, _ in found[-2:]] != [_END, ";"] or any(quoted for _, _, quoted in found[-2:]):
        raise Unrenderable("ends inside quotes, or after a backslash")
    return (token for token in found[:-2] if token[2] or not token[0].startswith("#"))


def _lexed(text: str) -> list[Token]:
    import crossplane  # only where raw text is read: most agents and servers start without it
    from crossplane.errors import NgxParserBaseException

    file = os.memfd_create("nginx.conf")  # crossplane reads files, and closes this one
    try:
        os.write(file, text.encode())  # into memory, which takes it whole
        os.lseek(file, 0, os.SEEK_SET)
        return list(crossplane.lex(file))
    except NgxParserBaseException as error:
        raise Unrenderable(f"{error.strerror} on line {error.lineno}") from error


def _body(tokens: Iterator[Token], *, depth: int) -> list[Node]:
    if depth > DEPTH_LIMIT:
        raise Unrenderable(f"blocks more than {DEPTH_LIMIT} deep")
    nodes: list[Node] = []
    words: list[str] = []
    line = 0
    for token, at, quoted in tokens:
        if quoted or token not in (";", "{", "}"):
            line = line if words else at
            words.append(_value(token, quoted, at))
        elif token == "}":  # noqa: S105
            if words:
                raise Unrenderable(f"a directive is not ended by ';' on line {line}")
            return nodes
        elif not words:
            raise Unrenderable(f"unexpected {token!r} on line {at}")
        else:
            name, *arguments = words
            if token == "{":  # noqa: S105
                body = _body(tokens, depth=depth + 1)
                nodes.append(NginxBlock(name, tuple(arguments), body, line=line))
            else:
                nodes.append(Directive(name, tuple(arguments), line=line))
            words = []
    if words:
        raise Unrenderable(f"a directive is not ended by ';' on line {line}")
    return nodes


def _value(token: str, quoted: bool, line: int) -> str:
    if not quoted and any(one.isspace() for one in token):
        # crossplane takes what follows `${name}` into the same argument; NGINX does not.
        raise Unrenderable(f"put the argument with '${{' between quotes on line {line}")
    return unescaped(token)


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
