"""Log entries, and the filter of a reader with its regular expressions. Pure.

All given conditions must hold; among units, and among sources, one is enough. The cursor of an entry says
where it was found: one position for each source, so that a reader of several resumes all of them.

Regular expressions are matched by automaton (RE2), in time linear in the text. A pattern whose automaton
grows too large is refused when it is compiled. Where RE2 has no build, callers cannot use patterns; those of
the node's owner are then matched by Python, because the owner is trusted not to hang the agent.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import ModuleType
from typing import Any, Final, Protocol

from fleetplane.kernel.errors import InvalidArgument, ResourceExhausted, Unimplemented

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


TAIL_LINES: Final = 100
TAIL_LIMIT_LINES: Final = 10_000
MESSAGE_LIMIT_BYTES: Final = 64 * 1024
CONTAINS_LIMIT: Final = 1024
MATCHED_CHARACTERS: Final = 8 * 1024
"""Of a message, where a pattern looks."""
MATCH_SECONDS: Final = 0.5
"""For one message. Automata are fast, so a pattern that needs this long was made to."""
UNITS_LIMIT: Final = 16
UNIT_LIMIT: Final = 256
SOURCES_LIMIT: Final = 8
CURSOR_LIMIT: Final = 4096

JOURNAL: Final = "journal"
KERNEL: Final = "kernel"
AGENT: Final = "agent"
FILE: Final = "file:"


class Level(IntEnum):
    UNSPECIFIED = 0
    DEBUG = 1
    INFO = 2
    NOTICE = 3
    WARNING = 4
    ERROR = 5
    CRITICAL = 6
    ALERT = 7
    EMERGENCY = 8

    @classmethod
    def of_priority(cls, priority: int) -> Level:
        """The journal counts the other way: 7 is debugging, 0 an emergency."""
        return cls(8 - priority) if 0 <= priority <= 7 else cls.UNSPECIFIED

    @property
    def priority(self) -> int:
        return 8 - self.value if self else 7


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    at_ns: int
    message: str
    source: str
    position: str
    """Within its source: what follows it can be asked for."""
    level: Level = Level.UNSPECIFIED
    unit: str = ""
    hostname: str = ""
    pid: int = 0
    fields: Mapping[str, str] = field(default_factory=dict)
    dropped: int = 0
    """Entries that were lost on the way just before this one, because the reader was slow."""
    cursor: str = ""

    @property
    def size(self) -> int:
        """About what it takes in memory."""
        return 512 + len(self.message) * 2

    def with_message(self, message: str) -> LogEntry:
        return self if message == self.message else replace(self, message=message)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryQuery:
    """What a reader asks for, checked."""

    min_level: Level = Level.UNSPECIFIED
    units: frozenset[str] = frozenset()
    contains: str = ""
    regex: Pattern | None = None
    since_ns: int | None = None
    until_ns: int | None = None
    tail_lines: int | None = TAIL_LINES
    """None: everything there is after the cursor, or since the time asked for."""
    follow: bool = False
    positions: Mapping[str, str] = field(default_factory=dict)
    """By source, after which entry to resume."""
    sources: tuple[str, ...] = ()
    current_boot_only: bool = False

    @property
    def reads_content(self) -> bool:
        """Whether entries must be looked into; otherwise sources can do all the choosing."""
        return bool(self.contains) or self.regex is not None

    def wants(self, entry: LogEntry) -> bool:
        if self.since_ns is not None and entry.at_ns < self.since_ns:
            return False
        if self.until_ns is not None and entry.at_ns >= self.until_ns:
            return False
        # What does not say how grave it is counts as information.
        if self.min_level and (entry.level or Level.INFO) < self.min_level:
            return False
        if self.units and entry.unit not in self.units:
            return False
        return self._wants_message(entry.message)

    def _wants_message(self, message: str) -> bool:
        if self.contains and self.contains not in message.casefold():
            return False
        if self.regex is None:
            return True
        started = time.thread_time()  # not by the clock: a machine that stood still is no pattern's fault
        found = self.regex.search(message[:MATCHED_CHARACTERS])
        if time.thread_time() - started > MATCH_SECONDS:
            raise ResourceExhausted(
                f"the pattern took more than {MATCH_SECONDS:g} s for one message",
                field="regex",
                details={"cause": "regex"},
            )
        return bool(found)


def query(
    *,
    min_level: int = 0,
    units: tuple[str, ...] = (),
    contains: str = "",
    regex: str = "",
    since_ns: int | None = None,
    until_ns: int | None = None,
    tail_lines: int = 0,
    follow: bool = False,
    cursor: str = "",
    sources: tuple[str, ...] = (),
    current_boot_only: bool = False,
) -> EntryQuery:
    """The query, or InvalidArgument naming the field."""
    if min_level not in Level.__members__.values():
        raise InvalidArgument(f"min_level {min_level} is no level", field="min_level")
    if not 0 <= tail_lines <= TAIL_LIMIT_LINES:
        raise InvalidArgument(f"tail_lines is at most {TAIL_LIMIT_LINES}", field="tail_lines")
    if len(units) > UNITS_LIMIT or any(not _is_unit(unit) for unit in units):
        raise InvalidArgument(f"units are at most {UNITS_LIMIT} names of units", field="units")
    if len(sources) > SOURCES_LIMIT:
        raise InvalidArgument(f"sources are at most {SOURCES_LIMIT}", field="sources")
    if len(contains) > CONTAINS_LIMIT:
        raise InvalidArgument(f"contains has at most {CONTAINS_LIMIT} characters", field="contains")
    if since_ns is not None and until_ns is not None and until_ns <= since_ns:
        raise InvalidArgument("until is not after since", field="until")
    positions = parse_cursor(cursor)
    unlimited = not tail_lines and (bool(positions) or since_ns is not None)
    return EntryQuery(
        min_level=Level(min_level),
        units=frozenset(units),
        contains=contains.casefold(),
        regex=compiled(regex, field="regex") if regex else None,
        since_ns=None if positions else since_ns,
        until_ns=until_ns,
        tail_lines=None if unlimited else tail_lines or TAIL_LINES,
        follow=follow,
        positions=positions,
        sources=tuple(dict.fromkeys(sources)),
        current_boot_only=current_boot_only,
    )


def make_cursor(positions: Mapping[str, str]) -> str:
    return "|".join(f"{source}={position}" for source, position in positions.items())


def parse_cursor(cursor: str) -> Mapping[str, str]:
    if not cursor:
        return {}
    if len(cursor) > CURSOR_LIMIT or not cursor.isascii() or not cursor.isprintable():
        raise InvalidArgument("cursor is none of ours", field="cursor")
    positions: dict[str, str] = {}
    for part in cursor.split("|"):
        source, equals, position = part.partition("=")
        if not equals or not source or not position:
            raise InvalidArgument("cursor is none of ours", field="cursor")
        positions[source] = position
    return positions


def clipped(text: str) -> tuple[str, bool]:
    """At most so many bytes of it, and whether something is missing."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= MESSAGE_LIMIT_BYTES:
        return text, False
    return raw[:MESSAGE_LIMIT_BYTES].decode("utf-8", "ignore"), True


def _is_unit(unit: str) -> bool:
    """Units go into a program's arguments: a name, never an option or a pattern."""
    return (
        0 < len(unit) <= UNIT_LIMIT
        and unit.isascii()
        and unit.isprintable()
        and not unit.startswith("-")
        and not any(character in " *?[]/=" for character in unit)
    )
