"""What a tool is: a name, what a call would touch, and how it is done.

A call is taken apart before anything runs: `claims` says which paths, programs and names it would
touch, so that the policy decides about all tools alike and a tool never decides about itself.
Packages offer their own through the entry point group named in `registry`.

Arguments are read by name, of one type, within bounds. They come as JSON does: all numbers are floating-
point ones, and nothing says what was left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from fleetplane.kernel.errors import InvalidArgument
from fleetplane.node.programs.run import Emit, ProgramStream

__all__ = (
    "BadArguments",
    "Claims",
    "CommandOutcomeReport",
    "Emit",
    "ErrorKind",
    "PermittedCall",
    "ProgramLimits",
    "ProgramPrivileges",
    "ProgramStream",
    "Tool",
    "ToolFailed",
    "ToolState",
)


class ErrorKind(StrEnum):
    """Why a command failed, in words that programs compare."""

    ENVELOPE_INVALID = "envelope_invalid"
    SECURITY_CONTEXT_NOT_FOUND = "security_context_not_found"
    POLICY_VIOLATION = "policy_violation"
    TOOL_NOT_LOCALLY_SUPPORTED = "tool_not_locally_supported"
    TOOL_NOT_FOUND = "tool_not_found"
    INVALID_ARGUMENTS = "invalid_arguments"
    INTERNAL = "internal"
    NONZERO_EXIT = "nonzero_exit"
    DRAINING = "draining"
    BUSY = "busy"
    INTERRUPTED = "interrupted"
    """The daemon was stopped while the command ran; whether it took effect is not known."""


class ToolState(StrEnum):
    OK = "ok"
    ERROR = "error"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


class BadArguments(InvalidArgument):
    reason = "BAD_ARGUMENTS"


class ToolFailed(Exception):
    """A tool's own verdict that the call came to nothing."""

    def __init__(self, kind: ErrorKind, message: str, *, exit_code: int = 0) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a call would touch. Paths are absolute, as the caller wrote them."""

    paths: tuple[str, ...] = ()
    command: str | None = None
    subcommand: str = ""
    variables: tuple[str, ...] = ()
    """Names that the call would set in a program's environment."""
    domains: tuple[str, ...] = ()
    timeout_seconds: float | None = None
    """The call's own wish; the deadline of the command still holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutcomeReport:
    """What came of a command."""

    state: ToolState = ToolState.OK
    exit_code: int = 0
    kind: str = ""
    message: str = ""
    stdout: bytes = b""
    """The end of it; all of it was streamed."""
    stderr: bytes = b""
    structured: Mapping[str, object] | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLimits:
    """Of one program and everything that it starts, by the machine's owner; 0 for none."""

    processes: int = 0
    memory_bytes: int = 0
    open_files: int = 0
    file_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPrivileges:
    """What programs may do beyond what the safe choice allows, by the machine's owner."""

    run_as: str = ""
    """The user that programs run as; empty for the daemon's own."""
    no_new_privileges: bool = True
    may_detach: bool = False
    """Whether processes that make a session of their own may outlive the command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PermittedCall:
    """One permitted call. Being cancelled is how it is told to stop; it returns once all has stopped."""

    arguments: Mapping[str, object]
    paths: Mapping[str, Path]
    """Every claimed path as it was judged: no link and no `..` is left in it."""
    environment: Mapping[str, str]
    emit: Emit
    output_limit_bytes: int
    limits: ProgramLimits = field(default_factory=ProgramLimits)
    privileges: ProgramPrivileges = field(default_factory=ProgramPrivileges)


@runtime_checkable
class Tool(Protocol):
    @property
    def name(self) -> str: ...

    def claims(self, arguments: Mapping[str, object]) -> Claims:
        """Raises BadArguments for a call that can never work, naming the argument."""
        ...

    async def run(self, call: PermittedCall) -> CommandOutcomeReport: ...


TEXT_LIMIT: Final = 32 * 1024
"""Of one argument: what Linux takes for one string of a command line is four times that."""
LIST_LIMIT: Final = 1024


def _bad(name: str, why: str) -> BadArguments:
    return BadArguments(f"{name}: {why}", field=name)


def only(arguments: Mapping[str, object], known: frozenset[str]) -> None:
    """Refuse what nobody reads: a misspelt limit must not pass for a limit."""
    for name in arguments:
        if name not in known:
            raise _bad(str(name)[:80], f"is not known; known are {', '.join(sorted(known))}")


def text(arguments: Mapping[str, object], name: str, default: str | None = None) -> str:
    value = arguments.get(name, default)
    if value is None:
        raise _bad(name, "is missing")
    return _text(value, name)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise _bad(name, "is no text")
    if "\0" in value:
        raise _bad(name, "holds a zero byte")
    if len(value) > TEXT_LIMIT:
        raise _bad(name, f"has more than {TEXT_LIMIT} characters")
    return value


def texts(arguments: Mapping[str, object], name: str) -> tuple[str, ...]:
    value = arguments.get(name, ())
    if not isinstance(value, list | tuple):
        raise _bad(name, "is no list")
    if len(value) > LIST_LIMIT:
        raise _bad(name, f"has more than {LIST_LIMIT} entries")
    return tuple(_text(entry, f"{name}[{index}]") for index, entry in enumerate(value))


def text_map(arguments: Mapping[str, object], name: str) -> dict[str, str]:
    value = arguments.get(name) or {}
    if not isinstance(value, Mapping):
        raise _bad(name, "is no object")
    if len(value) > LIST_LIMIT:
        raise _bad(name, f"has more than {LIST_LIMIT} entries")
    return {_text(key, name): _text(entry, f"{name}.{key}") for key, entry in value.items()}


def number(arguments: Mapping[str, object], name: str, default: float, *, low: float, high: float) -> float:
    value = arguments.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad(name, "is no number")
    if not low <= value <= high:  # not-a-number is refused too
        raise _bad(name, f"is not between {low:g} and {high:g}")
    return float(value)


def whole(arguments: Mapping[str, object], name: str, default: int, *, low: int, high: int) -> int:
    value = number(arguments, name, default, low=low, high=high)
    if value != int(value):
        raise _bad(name, "is no whole number")
    return int(value)


def flag(arguments: Mapping[str, object], name: str, *, default: bool) -> bool:
    value = arguments.get(name, default)
    if not isinstance(value, bool):
        raise _bad(name, "is neither true nor false")
    return value


def absolute_path(arguments: Mapping[str, object], name: str, default: str | None = None) -> str:
    value = text(arguments, name, default)
    if not value.startswith("/"):
        raise _bad(name, "is no absolute path")
    return value
