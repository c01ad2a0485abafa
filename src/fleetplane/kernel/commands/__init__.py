"""The outcome ledger: every target of every command ends in exactly one outcome."""

from fleetplane.kernel.commands.courier import CommandLimits, Courier, IssuedBeside
from fleetplane.kernel.commands.ledger import Commands
from fleetplane.kernel.commands.rules import (
    COMMAND,
    COMMAND_TARGET,
    OPEN,
    OUTCOMES,
    UNDER_WAY,
    Command,
    CommandState,
    CommandTarget,
    state_of,
)
from fleetplane.kernel.commands.runner import keep_deadlines, run

__all__ = [
    "COMMAND",
    "COMMAND_TARGET",
    "OPEN",
    "OUTCOMES",
    "UNDER_WAY",
    "Command",
    "CommandLimits",
    "CommandState",
    "CommandTarget",
    "Commands",
    "Courier",
    "IssuedBeside",
    "keep_deadlines",
    "run",
    "state_of",
]
