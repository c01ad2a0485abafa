"""How `fleetplane edge` ends: with the codes of every other verb, or with those documented for edge fleets.

The documented ones mean other things than the rest of the command line: 3 is "not allowed" there, and
"condition not met" everywhere else. Scripts that were written for them ask for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import wraps
from typing import Any, Literal, TypeVar

import click

from fleetplane.cli.exits import CommandFailed, Exit, explain
from fleetplane.kernel.errors import (
    AlreadyExists,
    Conflict,
    FailedPrecondition,
    FleetplaneError,
    InvalidArgument,
    PermissionDenied,
    Unauthenticated,
)

F = TypeVar("F", bound=Callable[..., Any])
Table = Literal["common", "documented"]
_CHOSEN = "fleetplane.edge.exit_codes"
"""Where the choice stands in click's context."""


class EdgeExit(IntEnum):
    """As documented for edge fleets."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    AUTH = 3
    CONFLICT = 4
    """Something is there already."""
    UNAVAILABLE = 5
    """No daemon that is meant can be reached."""
    HALTED = 6
    CANCELLED = 7
    DEADLINE = 8
    REQUIRE_MIN = 9


COMMON: Mapping[EdgeExit, Exit] = {
    EdgeExit.OK: Exit.OK,
    EdgeExit.FAILURE: Exit.FAILURE,
    EdgeExit.USAGE: Exit.USAGE,
    EdgeExit.AUTH: Exit.DENIED,
    EdgeExit.CONFLICT: Exit.CONFLICT,
    EdgeExit.UNAVAILABLE: Exit.UNAVAILABLE,
    EdgeExit.HALTED: Exit.PARTIAL,
    EdgeExit.CANCELLED: Exit.FAILURE,
    EdgeExit.DEADLINE: Exit.TIMEOUT,
    EdgeExit.REQUIRE_MIN: Exit.CONDITION_NOT_MET,
}
_BY_CAUSE = {"EdgeUnavailable": EdgeExit.UNAVAILABLE, "RequireMinNotSatisfied": EdgeExit.REQUIRE_MIN}


def exit_codes_option(command: F) -> F:
    """Lets whoever calls choose the table, for a group and all its verbs."""

    def keep(context: click.Context, _parameter: click.Parameter, value: Table) -> None:
        context.meta[_CHOSEN] = value

    return click.option(
        "--exit-codes",
        type=click.Choice(["common", "documented"]),
        default="common",
        show_default=True,
        envvar="FLEETPLANE_EDGE_EXIT_CODES",
        show_envvar=True,
        expose_value=False,
        callback=keep,
        help="Those of every verb, or those that are documented for edge fleets.",
    )(command)


def is_documented() -> bool:
    """Whether the verb that runs is to end with the documented codes."""
    context = click.get_current_context(silent=True)
    return context is not None and context.meta.get(_CHOSEN) == "documented"


def code_of(error: BaseException) -> EdgeExit:
    """The documented code of an error."""
    if (known := _caused(error)) is not None:
        return known
    match error:
        case Unauthenticated() | PermissionDenied():
            return EdgeExit.AUTH
        case InvalidArgument():
            return EdgeExit.USAGE
        case AlreadyExists() | Conflict() | FailedPrecondition():
            return EdgeExit.CONFLICT
        case TimeoutError():
            return EdgeExit.DEADLINE
    return EdgeExit.FAILURE


def _caused(error: BaseException) -> EdgeExit | None:
    return _BY_CAUSE.get(str(error.details.get("cause"))) if isinstance(error, FleetplaneError) else None


def _common(error: FleetplaneError | TimeoutError) -> Exception:
    """The error as the common table takes it, which cannot know what edge means by a cause."""
    known = _caused(error)
    if known is None or not isinstance(error, FleetplaneError):
        return error
    return CommandFailed(COMMON[known], error.message, hint=error.advice or "")


def edge_exits(command: F) -> F:
    """Errors become one line on stderr and an exit code of the table that was chosen."""

    @wraps(command)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        try:
            return command(*arguments, **named)
        except (FleetplaneError, TimeoutError) as error:
            if not is_documented():
                raise _common(error) from error
            failure = explain(error)
            assert failure is not None
            click.echo(f"fleetplane: {failure.line}", err=True)
            raise click.exceptions.Exit(code_of(error)) from error

    return wrapped  # type: ignore[return-value]
