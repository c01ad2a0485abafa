"""The template language, from text to a tree: the part of Go's text/template that configurations use.

Fields, variables, pipelines, `if`, `with` and `range` with their `else`, comments, trim markers and the
built-in functions are in. `define`, `template`, `block`, `break`, `continue`, `nil`, and constants other than
strings, booleans and decimal numbers are not: a template that uses one is refused here, by line, rather than
rendered differently from what its author saw elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from fleetplane.domains.instances.configuration.templates.functions import FUNCTIONS, TemplateInvalid
from fleetplane.domains.instances.configuration.templates.tokens import (
    OPERANDS,
    TemplateTag,
    Text,
    Token,
    pieces,
)

MAX_TEMPLATE_CHARACTERS = 256 << 10  # sixteen times what a cloud takes as user data
MAX_NESTING = 32  # blocks within blocks, and parentheses within parentheses

_NUMBER = re.compile(
    r"(?P<int>[+-]?(?:0|[1-9][0-9]*))"
    r"|[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?[0-9]+[eE][+-]?[0-9]+"
)
_ESCAPE = re.compile(
    r"\\(?:([abfnrtv\\\"])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{3})|(.?))"
)
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\\": "\\", '"': '"'}
_OUTSIDE = {"define", "template", "block", "break", "continue"}

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Constant:
    value: object


@dataclass(frozen=True, slots=True)
class Field:
    names: Names
    """From the dot; none is the dot itself."""


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    """Without its dollar; the empty one is the data the template was given."""
    names: Names


@dataclass(frozen=True, slots=True)
class Function:
    name: str


@dataclass(frozen=True, slots=True)
class Nested:
    pipeline: Pipeline
    names: Names


Operand = Constant | Field | Variable | Function | Nested
Command = tuple[Operand, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    line: int
    commands: tuple[Command, ...]
    variables: Names = ()
    declares: bool = False


@dataclass(frozen=True, slots=True)
class TemplateAction:
    pipeline: Pipeline


class BlockKind(StrEnum):
    IF = "if"
    WITH = "with"
    RANGE = "range"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateBlock:
    kind: BlockKind
    pipeline: Pipeline
    body: tuple[Node, ...]
    otherwise: tuple[Node, ...]


Node = Text | TemplateAction | TemplateBlock


@dataclass(frozen=True, slots=True)
class Reference:
    """A field of the data that the template names, so that a validator can tell whether there is one."""

    names: Names
    line: int


@dataclass(frozen=True, slots=True)
class Tree:
    nodes: tuple[Node, ...]
    references: tuple[Reference, ...]


def parse(text: str) -> Tree:
    if len(text) > MAX_TEMPLATE_CHARACTERS:
        raise TemplateInvalid(f"the template has more than {MAX_TEMPLATE_CHARACTERS} characters", line=1)
    parser = _TemplateParser(pieces=list(pieces(text)))
    nodes, ended_by = parser.nodes(rebound=False)
    if ended_by is not None:
        raise TemplateInvalid(f"unexpected {{{{{ended_by.keyword}}}}}", line=ended_by.line)
    return Tree(nodes, tuple(parser.references))


@dataclass(slots=True, kw_only=True)
class _TemplateParser:
    pieces: list[Text | TemplateTag]
    at: int = 0
    depth: int = 0
    scope: list[str] = field(default_factory=lambda: [""])
    references: list[Reference] = field(default_factory=list)

    def nodes(self, *, rebound: bool) -> tuple[tuple[Node, ...], TemplateTag | None]:
        """Nodes up to `else`, `end` or the end of the text. `rebound`: the dot is not the data."""
        nodes: list[Node] = []
        while self.at < len(self.pieces):
            piece = self.pieces[self.at]
            self.at += 1
            if isinstance(piece, Text):
                nodes.append(piece)
            elif piece.keyword in ("else", "end"):
                return tuple(nodes), piece
            elif piece.keyword in list(BlockKind):
                nodes.append(self.block(piece, piece.tokens, rebound=rebound))
            elif piece.keyword in _OUTSIDE:
                raise TemplateInvalid(f"{{{{{piece.keyword}}}}} is not supported here", line=piece.line)
            else:
                nodes.append(TemplateAction(self.pipeline(piece, piece.tokens, rebound=rebound)))
        return tuple(nodes), None

    def block(self, tag: TemplateTag, tokens: tuple[Token, ...], *, rebound: bool) -> TemplateBlock:
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise TemplateInvalid(f"blocks are nested deeper than {MAX_NESTING}", line=tag.line)
        kind = BlockKind(tokens[0].text)
        outer = len(self.scope)
        pipeline = self.pipeline(tag, tokens[1:], rebound=rebound, of=kind)
        inner = len(self.scope)
        body, ended_by = self.nodes(rebound=rebound or kind is not BlockKind.IF)
        del self.scope[inner:]
        otherwise: tuple[Node, ...] = ()
        if ended_by is not None and ended_by.keyword == "else":
            otherwise, ended_by = self.otherwise(ended_by, kind, rebound=rebound)
        del self.scope[outer:]
        if ended_by is None:
            raise TemplateInvalid(f"{{{{{kind}}}}} is never ended; {{{{end}}}} ends it", line=tag.line)
        if len(ended_by.tokens) > 1:
            raise TemplateInvalid("unexpected words after end", line=ended_by.line)
        self.depth -= 1
        return TemplateBlock(kind=kind, pipeline=pipeline, body=body, otherwise=otherwise)

    def otherwise(
        self, tag: TemplateTag, kind: BlockKind, *, rebound: bool
    ) -> tuple[tuple[Node, ...], TemplateTag | None]:
        """What follows `else`. An `else if` is a block of its own that shares our `end`."""
        rest = tag.tokens[1:]
        if rest and rest[0].text == kind and kind is not BlockKind.RANGE:
            block = self.block(tag, rest, rebound=rebound)
            return (block,), TemplateTag(tag.line, (Token("word", "end"),))
        if rest:
            raise TemplateInvalid(f"unexpected {rest[0].text!r} after else", line=tag.line)
        nodes, ended_by = self.nodes(rebound=rebound)
        if ended_by is not None and ended_by.keyword == "else":
            raise TemplateInvalid("a second else", line=ended_by.line)
        return nodes, ended_by

    def pipeline(
        self, tag: TemplateTag, tokens: tuple[Token, ...], *, rebound: bool, of: BlockKind | None = None
    ) -> Pipeline:
        reader = _PipelineReader(tag=tag, tokens=tokens, scope=self.scope)
        pipeline = reader.whole(of)
        if not rebound:
            self.references += [Reference(names, tag.line) for names in reader.fields]
        self.references += [Reference(names, tag.line) for names in reader.data_fields]
        self.scope += pipeline.variables if pipeline.declares else ()
        return pipeline


@dataclass(slots=True, kw_only=True)
class _PipelineReader:
    tag: TemplateTag
    tokens: tuple[Token, ...]
    scope: list[str]
    at: int = 0
    depth: int = 0
    fields: list[Names] = field(default_factory=list)
    data_fields: list[Names] = field(default_factory=list)

    def error(self, message: str) -> TemplateInvalid:
        return TemplateInvalid(message, line=self.tag.line)

    def peek(self, offset: int = 0) -> Token:
        at = self.at + offset
        return self.tokens[at] if at < len(self.tokens) else Token("end", "")

    def whole(self, of: BlockKind | None) -> Pipeline:
        variables, declares = self.declaration(of)
        commands = self.commands()
        if self.at < len(self.tokens):
            raise self.error(f"unexpected {self.peek().text!r}")
        return Pipeline(line=self.tag.line, commands=commands, variables=variables, declares=declares)

    def declaration(self, of: BlockKind | None) -> tuple[Names, bool]:
        """`$x :=`, `$x =`, and for range `$key, $value :=`."""
        first = self.peek()
        if first.kind != "variable" or self.peek(1).text not in (":=", "=", ","):
            return (), False
        variables = [first]
        if self.peek(1).text == ",":
            if of is not BlockKind.RANGE or self.peek(2).kind != "variable":
                raise self.error("only range declares two variables")
            variables.append(self.peek(2))
        operator = self.peek(2 * len(variables) - 1).text
        if operator not in (":=", "=") or (operator == "=" and of is not None):
            raise self.error(f"expected := after {variables[-1].text}")
        self.at = 2 * len(variables)
        names = tuple(variable.text[1:] for variable in variables)
        if any("." in name or not name for name in names):
            raise self.error(f"cannot declare {first.text}")
        if operator == "=" and names[0] not in self.scope:
            raise self.error(f"undefined variable ${names[0]}")
        return names, operator == ":="

    def commands(self) -> tuple[Command, ...]:
        commands = [self.command()]
        while self.peek().text == "|" and self.peek().kind == "mark":
            self.at += 1
            commands.append(self.command())
            if not isinstance(commands[-1][0], Function):
                raise self.error("only a function can stand behind |")
        return tuple(commands)

    def command(self) -> Command:
        operands: list[Operand] = []
        while (operand := self.operand()) is not None:
            operands.append(operand)
        if not operands:
            found = self.peek().text
            raise self.error(f"a value is missing before {found!r}" if found else "a value is missing")
        first = operands[0]
        if len(operands) > 1 and not isinstance(first, Function):
            raise self.error(
                f"only a function can be followed by arguments; unexpected {self.peek(-1).text!r}"
            )
        return tuple(operands)

    def operand(self) -> Operand | None:
        token = self.peek()
        if token.kind == "mark" and token.text == "(":
            return self.nested()
        if token.kind not in OPERANDS or token.kind == "close":
            return None
        self.at += 1
        match token.kind:
            case "string":
                return Constant(self.unquoted(token.text[1:-1]))
            case "raw":
                return Constant(token.text[1:-1].replace("\r", ""))
            case "number":
                return Constant(self.number(token.text))
            case "field":
                names = tuple(token.text.split(".")[1:]) if token.text != "." else ()
                self.fields.append(names)
                return Field(names)
            case "variable":
                return self.variable(token.text[1:])
            case _:
                return self.word(token.text)

    def nested(self) -> Nested:
        self.at += 1
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise self.error(f"parentheses are nested deeper than {MAX_NESTING}")
        commands = self.commands()
        close = self.peek()
        if close.kind != "close":
            raise self.error("a ( is never closed")
        self.at += 1
        self.depth -= 1
        return Nested(Pipeline(line=self.tag.line, commands=commands), tuple(close.text.split(".")[1:]))

    def variable(self, text: str) -> Variable:
        name, *names = text.split(".")
        if name not in self.scope:
            raise self.error(f"undefined variable ${name}")
        if not name:
            self.data_fields.append(tuple(names))
        return Variable(name, tuple(names))

    def word(self, text: str) -> Operand:
        if text in ("true", "false"):
            return Constant(text == "true")
        if text == "nil":
            raise self.error("nil is not supported here")
        if text not in FUNCTIONS:
            raise self.error(f"there is no function {text!r}; known: {', '.join(sorted(FUNCTIONS))}")
        return Function(text)

    def number(self, text: str) -> int | float:
        match = _NUMBER.fullmatch(text)
        if match is None or len(text) > 40:
            raise self.error(f"{text!r} is not a decimal number")
        return int(text) if match["int"] else float(text)

    def unquoted(self, text: str) -> str:
        def character(match: re.Match[str]) -> str:
            simple, byte, short, long, octal, wrong = match.groups()
            if simple:
                return _ESCAPES[simple]
            code = int(octal, 8) if octal else int(byte or short or long or "ffffffff", 16)
            limit = 0x7F if byte or octal else 0x10FFFF  # a byte above it would be a piece of a character
            if wrong is not None or code > limit or 0xD800 <= code <= 0xDFFF:
                raise self.error(f"{match[0]!r} is no escape sequence for text")
            return chr(code)

        return _ESCAPE.sub(character, text)
