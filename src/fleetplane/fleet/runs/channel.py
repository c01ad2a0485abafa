"""What a domain brings so that its commands can be run on many agents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fleetplane.fleet.runs.policy import RunPolicy
from fleetplane.fleet.runs.records import RunKind, RunSpec, S
from fleetplane.fleet.runs.targets import Skipped, TargetCandidate
from fleetplane.kernel.commands import Commands, CommandTarget

T = TypeVar("T")
C = TypeVar("C")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrder(Generic[T, C]):
    """What an operator wants to have run: on whom, what, and with which care."""

    scope: str
    target: T
    call: C
    policy: RunPolicy
    actor: str
    keeps_absent: bool = False
    """Whether agents that are away take part and end as undeliverable, instead of being left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandIssue:
    """The command of a run, as the ledger takes it."""

    verb: str
    payload: bytes
    run_for_seconds: float
    """How long a target's answer is waited for once the command was sent."""
    repeatable: bool
    """Whether targets recognise a command that they have seen; only such a command is ever sent twice."""


class RunChannel(ABC, Generic[S, T, C]):
    """One domain's side of runs. `T` is how it writes targets, `C` what it can be asked to do."""

    domain: str
    """Its name: in logs, audit entries and names of tasks."""
    kind: RunKind[S]
    ledger: Commands
    nobody: str = "no agent that is meant can be reached"
    """The error of a run without targets."""
    nobody_cause: str = "NobodyReachable"

    @abstractmethod
    def candidates(self, scope: str, target: T) -> tuple[Sequence[TargetCandidate], Sequence[Skipped]]:
        """Who is meant within a scope, in the order of their turns; and the names in it that are nobody's."""

    @abstractmethod
    def is_present(self, name: str) -> bool:
        """Whether a target could be sent something now."""

    def is_able(self, _order: RunOrder[T, C], _name: str) -> bool:
        """Whether a target that is there knows the command at all."""
        return True

    @abstractmethod
    def issue(self, order: RunOrder[T, C]) -> CommandIssue:
        """The command of a run; raises `InvalidArgument` for what could not be carried out anywhere."""

    @abstractmethod
    def spec(self, order: RunOrder[T, C], common: RunSpec) -> S:
        """What is written down of a run."""

    def tenant(self, scope: str) -> str:
        """Whose runs are bounded together."""
        return scope

    def shown_id(self, name: str) -> str:
        """A run's id as clients know it."""
        return name

    def left_out(self, skipped: Collection[Skipped]) -> None:
        """Count those that a run leaves out."""

    def printed(self, _target: CommandTarget) -> Iterable[tuple[str, bytes]]:
        """What is kept of a target's output, by stream, for servers that heard nothing of it as it came."""
        return ()

    def target_ended(self, spec: S, target: CommandTarget) -> None:
        """Count a target that has its outcome. Called once for each, also across restarts."""


AnyChannel = RunChannel[Any, Any, Any]
