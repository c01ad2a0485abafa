"""Who did what, in a chain that cannot be edited without showing.

Each entry is hashed together with the hash before it, so that changing, removing or inserting
one breaks every later link; under a key that is derived from the master key, so that whoever has the
database alone cannot make another chain. The number and hash of the last entry are also kept beside the
chain, so that cutting its tail shows too. This module makes and checks chains; it does not
know how entries are stored.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import msgspec

GENESIS = bytes(32)
"""What the first entry is chained to."""
ACTOR_LIMIT_BYTES = 1024
ACTION_LIMIT_BYTES = 256


class AuditedChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One thing that a transaction changed."""

    operation: str
    """`put`, `delete`, `claim`, `release`, `secret.put` or `secret.delete`; or, of the log itself, `lineage`
    (a new one began) or `archive` (of the entries that are named)."""
    kind: str
    scope: str
    name: str
    digest: str
    """SHA-256 of the new content, of a secret as it is sealed; empty where there is none."""


class ChainEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One transaction, in the form that is hashed: a JSON array with these members in this order."""

    seq: int
    """Counts entries from 1, without gaps."""
    revision: int
    """The store's revision after the transaction."""
    at_ns: int
    actor: str
    action: str
    changes: tuple[AuditedChange, ...]


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
class ChainVerdict:
    """What checking a chain found."""

    intact: bool
    entries: int
    """How many entries were found good."""
    revision: int
    """Of the last good entry."""
    broken_seq: int | None = None
    """The first entry that is not as it was written; None if intact, or if not an entry is at fault."""
    problem: str = ""
    notes: tuple[str, ...] = ()
    """Remarks of the verification that are not faults."""

    def __str__(self) -> str:
        good = f"{self.entries} entries, up to revision {self.revision}"
        return f"intact: {good}" if self.intact else f"not intact: {self.problem}; good are {good}"


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(ChainEntry)


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


def link(previous: bytes, entry: bytes, key: bytes = b"") -> bytes:
    """The hash of an entry: under a key, so that only its holder can make one; without, a plain one."""
    if key:
        return hmac.digest(key, previous + entry, "sha256")
    return hashlib.sha256(previous + entry).digest()


def append(previous: bytes, entry: ChainEntry, key: bytes = b"") -> Row:
    """The row that continues a chain whose last hash is `previous`."""
    encoded = _ENCODER.encode(entry)
    return Row(seq=entry.seq, hash=link(previous, encoded, key), entry=encoded)


def read(row: Row) -> ChainEntry:
    return _DECODER.decode(row.entry)


class ChainVerifier:
    """Checks a chain row by row, and remembers what content it says the store must hold."""

    def __init__(self, key: bytes = b"", anchors: AbstractSet[tuple[int, str]] = frozenset()) -> None:
        """With the key, everything must be under it; save the beginning of a chain older than keys."""
        self._key = key
        self._is_keyed = False
        self._seq = 0
        self._first = 1 << 62
        self._hash = GENESIS
        self._revision = 0
        self._content: dict[str, dict[Address, str]] = {what: {} for what, _ in WRITTEN.values()}
        self._broken: ChainVerdict | None = None
        self._anchors = anchors
        self._seen: set[tuple[int, str]] = set()
        self._lineages: list[tuple[int, str]] = []
        self._is_partial = False
        self._notes: list[str] = []

    @property
    def seq(self) -> int:
        """The last good entry."""
        return self._seq

    def begin_after(self, seq: int, link: bytes, revision: int) -> None:
        """Begin in the middle, on somebody else's word; what was written before is then not checked."""
        self._seq, self._hash, self._revision = seq, link, revision
        self._is_partial = True
        self.note(f"entries 1 to {seq} were not checked: they are archived elsewhere")

    def note(self, text: str) -> None:
        self._notes.append(text)

    def fail(self, problem: str, broken_seq: int | None = None) -> None:
        if self._broken is None:
            self._broken = self._verdict(problem, broken_seq)

    def has_seen(self, seq: int, link: str) -> bool:
        """Whether the chain had this entry, which was among the anchors; before a cut nobody can tell."""
        return (seq, link) in self._seen or (self._is_partial and seq < self._first)

    def end_of(self, lineage: str, *, current: str) -> float | None:
        """The entry with which a lineage ended, infinity for the current one; None for one of elsewhere."""
        if lineage == current:
            return float("inf")
        names = [name for _, name in self._lineages]
        following = names.index(lineage) + 1 if lineage in names else 0
        return self._lineages[following][0] if following < len(self._lineages) else None

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
        if self._key and link(self._hash, row.entry, self._key) == row.hash:
            if not self._is_keyed and self._seq and not self._is_partial:
                self.note(
                    f"entries 1 to {self._seq} are from before the log had a key; whoever had the database"
                    f" could rewrite them until entry {row.seq} was written"
                )
            self._is_keyed = True
        elif self._is_keyed or link(self._hash, row.entry) != row.hash:
            return f"entry {row.seq} does not match its hash"
        try:
            entry = read(row)
        except (msgspec.MsgspecError, UnicodeError) as error:
            return f"entry {row.seq} cannot be read: {error}"
        if entry.seq != row.seq:
            return f"entry {row.seq} says that it is number {entry.seq}"
        if entry.revision < self._revision:
            return f"entry {row.seq} goes back from revision {self._revision} to {entry.revision}"
        self._seq, self._hash, self._revision = row.seq, row.hash, entry.revision
        self._first = min(self._first, row.seq)
        if self._anchors and (anchor := (row.seq, row.hash.hex())) in self._anchors:
            self._seen.add(anchor)
        for change in entry.changes:
            self._note(change)
        return ""

    def _note(self, change: AuditedChange) -> None:
        if change.operation == "lineage":
            self._lineages.append((self._seq, change.name.partition(" ")[0]))
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
            if self._is_partial and key not in expected:
                continue
            wanted = expected.pop(key, None)
            if wanted != found and not (what == "secret" and wanted == ""):  # from before they had digests
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
        elif self._key and self._seq and not self._is_keyed:
            self._broken = self._verdict("no entry of the chain is under this master key")
        elif self._seq and head.revision != self._revision:
            problem = f"the store is at revision {head.revision}, its last entry at {self._revision}"
            self._broken = self._verdict(problem)

    def verdict(self) -> ChainVerdict:
        return replace(self._broken or self._verdict(""), notes=tuple(self._notes))

    def _verdict(self, problem: str, broken_seq: int | None = None) -> ChainVerdict:
        return ChainVerdict(
            intact=not problem,
            entries=self._seq,
            revision=self._revision,
            broken_seq=broken_seq,
            problem=problem,
        )


def verify(rows: Iterable[Row], head: Head | None = None, key: bytes = b"") -> ChainVerdict:
    """Check a whole chain; with `head`, also that nothing was cut off its end."""
    verifier = ChainVerifier(key)
    verifier.feed(rows)
    if head is not None:
        verifier.check_head(head)
    return verifier.verdict()


def _spelt(key: Address) -> str:
    return " ".join(filter(None, key))
