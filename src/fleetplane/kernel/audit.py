"""Who did what, in a chain that cannot be edited without showing.

Each entry is hashed together with the hash before it, so that changing, removing or inserting
one breaks every later link. The number and hash of the last entry are also kept beside the
chain, so that cutting its tail shows too. This module makes and checks chains; it does not
know how entries are stored, save for `verify_file`, which reads a database file without
disturbing the server that may be using it.
"""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fleetplane.kernel.errors import IntegrityError, NotFound, Unavailable

GENESIS = bytes(32)
"""What the first entry is chained to."""
ACTOR_LIMIT_BYTES = 1024
ACTION_LIMIT_BYTES = 256


class Change(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One thing that a transaction changed."""

    operation: str
    """`put`, `delete`, `claim`, `release`, `secret.put` or `secret.delete`."""
    kind: str
    scope: str
    name: str
    digest: str
    """SHA-256 of the new content; empty where there is none, and for secrets, audited by name only."""


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One transaction, in the form that is hashed: a JSON array with these members in this order."""

    seq: int
    """Counts entries from 1, without gaps."""
    revision: int
    """The store's revision after the transaction."""
    at_ns: int
    actor: str
    action: str
    changes: tuple[Change, ...]


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One stored entry with its link."""

    seq: int
    hash: bytes
    entry: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What is kept beside the chain about its end."""

    revision: int
    seq: int
    hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What checking a chain found."""

    intact: bool
    entries: int
    """How many entries were found good."""
    revision: int
    """Of the last good entry."""
    broken_seq: int | None = None
    """The first entry that is not as it was written; None if intact, or if not an entry is at fault."""
    problem: str = ""

    def __str__(self) -> str:
        good = f"{self.entries} entries, up to revision {self.revision}"
        return f"intact: {good}" if self.intact else f"not intact: {self.problem}; good are {good}"


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Entry)


Address = tuple[str, str, str]
"""Kind, scope and name, as entries have them."""

WRITTEN: Mapping[str, tuple[str, bool]] = {
    "put": ("resource", True),
    "delete": ("resource", False),
    "claim": ("claim", True),
    "release": ("claim", False),
    "secret.put": ("secret", True),
    "secret.delete": ("secret", False),
}
"""What each operation is about, and whether it is there afterwards."""


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def link(previous: bytes, entry: bytes) -> bytes:
    return hashlib.sha256(previous + entry).digest()


def append(previous: bytes, entry: Entry) -> Row:
    """The row that continues a chain whose last hash is `previous`."""
    encoded = _ENCODER.encode(entry)
    return Row(seq=entry.seq, hash=link(previous, encoded), entry=encoded)


def read(row: Row) -> Entry:
    return _DECODER.decode(row.entry)


class Verifier:
    """Checks a chain row by row, and remembers what content it says the store must hold."""

    def __init__(self) -> None:
        self._seq = 0
        self._hash = GENESIS
        self._revision = 0
        self._content: dict[str, dict[Address, str]] = {what: {} for what, _ in WRITTEN.values()}
        self._broken: Verdict | None = None

    def feed(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if self._broken is not None:
                return
            problem = self._problem(row)
            if problem:
                self._broken = self._verdict(problem, broken_seq=self._seq + 1)

    def _problem(self, row: Row) -> str:
        if row.seq != self._seq + 1:
            return f"entry {self._seq + 1} is missing: the next one found is {row.seq}"
        if link(self._hash, row.entry) != row.hash:
            return f"entry {row.seq} does not match its hash"
        try:
            entry = read(row)
        except msgspec.MsgspecError as error:
            return f"entry {row.seq} cannot be read: {error}"
        if entry.seq != row.seq:
            return f"entry {row.seq} says that it is number {entry.seq}"
        if entry.revision < self._revision:
            return f"entry {row.seq} goes back from revision {self._revision} to {entry.revision}"
        self._seq, self._hash, self._revision = row.seq, row.hash, entry.revision
        for change in entry.changes:
            self._note(change)
        return ""

    def _note(self, change: Change) -> None:
        what, present = WRITTEN.get(change.operation, ("", False))
        key = (change.kind, change.scope, change.name)
        if present:
            self._content[what][key] = change.digest
        elif what:
            self._content[what].pop(key, None)

    def check_content(self, what: str, held: Iterable[tuple[Address, str]]) -> None:
        """Compare what the store holds, as (address, digest), with what the chain says it should."""
        if self._broken is not None:
            return
        expected = dict(self._content[what])
        for key, found in held:
            if expected.pop(key, None) != found:
                self._broken = self._verdict(f"{what} {_spelt(key)} is not what was last written")
                return
        if expected:
            missing = _spelt(next(iter(expected)))
            self._broken = self._verdict(f"{what} {missing} was written and never deleted, but is gone")

    def check_head(self, head: Head) -> None:
        """Compare the chain's end with what was recorded beside it."""
        if self._broken is not None:
            return
        if head.seq > self._seq:
            problem = f"the chain ends at entry {self._seq}, but {head.seq} were written"
            self._broken = self._verdict(problem, broken_seq=self._seq + 1)
        elif head.seq != self._seq or head.hash != self._hash:
            self._broken = self._verdict("the chain's end is not the one that was recorded")
        elif head.revision != self._revision:
            problem = f"the store is at revision {head.revision}, its last entry at {self._revision}"
            self._broken = self._verdict(problem)

    def verdict(self) -> Verdict:
        return self._broken or self._verdict("")

    def _verdict(self, problem: str, broken_seq: int | None = None) -> Verdict:
        return Verdict(
            intact=not problem,
            entries=self._seq,
            revision=self._revision,
            broken_seq=broken_seq,
            problem=problem,
        )


def verify(rows: Iterable[Row], head: Head | None = None) -> Verdict:
    """Check a whole chain; with `head`, also that nothing was cut off its end."""
    verifier = Verifier()
    verifier.feed(rows)
    if head is not None:
        verifier.check_head(head)
    return verifier.verdict()


async def verify_file(path: Path) -> Verdict:
    """Check the chain in a database file, read-only, whether or not a server is using it."""
    return await asyncio.to_thread(_verify_file, path)


def _verify_file(path: Path) -> Verdict:
    if not path.is_file():
        raise NotFound(f"there is no database at {path}")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.execute("BEGIN")  # one snapshot for all that follows, while the server writes on
            verifier = Verifier()
            rows = database.execute(
                "SELECT seq, CAST(hash AS BLOB), CAST(entry AS BLOB) FROM audit ORDER BY seq"
            )
            verifier.feed(Row(seq=seq, hash=hashed, entry=entry) for seq, hashed, entry in rows)
            recorded = database.execute("SELECT revision, audit_seq, audit_hash FROM meta").fetchall()
            # Without the record of its end, a chain that was cut would look like a whole one.
            revision, seq, hashed = recorded[0] if len(recorded) == 1 else (0, 0, b"")
            verifier.check_head(Head(revision=revision, seq=seq, hash=hashed))
            for what, query in _HELD.items():
                verifier.check_content(what, _held(database, query))
            return verifier.verdict()
    except sqlite3.OperationalError as error:
        raise Unavailable(f"{path} cannot be read: {error}") from error
    except sqlite3.DatabaseError as error:
        raise IntegrityError(f"{path} is damaged: {error}") from error


# Cast, because an edited column may have become text that cannot even be read as such.
_HELD = {
    "resource": "SELECT kind, scope, name, CAST(body AS BLOB) FROM resources",
    "claim": "SELECT kind, scope, field || '=' || value, CAST(owner AS BLOB) FROM claims",
    "secret": "SELECT '', '', name, NULL FROM secrets",
}


def _held(database: sqlite3.Connection, query: str) -> Iterator[tuple[Address, str]]:
    for kind, scope, name, content in database.execute(query):
        yield (kind, scope, name), "" if content is None else digest(content)


def _spelt(key: Address) -> str:
    return " ".join(filter(None, key))
