"""NGINX configuration as a tree, its text, and the quoting of every argument. Pure, and a security boundary.

NGINX has no escape for most characters: what it reads is decided by its tokeniser, which we
mirror here. A text is either written so that NGINX reads back the very same text, or refused;
it never becomes a second directive, a block or a comment. `$` stays what it is for NGINX, the
start of a variable; where a literal is meant it is refused, since it cannot be escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from fleetplane.kernel.errors import InvalidArgument

ARGUMENT_LIMIT_BYTES: Final = 4000
"""NGINX reads its files through a buffer of 4096 bytes, and one argument must fit into it."""

_PLAIN: Final = re.compile(r"[A-Za-z0-9_./:=*^~$-]+")
"""What NGINX's tokeniser gives no meaning, so that common arguments stay readable."""


_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class Unrenderable(InvalidArgument):
    """A value that cannot be written into a configuration, or must not be."""

    reason = "UNRENDERABLE"


def argument(text: str) -> str:
    """`text` as NGINX must find it in the file to read it back unchanged."""
    check_text(text)
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    if len(escaped.encode()) > ARGUMENT_LIMIT_BYTES:
        raise Unrenderable(f"longer than {ARGUMENT_LIMIT_BYTES} bytes: {text[:40]!r}...")
    return f'"{escaped}"'


def check_text(text: str) -> None:
    if _CONTROL.search(text):
        raise Unrenderable(f"control characters cannot be written into a configuration: {text[:80]!r}")
    if _SURROGATE.search(text):
        raise Unrenderable("not valid Unicode text")
    if len(text.encode()) > ARGUMENT_LIMIT_BYTES:
        raise Unrenderable(f"longer than {ARGUMENT_LIMIT_BYTES} bytes: {text[:40]!r}...")


def literal(text: str, *, what: str) -> str:
    """The text itself, for places where NGINX would expand a variable that nobody means."""
    if "$" in text:
        raise Unrenderable(f"{what} must not contain '$': {text[:80]!r}")
    return text


def split_arguments(text: str) -> tuple[str, ...]:
    """The arguments that NGINX would read from `text`, which must be those of one directive."""
    check_text(text)
    found: list[str] = []
    position = 0
    while position < len(text):
        if text[position] == " ":
            position += 1
        elif text[position] in "\"'":
            end = _end_of_quoted(text, position)
            found.append(unescaped(text[position + 1 : end - 1]))
            position = end
        else:
            end = _end_of_bare(text, position)
            found.append(unescaped(text[position:end]))
            position = end
    return tuple(found)


def _end_of_quoted(text: str, start: int) -> int:
    position = start + 1
    while position < len(text):
        if text[position] == "\\":
            position += 2
        elif text[position] == text[start]:
            if position + 1 < len(text) and text[position + 1] != " ":
                raise Unrenderable(f"a blank must follow the closing quote: {text[:80]!r}")
            return position + 1
        else:
            position += 1
    raise Unrenderable(f"ends inside quotes: {text[:80]!r}")


def _end_of_bare(text: str, start: int) -> int:
    if text[start] in ";{}#":
        raise Unrenderable(f"{text[start]!r} is not part of a directive's arguments: {text[:80]!r}")
    position, variable = start, False
    while position < len(text) and text[position] != " ":
        character = text[position]
        if character == "{" and variable:  # of ${name}
            position += 1
            continue
        if character in ";{":
            raise Unrenderable(f"{character!r} must stand between quotes: {text[:80]!r}")
        variable = character == "$"
        position += 2 if character == "\\" else 1
    if position > len(text):
        raise Unrenderable(f"ends after a backslash: {text[:80]!r}")
    return position


def unescaped(raw: str) -> str:
    """What NGINX makes of a token: a backslash goes before a quote or another, and stays elsewhere."""
    found: list[str] = []
    position = 0
    while position < len(raw):
        pair = raw[position : position + 2]
        if pair in ('\\"', "\\'", "\\\\"):
            found.append(pair[1])
            position += 2
        elif pair in ("\\t", "\\r", "\\n"):
            raise Unrenderable(f"NGINX would read {pair!r} as a control character")
        else:
            found.append(raw[position])
            position += 1
    return "".join(found)


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
