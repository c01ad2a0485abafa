"""How a command ends: one line on stderr, one exit code, and standard streams that may be closed.

The only place where the command line turns exceptions into words. It does not import gRPC: an
error of a library that was never loaded cannot have been raised.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from enum import IntEnum

from fleetplane.kernel.errors import FleetplaneError


def hold() -> None:
    """See to it that descriptors 0, 1 and 2 are taken, whatever we were started with.

    Otherwise the next file to be opened gets the number of the closed stream: a database would then
    be where some library prints its warnings. What is put in place can be opened, but neither read
    nor written, so that lost output is an error and not a success.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if number else os.O_WRONLY)  # the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def silence_stdout() -> None:
    """Discard further output after its reader has closed the pipe, so that not even the last flush fails."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


class Exit(IntEnum):
    OK = 0
    FAILURE = 1
    USAGE = 2
    CONDITION_NOT_MET = 3
    """A condition that was asked about does not hold."""
    NOT_FOUND = 4
    DENIED = 5
    CONFLICT = 6
    PARTIAL = 7
    """Some of several things failed."""
    UNAVAILABLE = 8
    TIMEOUT = 124
    INTERRUPTED = 130
    """128 + SIGINT, as shells report it."""
    BROKEN_PIPE = 141
    """128 + SIGPIPE: the reader of our output left."""


BY_GRPC_CODE = {
    1: Exit.FAILURE,  # CANCELLED
    3: Exit.USAGE,  # INVALID_ARGUMENT
    4: Exit.TIMEOUT,  # DEADLINE_EXCEEDED
    5: Exit.NOT_FOUND,
    6: Exit.CONFLICT,  # ALREADY_EXISTS
    7: Exit.DENIED,  # PERMISSION_DENIED
    8: Exit.UNAVAILABLE,  # RESOURCE_EXHAUSTED
    9: Exit.CONFLICT,  # FAILED_PRECONDITION
    10: Exit.CONFLICT,  # ABORTED
    14: Exit.UNAVAILABLE,
    16: Exit.DENIED,  # UNAUTHENTICATED
}
"""Every other code is a plain failure."""


class CommandFailed(Exception):
    """A command's own verdict, such as a condition that does not hold."""

    def __init__(self, code: Exit, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitFailure:
    code: Exit
    line: str


def explain(error: BaseException) -> ExitFailure | None:
    """The failure in words, or None for an error nobody foresaw, which deserves its traceback."""
    match error:
        case BaseExceptionGroup(exceptions=(first, *_)):
            return explain(first)
        case CommandFailed():
            return ExitFailure(code=error.code, line=_line(error.message, error.hint))
        case FleetplaneError():
            code = BY_GRPC_CODE.get(error.grpc_code, Exit.FAILURE)
            return ExitFailure(code=code, line=_line(error.message, error.advice))
        case TimeoutError():
            return ExitFailure(code=Exit.TIMEOUT, line=_line(str(error) or "the time is up"))
        case OSError():
            return ExitFailure(code=Exit.FAILURE, line=_line(str(error)))
        case ModuleNotFoundError(name=str(name)) if not name.startswith("fleetplane") and _is_agent_only():
            hint = "pip install fleetplane brings it; fleetplane-agent has only what agents need"
            return ExitFailure(code=Exit.FAILURE, line=_line(f"{name} is not installed", hint))
        case _:
            return _explain_rpc(error)


def _is_agent_only() -> bool:
    """Whether the code is installed without what the server and its clients need."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution("fleetplane")
    except PackageNotFoundError:
        return True
    return False


def _explain_rpc(error: BaseException) -> ExitFailure | None:
    grpc = sys.modules.get("grpc")
    if grpc is None or not isinstance(error, grpc.RpcError) or not hasattr(error, "code"):
        return None
    status = error.code()
    code = BY_GRPC_CODE.get(int(status.value[0]), Exit.FAILURE)
    details = error.details() or "no further words"
    hint = ""
    if code is Exit.UNAVAILABLE and status.name == "UNAVAILABLE":
        hint = "is `fleetplane server` running there? --address names another place"
    if code is Exit.TIMEOUT:
        details, hint = "no answer in time", "--timeout gives it longer"
    return ExitFailure(code=code, line=_line(f"{status.name.lower().replace('_', ' ')}: {details}", hint))


def _line(message: str, hint: str = "") -> str:
    text = f"{message} ({hint})" if hint else message
    line = " ".join(text.split())
    # One line, and nothing that a terminal would obey, whatever came over the wire.
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line
    )
