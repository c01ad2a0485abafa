"""What happens in a run, one class for each thing that can.

Each event has a number, so that a reader who was cut off goes on after the last one it saw. The
number counts in one feed only; `epoch` says in which.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from fleetplane.fleet.runs.records import RunState, Summary
from fleetplane.kernel.commands import CommandTarget


class Numbered(msgspec.Struct, frozen=True, kw_only=True):
    """What every event of a run has."""

    number: int = 0
    epoch: str = ""

    @property
    def mark(self) -> str:
        """By which a reader says how far it has come."""
        return f"{self.epoch}-{self.number}"

    @property
    def size(self) -> int:
        """Bytes of output in it."""
        return 0


class Started(Numbered, frozen=True):
    """The run began, or was taken up after a restart of the server."""

    targets: int
    skipped: int


class TargetStarted(Numbered, frozen=True):
    """The command was sent to a target."""

    name: str


class TargetOutput(Numbered, frozen=True):
    """A target printed something, or said how far it is."""

    name: str
    stream: str
    output: bytes

    @property
    def size(self) -> int:
        return len(self.output)


class TargetEnded(Numbered, frozen=True):
    """A target has its outcome, as the ledger wrote it."""

    target: CommandTarget

    @property
    def name(self) -> str:
        return self.target.name


class RunEnded(Numbered, frozen=True):
    """Every target has its outcome."""

    summary: Summary
    state: RunState


RunEvent: TypeAlias = Started | TargetStarted | TargetOutput | TargetEnded | RunEnded
