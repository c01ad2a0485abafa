"""JSON with comments and trailing commas, that remembers where everything stands.

Strict otherwise: what this accepts is JSON once its comments (`//` and `/* */`) and the comma before a
closing bracket are taken out. Positions are what the parsers of this dialect for Python do not keep and
what a person with a faulty document needs, which is why there is one here.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fleetplane.kernel.errors import InvalidArgument

MAX_CHARACTERS = 4 << 20  # the size of one gRPC message; real documents have some tens of KiB
MAX_DEPTH = 64  # the schema needs 12; `args` and JSON files may nest on their own account
MAX_NUMBER_CHARACTERS = 400  # the longest number a double can need has 309 digits before the point

Path = tuple[str | int, ...]

_SKIP = re.compile(r"(?:[ \t\r\n]+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?P<real>(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"')
_STRING_START = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
_WORD = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_CONSTANTS: Mapping[str, object] = {"true": True, "false": False, "null": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPosition:
    line: int
    """From 1."""
    column: int
    """From 1, in characters."""


class SyntaxInvalid(InvalidArgument):
    """The text is not JSON with comments; the first place where it stops being so."""

    def __init__(self, message: str, position: TextPosition) -> None:
        super().__init__(message)
        self.position = position


@dataclass(frozen=True, kw_only=True)
class JsoncDocument:
    """A parsed text: its value, and the offset of every value and key in it."""

    text: str
    value: object
    values_at: Mapping[Path, int]
    keys_at: Mapping[Path, int]
    duplicates: tuple[tuple[Path, int], ...] = ()
    """Members given more than once, with the offset of the later key. The later value is taken."""

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0, *(match.end() for match in re.finditer("\n", self.text))]

    def locate(self, offset: int) -> TextPosition:
        line = bisect_right(self._line_starts, offset)
        return TextPosition(line=line, column=offset - self._line_starts[line - 1] + 1)

    def position(self, path: Path) -> TextPosition:
        """Where the value at `path` begins; of its nearest existing ancestor when there is none."""
        while path and path not in self.values_at:
            path = path[:-1]
        return self.locate(self.values_at[path])

    def key_position(self, path: Path) -> TextPosition:
        """Where the key of the value at `path` begins."""
        return self.locate(self.keys_at[path]) if path in self.keys_at else self.position(path)


def parse(text: str) -> JsoncDocument:
    """Parse a whole document, or raise SyntaxInvalid for the first thing that is wrong with it."""
    text = text.removeprefix("\ufeff")
    parser = _JsoncParser(text=text)
    if len(text) > MAX_CHARACTERS:
        raise parser.error(f"the document has {len(text)} characters; the limit is {MAX_CHARACTERS}", 0)
    value, end = parser.value(parser.skip(0), ())
    end = parser.skip(end)
    if end != len(text):
        raise parser.error("there is more after the end of the document", end)
    return parser.document(value)


@dataclass(slots=True, kw_only=True)
class _JsoncParser:
    """Recursive descent; each method takes an offset and returns what it read and where it stopped."""

    text: str
    values_at: dict[Path, int] = field(default_factory=dict)
    keys_at: dict[Path, int] = field(default_factory=dict)
    duplicates: list[tuple[Path, int]] = field(default_factory=list)

    def document(self, value: object) -> JsoncDocument:
        return JsoncDocument(
            text=self.text,
            value=value,
            values_at=self.values_at,
            keys_at=self.keys_at,
            duplicates=tuple(self.duplicates),
        )

    def error(self, message: str, offset: int) -> SyntaxInvalid:
        return SyntaxInvalid(message, self.document(None).locate(min(offset, len(self.text))))

    def skip(self, at: int) -> int:
        """Over white space and comments."""
        match = _SKIP.match(self.text, at)
        assert match is not None
        end = match.end()
        if self.text.startswith("/*", end):
            raise self.error("this comment is never closed; */ closes it", end)
        if self.text.startswith("/", end):
            raise self.error("a comment begins with // or /*", end)
        return end

    def value(self, at: int, path: Path) -> tuple[object, int]:
        if len(path) > MAX_DEPTH:
            raise self.error(f"nested deeper than {MAX_DEPTH} levels", at)
        self.values_at[path] = at
        match self.text[at : at + 1]:
            case "{":
                return self.members(at, path)
            case "[":
                return self.elements(at, path)
            case '"':
                return self.string(at)
            case character if character and character in "-0123456789":
                return self.number(at)
            case _:
                return self.constant(at)

    def members(self, opened: int, path: Path) -> tuple[dict[str, object], int]:
        members: dict[str, object] = {}
        at = self.skip(opened + 1)
        while not self.text.startswith("}", at):
            if not self.text.startswith('"', at):
                raise self.expected('a key in double quotes or "}"', at, opened)
            key, end = self.string(at)
            member = (*path, key)
            if key in members:
                self.duplicates.append((member, at))
            self.keys_at[member] = at
            colon = self.skip(end)
            if not self.text.startswith(":", colon):
                raise self.expected(f'":" after the key "{key}"', colon, opened)
            members[key], end = self.value(self.skip(colon + 1), member)
            at = self.separator(end, "}", opened)
        return members, at + 1

    def elements(self, opened: int, path: Path) -> tuple[list[object], int]:
        elements: list[object] = []
        at = self.skip(opened + 1)
        while not self.text.startswith("]", at):
            element, end = self.value(at, (*path, len(elements)))
            elements.append(element)
            at = self.separator(end, "]", opened)
        return elements, at + 1

    def separator(self, at: int, closing: str, opened: int) -> int:
        """Over the comma to what comes next, or to the closing bracket."""
        end = self.skip(at)
        if self.text.startswith(",", end):
            return self.skip(end + 1)
        if self.text.startswith(closing, end):
            return end
        if end == len(self.text):
            raise self.expected(f'"," or "{closing}"', end, opened)
        # A missing comma shows at the next value, but belongs where the last one ended.
        raise self.error(f'expected "," or "{closing}" before {self.text[end]!r}', at)

    def string(self, at: int) -> tuple[str, int]:
        match = _STRING.match(self.text, at)
        if match is None:
            raise self.unfinished_string(at)
        text = match[0]
        value = json.loads(text) if "\\" in text else text[1:-1]
        if _LONE_SURROGATE.search(value):
            raise self.error("this string has half of a \\u surrogate pair, which is no character", at)
        return value, match.end()

    def unfinished_string(self, at: int) -> SyntaxInvalid:
        good = _STRING_START.match(self.text, at)
        assert good is not None
        end = good.end()
        found = self.text[end : end + 1]
        if found == "\\":
            return self.error(f"{self.text[end : end + 2]!r} is no escape sequence of JSON", end)
        if found in ("", "\n", "\r"):
            return self.error("this string is not closed before the end of its line", at)
        return self.error(f"a string holds the control character {found!r}; write it as an escape", end)

    def number(self, at: int) -> tuple[int | float, int]:
        match = _NUMBER.match(self.text, at)
        if match is None or self.text[match.end() : match.end() + 1].isalnum():
            raise self.error("this is not a JSON number", at)
        if len(match[0]) > MAX_NUMBER_CHARACTERS:
            raise self.error(f"this number has more than {MAX_NUMBER_CHARACTERS} characters", at)
        number = float(match[0]) if match["real"] else int(match[0])
        if isinstance(number, float) and math.isinf(number):
            raise self.error("this number is too large", at)
        return number, match.end()

    def constant(self, at: int) -> tuple[object, int]:
        match = _WORD.match(self.text, at)
        if match is not None and match[0] in _CONSTANTS:
            return _CONSTANTS[match[0]], match.end()
        if match is not None:
            raise self.error(f"{match[0]!r} is no JSON value; strings stand in double quotes", at)
        raise self.expected("a value", at, None)

    def expected(self, what: str, at: int, opened: int | None) -> SyntaxInvalid:
        if at < len(self.text):
            return self.error(f"expected {what}, found {self.text[at]!r}", at)
        ending = "" if opened is None else f"; {self.text[opened]!r} was opened {self.at_line(opened)}"
        return self.error(f"expected {what}, found the end of the document{ending}", at)

    def at_line(self, offset: int) -> str:
        return f"in line {self.document(None).locate(offset).line}"
