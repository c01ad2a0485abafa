"""The template language, from text to tokens: where tags begin and end, and what stands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fleetplane.domains.instances.configuration.templates.functions import TemplateInvalid

_SPACE = " \t\r\n"
_LEFT = re.compile(r"\{\{(?:-(?=[ \t\r\n]))?")
_RIGHT = re.compile(r"[ \t\r\n]*\}\}|[ \t\r\n]+-\}\}")
_COMMENT = re.compile(r"(?:(?<=-)[ \t\r\n])?/\*.*?\*/", re.DOTALL)
_COMMENT_RIGHT = re.compile(r"\}\}|[ \t\r\n]-\}\}")  # no other space: that is how Go tells comments from code
_CHAIN = r"(?:\.[^\W\d]\w*)*"
_TOKEN = re.compile(
    rf"""(?P<space>[ \t\r\n]+)
    | (?P<string>"(?:[^"\\\n]|\\.)*")
    | (?P<raw>`[^`]*`)
    | (?P<variable>\$\w*{_CHAIN})
    | (?P<close>\){_CHAIN})
    | (?P<number>[+-]?(?:[0-9][\w.]*(?:(?<=[eE])[+-][0-9]+)?|\.[0-9][\w.]*))
    | (?P<field>(?:\.[^\W\d]\w*)+|\.)
    | (?P<word>[^\W\d]\w*)
    | (?P<declare>:=)
    | (?P<mark>[|(,=])
    """,
    re.VERBOSE,
)

OPERANDS = frozenset({"string", "raw", "variable", "close", "number", "field", "word"})
"""Tokens that are, or end, a value."""


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class TemplateTag:
    """What stands between one pair of braces."""

    line: int
    tokens: tuple[Token, ...]

    @property
    def keyword(self) -> str:
        return self.tokens[0].text if self.tokens and self.tokens[0].kind == "word" else ""


def pieces(text: str) -> Iterator[Text | TemplateTag]:
    """The template as texts and tags, with white space trimmed where markers ask for it."""
    at, trim = 0, False
    while True:
        left = _LEFT.search(text, at)
        plain = text[at : left.start()] if left else text[at:]
        plain = plain.lstrip(_SPACE) if trim else plain
        if left is None:
            yield from [Text(plain)] if plain else []
            return
        if left[0].endswith("-"):
            plain = plain.rstrip(_SPACE)
        yield from [Text(plain)] if plain else []
        line = text.count("\n", 0, left.start()) + 1
        tag, right = _tag(text, left, line)
        if tag is not None:
            yield tag
        at, trim = right.end(), "-" in right[0]


def _tag(text: str, left: re.Match[str], line: int) -> tuple[TemplateTag | None, re.Match[str]]:
    comment = _COMMENT.match(text, left.end())
    if comment is not None:
        right = _COMMENT_RIGHT.match(text, comment.end())
        if right is None:
            raise TemplateInvalid("a comment must be alone between its braces, without spaces", line=line)
        return None, right
    tokens: list[Token] = []
    at, glued = left.end(), False
    while (right := _RIGHT.match(text, at)) is None:
        token = _TOKEN.match(text, at)
        if token is None:
            raise _unreadable(text, at, line)
        kind = token.lastgroup or ""
        opens = kind in OPERANDS - {"close"} or token[0] == "("
        if glued and opens:
            raise TemplateInvalid(f"there must be a space before {token[0]!r}", line=line)
        if kind != "space":
            tokens.append(Token(kind, token[0]))
        at, glued = token.end(), kind in OPERANDS
    if not tokens:
        raise TemplateInvalid("there is nothing between the braces", line=line)
    return TemplateTag(line, tuple(tokens)), right


def _unreadable(text: str, at: int, line: int) -> TemplateInvalid:
    character = text[at : at + 1]
    if not character:
        return TemplateInvalid("this {{ is never closed; }} closes it", line=line)
    if character in '"`':
        return TemplateInvalid("a string is not closed", line=line)
    if character == "'":
        return TemplateInvalid(
            "character constants are not supported; use a string in double quotes", line=line
        )
    return TemplateInvalid(f"unexpected {character!r}", line=line)
