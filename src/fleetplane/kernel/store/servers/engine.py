"""The contract of a database that several servers share and write to, and the report of each server in it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fleetplane.kernel.store.engine import (
    DatabaseMark,
    Engine,
    GroupAuthor,
    GroupOutcome,
    GroupPage,
    ResourceRow,
    WriteGroup,
)
from fleetplane.kernel.store.notifiers.notifier import NO_BUS, BusState
from fleetplane.kernel.store.servers.level import SUPPORTED, Levels


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    agents: int = 0
    """Streams of agents that it holds."""
    controllers: int = 0
    """Leases of controllers that it holds."""
    bus: BusState = NO_BUS


Drafting = Callable[[GroupPage], Awaitable[WriteGroup | None]]
"""Given what the log has after the asked number, up to its end; returns what to write, if anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenewal:
    alive: bool
    """Whether this server may go on as what it was."""
    holder: GroupAuthor
    """Who took the seat last."""
    now_ns: int
    """The database's clock."""


class SharedEngine(Engine, Protocol):
    async def enlist(self, server: str, levels: Levels = SUPPORTED) -> int:
        """Say that a process of this server begins, and which levels of the store it supports; returns its
        boot number. Earlier boots have ended."""
        ...

    async def renew(self, author: GroupAuthor, number: int = 0) -> LeaseRenewal:
        """Say that a server is alive and has applied a group; with a term, also that it has the seat."""
        ...

    async def take_over(self, before: DatabaseMark, author: GroupAuthor, life_seconds: float) -> GroupOutcome:
        """Take the seat, under the next term, if nobody has it who renewed within `life_seconds`.

        Conditional on where the database stands, as a commit is: who takes over has seen everything.
        """
        ...

    async def commit_alone(self, *, after: int, limit: int, draft: Drafting) -> GroupOutcome | None:
        """Write a group while nobody else can: the end of the log is read, `draft` called, its group written.

        For whoever came too late several times. The others wait meanwhile, so that `draft` must not. None,
        without having written, if the log has more than about `limit` changes after the number, or `draft`
        wants nothing to be written. If it raises, `settle()` says what was written, as for `commit()`.
        """
        ...

    async def leave(self, author: GroupAuthor) -> None:
        """Let others take over at once."""
        ...

    async def living(self, life_seconds: float) -> Mapping[str, int]:
        """Servers that renewed within `life_seconds`, each with its boot."""
        ...

    async def supported(self, life_seconds: float) -> Sequence[Levels]:
        """The levels of each server that renewed within `life_seconds`."""
        ...

    async def hear(self, channel: str, seconds_ago: Mapping[str, float]) -> None:
        """Write down when agents were heard, by the database's clock; a later moment that is known stays."""
        ...

    async def heard(self, channel: str) -> Mapping[str, float]:
        """How many seconds ago each agent of a channel was heard, by any server."""
        ...

    async def forget_heard(self, channel: str, agents: Sequence[str]) -> None: ...

    async def trim_heard(self, channel: str, older_seconds: float) -> None:
        """Forget who was not heard for so long."""
        ...

    async def resource(self, kind: str, scope: str, name: str) -> ResourceRow | None:
        """One resource as it is now."""
        ...
