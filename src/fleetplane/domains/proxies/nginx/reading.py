"""Foreign NGINX text as a tree, read by `crossplane`, the field's own parser.

NGINX and any other reader may part a text differently at its edges. That is no danger here: what
was read is what is checked, and what was checked is written anew (`blocks.emit`), so NGINX never
sees the text itself. What can be read in two ways is refused all the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Final

from fleetplane.domains.proxies.nginx.blocks import Directive, NginxBlock, Node
from fleetplane.domains.proxies.nginx.quoting import Unrenderable, check_text, split_arguments, unescaped

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
