"""Regular expressions that cannot be turned against us.

They are matched by automaton (RE2), in time that grows with the text and never with its square. A
program that grows too large is refused when it is made. On a machine for which that library has no
build there are none for callers; what the node's owner wrote is then matched by Python, because the
owner can hang this agent in simpler ways.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Protocol

from fleetplane.kernel.errors import InvalidArgument, Unimplemented

LIBRARY: Final = "re2"
PATTERN_LIMIT: Final = 512
"""In characters."""
PROGRAM_LIMIT_BYTES: Final = 64 * 1024
"""Of the automaton: then the worst pattern takes 0.15 s of a line of 8 KiB, and common ones microseconds."""
REPLACEMENT: Final = "[redacted]"


class Pattern(Protocol):
    def search(self, text: str) -> object: ...

    def fullmatch(self, text: str) -> object: ...


def compiled(pattern: str, *, field: str, trusted: bool = False) -> Pattern:
    """InvalidArgument names the field; Unimplemented says that this machine has no safe matcher."""
    if len(pattern) > PATTERN_LIMIT:
        raise InvalidArgument(f"a pattern has at most {PATTERN_LIMIT} characters", field=field)
    library = _library()
    if library is None:
        if not trusted:
            raise Unimplemented(
                "this node has no matcher that is safe for patterns of others",
                field=field,
                hint="use a plain text, or install google-re2 on the node",
                details={"cause": "no-re2"},
            )
        try:
            return re.compile(pattern)
        except re.error as error:
            raise InvalidArgument(f"{pattern!r} is no pattern: {error}", field=field) from error
    options = library.Options()
    options.log_errors = False
    options.max_mem = PROGRAM_LIMIT_BYTES
    try:
        made: Pattern = library.compile(pattern, options)
    except library.error as error:
        words = error.args[0].decode(errors="replace") if error.args else "it cannot be read"
        raise InvalidArgument(f"{pattern!r} is no pattern: {words}", field=field) from error
    return made


@dataclass(frozen=True, slots=True)
class Redaction:
    """What is cut out of logs and of audited arguments; decided by the node's owner."""

    patterns: tuple[Any, ...] = ()

    @classmethod
    def of(cls, patterns: tuple[str, ...], *, field: str) -> Redaction:
        return cls(tuple(compiled(pattern, field=field, trusted=True) for pattern in patterns))

    def clean(self, text: str) -> str:
        for pattern in self.patterns:
            text = pattern.sub(REPLACEMENT, text)
        return text


def _library() -> ModuleType | None:
    try:
        return importlib.import_module(LIBRARY)
    except ImportError:
        return None
