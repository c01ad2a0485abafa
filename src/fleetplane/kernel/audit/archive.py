"""Archives of old audit entries, and the check of a whole audit log: archives, database and checkpoints.

An archive file holds a stretch of the chain line by line, compressed, and ends with a signed checkpoint of
its last entry. The entry that records the archiving has the file's digest, so an archive can be compared with
the chain, which continues from the archive's last hash. The check reads a database file without
disturbing a server that uses it.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fleetplane.kernel.audit import checkpoints as audit_checkpoints
from fleetplane.kernel.audit.chain import Address, ChainVerdict, ChainVerifier, Head, Row, digest
from fleetplane.kernel.audit.checkpoints import Checkpoint
from fleetplane.kernel.errors import IntegrityError, NotFound, Unavailable
from fleetplane.kernel.store.lineage import StoreStanding, standing

DIRECTORY = "audit"
"""In the data directory."""
_NAME = re.compile(r"audit-(\d{12})-(\d{12})\.jsonl\.gz")
LINE_LIMIT = 64 * 1024 * 1024


class Archived(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    hash: str
    entry: str


_LINES = msgspec.json.Decoder(Archived)


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    path: Path
    first: int
    last: int

    def rows(self) -> Iterator[Row]:
        try:
            with gzip.open(self.path, "rb") as file:
                for line in file:
                    if line.startswith(b"["):  # else it is the checkpoint at its end
                        found = _LINES.decode(line)
                        yield Row(seq=found.seq, hash=bytes.fromhex(found.hash), entry=found.entry.encode())
        except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
            raise IntegrityError(f"the archive {self.path} is damaged: {error}") from error

    def digest(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


def write(directory: Path, rows: Sequence[Row], checkpoint: bytes) -> Archive:
    """Keep a stretch of the chain, whole or not at all."""
    directory.mkdir(mode=0o700, exist_ok=True)
    first, last = rows[0].seq, rows[-1].seq
    path = directory / f"audit-{first:012d}-{last:012d}.jsonl.gz"
    staging = path.with_suffix(".new")
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
            for row in rows:
                made = Archived(seq=row.seq, hash=row.hash.hex(), entry=row.entry.decode())
                packed.write(msgspec.json.encode(made) + b"\n")
            packed.write(checkpoint + b"\n")
        file.flush()
        os.fsync(file.fileno())
    staging.replace(path)
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return Archive(path=path, first=first, last=last)


def found(directory: Path) -> list[Archive]:
    """All that are there, in order; of two that begin alike, the longer."""
    by_first: dict[int, Archive] = {}
    for path in sorted(directory.glob("audit-*.jsonl.gz")) if directory.is_dir() else []:
        if (match := _NAME.fullmatch(path.name)) is not None:
            one = Archive(path=path, first=int(match[1]), last=int(match[2]))
            if one.first not in by_first or by_first[one.first].last < one.last:
                by_first[one.first] = one
    return [by_first[first] for first in sorted(by_first)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a log is checked with."""

    key: bytes = b""
    """Of the chain; empty for one that has none."""
    public: bytes = b""
    """Of the checkpoints."""
    archives: Path | None = None
    archives_are_elsewhere: bool = False
    """Begin at the cut, on the word of its signed checkpoint, if the archives are not here."""
    anchors: Sequence[Checkpoint] = field(default_factory=tuple)
    """Checkpoints that were kept elsewhere."""


async def verify_file(path: Path, key: bytes = b"", means: Means | None = None) -> ChainVerdict:
    """Check the chain in a database file, read-only, whether or not a server is using it."""
    return await asyncio.to_thread(_verify_file, path, means or Means(key=key))


def _verify_file(path: Path, means: Means) -> ChainVerdict:
    if not path.is_file():
        raise NotFound(f"there is no database at {path}")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            database.execute("BEGIN")  # one snapshot for all that follows, while the server writes on
            return _verify(database, means)
    except sqlite3.OperationalError as error:
        raise Unavailable(f"{path} cannot be read: {error}") from error
    except sqlite3.DatabaseError as error:
        raise IntegrityError(f"{path} is damaged: {error}") from error


def _verify(database: sqlite3.Connection, means: Means) -> ChainVerdict:
    # Without the record of its end, a chain that was cut would look like a whole one.
    stand = standing(database) or StoreStanding("", 0, 0, b"", "")
    verifier = ChainVerifier(means.key, anchors={(one.seq, one.hash) for one in means.anchors})
    first = database.execute("SELECT min(seq) FROM audit").fetchone()[0]
    if stand.audit_cut and first is not None and first > 1:
        _feed_archives(verifier, means, stand.audit_cut, until=first - 1)
    rows = database.execute("SELECT seq, CAST(hash AS BLOB), CAST(entry AS BLOB) FROM audit ORDER BY seq")
    verifier.feed(Row(seq=number, hash=link, entry=entry) for number, link, entry in rows)
    verifier.check_head(Head(revision=stand.revision, seq=stand.audit_seq, hash=stand.audit_hash))
    for what, query in _HELD.items():
        verifier.check_content(what, _held(database, query))
    _check_anchors(verifier, means.anchors, stand.lineage)
    return verifier.verdict()


def _feed_archives(verifier: ChainVerifier, means: Means, cut: str, *, until: int) -> None:
    archives = [] if means.archives is None else found(means.archives)
    needed = [one for one in archives if one.first <= until]
    if needed and needed[0].first == 1:
        for one in needed:
            verifier.feed(row for row in one.rows() if verifier.seq < row.seq <= until)
        return
    if not means.archives_are_elsewhere:
        verifier.fail(
            f"entries 1 to {until} were archived, and their archives are not all in {means.archives};"
            " name their folder, or say that they are elsewhere"
        )
        return
    checkpoint = audit_checkpoints.read(cut, means.public)
    if checkpoint.seq != until:
        verifier.fail(f"the chain begins after entry {until}, but was archived up to entry {checkpoint.seq}")
        return
    verifier.begin_after(checkpoint.seq, bytes.fromhex(checkpoint.hash), checkpoint.revision)


def _check_anchors(verifier: ChainVerifier, anchors: Iterable[Checkpoint], lineage: str) -> None:
    """Every checkpoint names an entry that is still there; save what a new lineage began without."""
    for one in anchors:
        ended = verifier.end_of(one.lineage, current=lineage)
        if ended is None:
            verifier.fail(
                f"a checkpoint of entry {one.seq} is of lineage {one.lineage[:8]}, which is not this log's"
            )
        elif one.seq >= ended:
            verifier.note(f"entry {one.seq} of lineage {one.lineage[:8]} was given up with entry {ended}")
        elif one.seq > verifier.seq:
            verifier.fail(
                f"the chain ends at entry {verifier.seq}, but a checkpoint tells of entry {one.seq}",
                broken_seq=verifier.seq + 1,
            )
        elif not verifier.has_seen(one.seq, one.hash):
            verifier.fail(f"entry {one.seq} is not the one that a checkpoint tells of", broken_seq=one.seq)


# Cast, because an edited column may have become text that cannot even be read as such.
_HELD = {
    "resource": "SELECT kind, scope, name, CAST(body AS BLOB) FROM resources",
    "claim": "SELECT kind, scope, field || '=' || value, CAST(owner AS BLOB) FROM claims",
    "secret": "SELECT '', '', name, CAST(blob AS BLOB) FROM secrets",
}


def _held(database: sqlite3.Connection, query: str) -> Iterator[tuple[Address, str]]:
    for kind, scope, name, content in database.execute(query):
        yield (kind, scope, name), "" if content is None else digest(content)
