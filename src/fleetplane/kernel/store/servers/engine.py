"""What a database owes that several servers share, one of them writing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fleetplane.kernel.store.engine import Author, Engine, Mark, Outcome, ResourceRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    alive: bool
    """Whether this server may go on as what it was."""
    holder: Author
    """Who wrote last."""
    now_ns: int


class SharedEngine(Engine, Protocol):
    async def enlist(self, server: str) -> int:
        """Say that a process of this server begins; returns its boot number. Earlier boots have ended."""
        ...

    async def renew(self, author: Author, number: int = 0) -> Renewal:
        """Say that a server is alive and has applied a group; with a term, also that it still writes."""
        ...

    async def take_over(self, before: Mark, author: Author, life_seconds: float) -> Outcome:
        """Become the one that writes, under the next term, if nobody is who renewed within `life_seconds`.

        Conditional on where the database stands, as a commit is: who takes over has seen everything.
        """
        ...

    async def leave(self, author: Author) -> None:
        """Let others take over at once."""
        ...

    async def resource(self, kind: str, scope: str, name: str) -> ResourceRow | None:
        """One resource as it is now."""
        ...
