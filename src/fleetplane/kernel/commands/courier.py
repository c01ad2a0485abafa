"""The interface of the ledger to the courier that delivers commands, and the ledger's limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from fleetplane.kernel.commands.rules import Command, CommandTarget
from fleetplane.kernel.errors import InvalidArgument, ResourceExhausted
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLimits:
    targets: int = 10_000
    """Of one command: about 300 bytes each, 3 MB in one transaction."""
    open: int = 100_000
    """Targets without an outcome in one channel; about 1 KB each in memory, 100 MB."""
    payload_bytes: int = 256 * 1024
    result_bytes: int = 16 * 1024
    """Kept with a target's outcome."""
    deliver_seconds: float = 30 * 86_400.0
    run_seconds: float = 86_400.0
    keep_seconds: float = 7 * 86_400.0
    """How long a finished command can be looked up."""
    retry_seconds: float = 5.0
    """After which a target that is there, but took nothing, is tried again."""

    def check(
        self,
        targets: Sequence[str],
        payload: bytes,
        *,
        deliver_seconds: float,
        run_seconds: float,
        already_open: int,
    ) -> None:
        """Refuse a command that is too much."""
        if not 1 <= len(targets) <= self.targets or len(set(targets)) != len(targets):
            raise InvalidArgument(f"a command has 1 to {self.targets} different targets", field="targets")
        if len(payload) > self.payload_bytes:
            raise InvalidArgument(f"a command's content has at most {self.payload_bytes} bytes")
        if not 0 < deliver_seconds <= self.deliver_seconds:
            raise InvalidArgument(f"a command waits at most {self.deliver_seconds:g} seconds")
        if not 0 < run_seconds <= self.run_seconds:
            raise InvalidArgument(f"a command runs for at most {self.run_seconds:g} seconds")
        if already_open + len(targets) > self.open:
            raise ResourceExhausted(f"{already_open} commands are open, the most there may be")


class Courier(Protocol):
    """Delivers commands over the sessions of a channel's targets."""

    def is_present(self, target: str) -> bool: ...

    def has_room(self, target: str) -> bool:
        """Whether a target that is present would take one more; if not, `room` is called when it would."""

    def deliver(self, target: str, command: Command) -> bool:
        """Put a command on the target's session; False if nothing took it.

        Raises if no session of this target will ever take it; that is its outcome then.
        """

    def recall(self, target: str, command: str, reason: str) -> None:
        """Tell the target that nobody waits for the command any more."""


class IssuedBeside(Protocol):
    """What an issuer writes of its own together with a command: both are there, or neither."""

    def touches(self, command: str) -> Iterable[Key]: ...

    def write(self, draft: Draft, command: Command) -> object:
        """Its record, for who follows the transaction (`IssueResult`)."""


class IssueResult(NamedTuple):
    """What the transaction that issues a command returns."""

    command: Command
    targets: Sequence[CommandTarget]
    beside: object
    """What its issuer wrote of its own; None if nothing."""
