"""What a tool is: a name, what a call would touch, and how it is done.

A call is taken apart before anything runs: `claims` says which paths, programs and names it would
touch, so that the policy decides about all tools alike and a tool never decides about itself.
Packages offer their own through the entry point group named in `registry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from fleetplane.kernel.errors import InvalidArgument
from fleetplane.node.programs.output import Emit, ProgramStream

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
