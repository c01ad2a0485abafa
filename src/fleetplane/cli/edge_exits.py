"""How `fleetplane edge` ends: with the codes that scripts around edge fleets already know."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import wraps
from typing import Any, TypeVar

import click

from fleetplane.cli.exits import explain
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


class EdgeExit(IntEnum):
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


_BY_CAUSE = {"EdgeUnavailable": EdgeExit.UNAVAILABLE, "RequireMinNotSatisfied": EdgeExit.REQUIRE_MIN}


def code_of(error: BaseException) -> EdgeExit:
    if isinstance(error, FleetplaneError) and error.details.get("cause") in _BY_CAUSE:
        return _BY_CAUSE[str(error.details["cause"])]
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


def edge_exits(command: F) -> F:
    """Errors become one line on stderr and an exit code of this table."""

    @wraps(command)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        try:
            return command(*arguments, **named)
        except (FleetplaneError, TimeoutError) as error:
            failure = explain(error)
            assert failure is not None
            click.echo(f"fleetplane: {failure.line}", err=True)
            raise click.exceptions.Exit(code_of(error)) from error

    return wrapped  # type: ignore[return-value]
