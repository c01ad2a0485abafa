"""What the store asks of a database.

An engine keeps rows and makes groups of them durable; it decides nothing. Everything that a
resource, a revision or a watch means is above this line, so that a second engine is a second
set of statements and not a second set of rules.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fleetplane.kernel import audit


class ResourceRow(NamedTuple):
    kind: str
    scope: str
    name: str
    revision: int
    body: bytes


class EventRow(NamedTuple):
    revision: int
    ordinal: int
    """Within the transaction, from 0."""
    type: str
    kind: str
    scope: str
    body: bytes


class Claim(NamedTuple):
    """A value that only one owner may hold at a time."""

    kind: str
    scope: str
    field: str
    value: str


class ClaimRow(NamedTuple):
    kind: str
    scope: str
    field: str
    value: str
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where a database stands."""

    revision: int
    compacted: int
    """Events up to and including this revision are gone."""
    audit_seq: int
    audit_hash: bytes


@dataclass(slots=True, kw_only=True)
class WriteGroup:
    """Everything that becomes durable together, or not at all."""

    before: Mark
    """Where the writer believes the database stands; an engine refuses the group if it does not."""
    after: Mark
    puts: list[ResourceRow] = field(default_factory=list)
    deletes: list[tuple[str, str, str]] = field(default_factory=list)
    events: list[EventRow] = field(default_factory=list)
    kinds: list[tuple[str, int]] = field(default_factory=list)
    claims: list[ClaimRow] = field(default_factory=list)
    releases: list[Claim] = field(default_factory=list)
    secrets: list[tuple[str, bytes]] = field(default_factory=list)
    secret_deletes: list[tuple[str]] = field(default_factory=list)
    audit: list[audit.Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What memory is filled with at the start."""

    mark: Mark
    kinds: dict[str, int]
    claims: Sequence[ClaimRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPage:
    compacted: int
    """As of the same moment as the events."""
    events: Sequence[EventRow]
    complete: bool
    """Whether the page reaches the asked end; if not, it ends with the last event's revision."""


class Engine(Protocol):
    """One database, owned by one writer."""

    async def contents(self) -> Contents: ...

    def resources(self, kinds: Sequence[str]) -> AsyncIterator[Sequence[ResourceRow]]:
        """Every live resource of these kinds, in pages."""
        ...

    async def commit(self, group: WriteGroup) -> None:
        """Make the group durable. If it raises, ask `mark()` whether it did all the same."""
        ...

    async def mark(self) -> Mark:
        """Where the database stands, as a new reader would see it."""
        ...

    async def history(self, kind: str, *, after: int, until: int, limit: int) -> HistoryPage:
        """Logged events of a kind in (after, until], whole transactions, about `limit` at most."""
        ...

    async def secret(self, name: str) -> bytes | None: ...

    async def secret_names(self, prefix: str) -> Sequence[str]:
        """The names that begin with `prefix`, in order."""
        ...

    def audit(self, *, after: int = 0) -> AsyncIterator[Sequence[audit.Row]]:
        """The audit chain after an entry, in pages."""
        ...

    async def close(self) -> None: ...
