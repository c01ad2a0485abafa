"""The contract between the store and a database engine, and the rows of its log.

An engine keeps rows and makes groups of them durable; it decides nothing. The meaning of resources, revisions
and watches is above this contract, so that a second engine is a second set of statements and not a
second set of rules.

The log holds every change of the store in a form that a follower can apply. Changes of resources have
revisions of their own. A claim that is taken or released, a secret that is put or deleted (its name and
version, never its content) and a horizon that moves carry the revision of the store after their
transaction; they belong to no kind, so no watch sees them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.errors import Unavailable


class Superseded(Unavailable):
    """Another server writes now. This one stops: what it knows is no longer the state of the store."""

    reason = "SUPERSEDED"
    hint = "call the server that is active now"


class ResourceRow(NamedTuple):
    kind: str
    scope: str
    name: str
    revision: int
    body: bytes


class LogRow(NamedTuple):
    """One change; see `log.py`. Its place in the log is that in its group."""

    revision: int
    ordinal: int
    """How far into its transaction: `revision - ordinal` is the first revision of the transaction."""
    type: str
    kind: str
    scope: str
    body: bytes

    @property
    def transaction(self) -> int:
        return self.revision - self.ordinal


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


class GroupAuthor(NamedTuple):
    """Which process wrote a group."""

    server: str = ""
    boot: int = 0
    term: int = 0
    """Counts the processes that had the seat, where several can write; 0 for one that has it not."""


ALONE = GroupAuthor()
"""The only process that there can be."""


class SecretRow(NamedTuple):
    name: str
    blob: bytes
    version: int
    """The audit entry that put it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseMark:
    """Where a database stands."""

    number: int
    """Of the last group; without gaps."""
    revision: int
    compacted: int
    """Events up to and including this revision are gone, or about to go."""
    audit_seq: int
    audit_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveCut:
    """The end of what was archived of the audit chain."""

    seq: int
    """This entry and all before it go."""
    checkpoint: str


@dataclass(slots=True, kw_only=True)
class WriteGroup:
    """Everything that becomes durable together, or not at all."""

    id: bytes
    """By which it is found again, when its commit was in doubt."""
    author: GroupAuthor = ALONE
    before: DatabaseMark
    """Where the writer believes the database stands; if it does not, an engine writes nothing."""
    after: DatabaseMark
    """Its number is the next."""
    puts: list[ResourceRow] = field(default_factory=list)
    deletes: list[tuple[str, str, str]] = field(default_factory=list)
    log: list[LogRow] = field(default_factory=list)
    kinds: list[tuple[str, int]] = field(default_factory=list)
    releases: list[Claim] = field(default_factory=list)
    """Written before the claims: a claim that has an owner cannot be taken."""
    claims: list[ClaimRow] = field(default_factory=list)
    secrets: list[SecretRow] = field(default_factory=list)
    secret_deletes: list[tuple[str]] = field(default_factory=list)
    audit: list[audit.Row] = field(default_factory=list)
    cut: ArchiveCut | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """What became of a group."""

    written: bool
    """If not, the database stood elsewhere, and is as it was."""
    mark: DatabaseMark
    """Where it stands now."""
    author: GroupAuthor
    """Who brought it there."""
    now_ns: int
    """The database's clock."""
    alive: bool = True
    """Whether this author may write at all: its term is not over, or its process not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedGroup:
    """A group as followers read it."""

    id: bytes
    author: GroupAuthor
    mark: DatabaseMark
    """After it."""
    log: Sequence[LogRow]
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPage:
    """Consecutive groups, as of one moment."""

    head: DatabaseMark
    before: DatabaseMark | None
    """Where the database stood at the asked number; None if that is no longer kept."""
    groups: Sequence[LoggedGroup]
    """From the one after the asked number on; without it, that one is no longer kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreContents:
    """What memory is filled with at the start, all of one moment."""

    mark: DatabaseMark
    lineage: str
    """Of the database: another one has other revisions."""
    first_revision: int
    """Where this lineage began to count; what is lower was given out by another."""
    kinds: dict[str, int]
    claims: Sequence[ClaimRow]
    resources: AsyncIterator[Sequence[ResourceRow]]
    """Every live one of the asked kinds, in pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPage:
    compacted: int
    """As of the same moment as the events."""
    events: Sequence[LogRow]
    complete: bool
    """Whether the page reaches the asked end; if not, it ends with the last event's revision."""


class Engine(Protocol):
    """One database."""

    def load(self, kinds: Sequence[str]) -> AbstractAsyncContextManager[StoreContents]:
        """Everything that is kept of these kinds, as of one moment."""
        ...

    async def commit(self, group: WriteGroup) -> GroupOutcome:
        """Make the group durable in one call, if the database stands where the writer believes.

        If it raises, `settle()` says whether it was written all the same. Raises `OutcomeUnknown` if that
        would not tell: nothing may be written any more then.
        """
        ...

    async def settle(self, before: DatabaseMark, group_id: bytes, author: GroupAuthor) -> GroupOutcome:
        """Find out whether a group after `before` was written, and see that it stays so.

        Where its commit may still be under way, its number is taken by an empty group: then the outcome's
        mark is after that.
        """
        ...

    async def groups(self, *, after: int, limit: int) -> GroupPage:
        """The groups after a number, whole, until they have about `limit` changes."""
        ...

    async def trim(self, limit: int) -> int:
        """Delete at most so many rows of the log that lie behind the horizon; returns how many."""
        ...

    async def mark(self) -> DatabaseMark:
        """Where the database stands, as a new reader would see it."""
        ...

    async def lineage(self) -> str: ...

    async def history(self, kind: str, *, after: int, until: int, limit: int) -> HistoryPage:
        """Logged events of a kind in (after, until], whole transactions, about `limit` at most."""
        ...

    async def history_bytes(self) -> int:
        """What the bodies of all logged changes after the horizon take."""
        ...

    async def history_horizon(self, size_bytes: int) -> int:
        """The first revision up to which, from the horizon, the log weighs at least so much."""
        ...

    async def secret(self, name: str) -> bytes | None: ...

    async def secret_names(self, prefix: str) -> Sequence[str]:
        """The names that begin with `prefix`, in order."""
        ...

    async def audit_row(self, seq: int) -> audit.Row | None:
        """One entry of the chain; None if there is no such, or it was archived."""
        ...

    def audit(self, *, after: int = 0) -> AsyncGenerator[Sequence[audit.Row], None]:
        """The audit chain after an entry, in pages."""
        ...

    async def close(self) -> None: ...


class LogType(StrEnum):
    """Besides the types of events, which are those of `watch.EventType`."""

    CLAIMED = "CLAIMED"
    RELEASED = "RELEASED"
    SECRET = "SECRET"  # noqa: S105  # that one was put
    DROPPED = "DROPPED"
    """A secret."""
    HORIZON = "HORIZON"


class Claimed(msgspec.Struct, frozen=True, array_like=True):
    """That a value has an owner, or (released) that it had."""

    kind: str
    scope: str
    field: str
    value: str
    owner: str = ""

    @property
    def claim(self) -> Claim:
        return Claim(self.kind, self.scope, self.field, self.value)


class SecretChanged(msgspec.Struct, frozen=True, array_like=True):
    name: str
    version: int
    """The audit entry of the change."""


class HorizonMoved(msgspec.Struct, frozen=True, array_like=True):
    compacted: int


_encode = msgspec.msgpack.Encoder().encode


def _row(revision: int, sort: LogType, body: msgspec.Struct) -> LogRow:
    return LogRow(revision, 0, sort.value, "", "", _encode(body))


def of_claims(claims: Mapping[Claim, str | None], revision: int) -> list[LogRow]:
    return [
        _row(revision, LogType.RELEASED, Claimed(*claim))
        if owner is None
        else _row(revision, LogType.CLAIMED, Claimed(*claim, owner))
        for claim, owner in claims.items()
    ]


def of_secrets(secrets: Mapping[str, bytes | None], revision: int, version: int) -> list[LogRow]:
    return [
        _row(revision, LogType.DROPPED if blob is None else LogType.SECRET, SecretChanged(name, version))
        for name, blob in secrets.items()
    ]


def of_horizon(compacted: int, revision: int) -> LogRow:
    return _row(revision, LogType.HORIZON, HorizonMoved(compacted))


Entry = Claimed | SecretChanged | HorizonMoved
_BODIES: Mapping[str, type[Entry]] = {
    LogType.CLAIMED: Claimed,
    LogType.RELEASED: Claimed,
    LogType.SECRET: SecretChanged,
    LogType.DROPPED: SecretChanged,
    LogType.HORIZON: HorizonMoved,
}


def read(row: LogRow) -> Entry | None:
    """What a row says that is no change of a resource; None for one that is."""
    kind = _BODIES.get(row.type)
    return None if kind is None else msgspec.msgpack.decode(row.body, type=kind)
