"""What is written down about commands: each command, and each of its targets.

    COMMAND           in the scope it was issued in, named by its id
    COMMAND_TARGET    below it, in `{scope}/command/{id}`, named by the target

Both can be watched by scope. What a target printed is not written down here: see `Outputs`.
"""

from __future__ import annotations

import msgspec

from fleetplane.kernel.commands.rules import OPEN, UNDER_WAY, CommandState
from fleetplane.kernel.resources import Kind, Resource


class CommandSpec(msgspec.Struct, frozen=True, kw_only=True):
    channel: str
    """Which part of the server delivers it."""
    verb: str
    payload: bytes
    """For the courier; opaque here."""
    actor: str
    targets: int
    wait: bool
    """Whether it waits for targets that are away."""
    repeatable: bool
    """Whether a target recognises a command that it has seen."""
    run_for_ns: int


class CommandStatus(msgspec.Struct, frozen=True, kw_only=True):
    open: int
    """Targets without an outcome; with the outcomes these are all targets."""
    outcomes: dict[CommandState, int] = {}
    finished_at_ns: int | None = None


class CommandTargetSpec(msgspec.Struct, frozen=True, kw_only=True):
    command: str
    command_scope: str
    channel: str
    verb: str
    target: str
    deliver_by_ns: int


class TargetStatus(msgspec.Struct, frozen=True, kw_only=True):
    state: CommandState
    changed_at_ns: int
    deliveries: int = 0
    run_by_ns: int | None = None
    """While it is delivered and has no outcome."""
    detail: str = ""
    """The target's own message, or why there is none."""
    result: bytes = b""
    """The result that came with it; opaque here."""
    told_to_stop: bool = False
    """It was cancelled while a target had it that cannot stop: what that says later is the outcome."""
    session: int = 0
    """The target's session that it was sent in, where several servers have sessions; 0 on a database file."""


Command = Resource[CommandSpec, CommandStatus]
CommandTarget = Resource[CommandTargetSpec, TargetStatus]

COMMAND: Kind[CommandSpec, CommandStatus] = Kind("command", CommandSpec, CommandStatus, is_secret=True)
COMMAND_TARGET: Kind[CommandTargetSpec, TargetStatus] = Kind(
    "command-target", CommandTargetSpec, TargetStatus, is_secret=True
)


def targets_scope(scope: str, command: str) -> str:
    return f"{scope}/command/{command}" if scope else f"command/{command}"


def finished_before(command: Command, moment_ns: int) -> bool:
    status = command.status
    return status is not None and status.finished_at_ns is not None and status.finished_at_ns < moment_ns


def state_of(target: CommandTarget) -> CommandState:
    assert target.status is not None, "a target is written with its status"
    return target.status.state


def is_open(target: CommandTarget) -> bool:
    return state_of(target) in OPEN


def due_ns(target: CommandTarget) -> int | None:
    """When the present state has lasted long enough; None at the end."""
    if not is_open(target):
        return None
    assert target.status is not None
    under_way = state_of(target) in UNDER_WAY
    return target.status.run_by_ns if under_way else target.spec.deliver_by_ns
