"""Check at the start that the database is the expected one and has lost nothing.

Beside the database lies a small file, its mark: the lineage of the database, and the last durable revision
and audit entry when the mark was written, at least once a second and at the end. A database that is
missing, older than its mark or of another lineage has lost acknowledged writes and is refused. After
accepting the loss, or restoring a backup, a new lineage begins: its revisions start above all that the old
one can have given out, so that no cursor of the old one is valid in the new one.

`adopt` checks that the audit chain was made with this key, or brings an unkeyed chain under it.
`standing` reads the same facts from a database file without opening the store.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import structlog

from fleetplane.kernel import boundary
from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.errors import IntegrityError
from fleetplane.kernel.store.draft import Draft
from fleetplane.kernel.store.engine import Engine

if TYPE_CHECKING:
    from fleetplane.kernel.store.store import Store


log = structlog.get_logger(__name__)

KEYED = "audit.keyed"
"""The first entry under a key, of a chain that began without: it names every secret with its digest, which
entries before it did not have."""


async def adopt(engine: Engine, store: Store, key: bytes) -> None:
    """Make sure that the chain ends under this key, or bring it there; refuse one of another key."""
    head = store.audit_head()
    if head.seq == 0:
        return
    last, before = await engine.audit_row(head.seq), await engine.audit_row(head.seq - 1)
    previous = audit.GENESIS if head.seq == 1 else None if before is None else before.hash
    if last is None or previous is None:
        raise IntegrityError(f"the end of the audit log is missing, at entry {head.seq}")
    if audit.link(previous, last.entry, key) == last.hash:
        return
    if audit.link(previous, last.entry) != last.hash:
        raise IntegrityError(
            "the audit log was not made with this master key",
            hint="start with the master key that this data directory was made with",
        )
    log.warning("audit.keyed", entries=head.seq)
    held = {name: await engine.secret(name) for name in await engine.secret_names("")}

    def change(draft: Draft) -> None:
        for name, blob in held.items():
            if blob is not None:
                draft.put_secret(name, blob)

    if held:  # else the next entry, whatever it is, begins the keyed chain
        await store.transact(change, actor="system", action=KEYED, touches=())


class StoreStanding(NamedTuple):
    lineage: str
    revision: int
    audit_seq: int
    audit_hash: bytes
    audit_cut: str
    """The signed checkpoint of the last audit entry that was archived."""


_NOW = (
    "SELECT lineage, revision, audit_seq, audit_hash, audit_cut FROM meta, groups"
    " WHERE number = (SELECT max(number) FROM groups)"
)
_BEFORE = "SELECT lineage, revision, audit_seq, audit_hash, audit_cut FROM meta"
"""Of a database that was not opened since every group has a row."""


def standing(database: sqlite3.Connection) -> StoreStanding | None:
    """None if the database does not say: a row is missing that there always is."""
    tables = database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'groups'").fetchone()
    rows = database.execute(_NOW if tables[0] else _BEFORE).fetchall()
    return StoreStanding(*rows[0]) if len(rows) == 1 else None


REVISIONS_PER_SECOND = 1 << 16
"""More than any store makes in the long run, so that what begins later begins above."""
ORIGIN_SECONDS = 1_767_225_600
"""2026-01-01; from here, numbers stay below 2**53 (what JSON can carry everywhere) for 4,300 years."""
LINEAGE_BYTES = 16
MARK_SECONDS = 0.5
"""Between two looks whether the mark must move."""
MARK_BYTES = 512
"""Written in place, and never more than one sector: a crash leaves the old mark or the new one."""
DAMAGED = "restore a backup with `fleetplane restore`, or accept the loss with `fleetplane store accept-loss`"


def first_revision(now_ns: int) -> int:
    """Where a lineage that begins now begins to count."""
    return max(0, now_ns - ORIGIN_SECONDS * 1_000_000_000) * REVISIONS_PER_SECOND // 1_000_000_000


def new_id() -> str:
    return secrets.token_hex(LINEAGE_BYTES)


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """What the mark says was durable."""

    lineage: str
    revision: int
    audit_seq: int
    audit_hash: str
    """In hexadecimal."""


class MarkFile:
    """The mark beside a database."""

    def __init__(self, database: Path) -> None:
        self.path = database.with_name(database.name + ".mark")
        self._last: Recorded | None = None

    def __repr__(self) -> str:
        return f"<MarkFile {self.path}>"

    def read(self) -> Recorded | None:
        """None if there is none, or none that can be read: a mark is a help, not a condition."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise IntegrityError(f"{self.path} cannot be read: {error.strerror}") from error
        text, _, checksum = content.rstrip(b" \n").rpartition(b" ")
        try:
            if int(checksum, 16) == zlib.crc32(text):
                return msgspec.json.decode(text, type=Recorded)
        except (ValueError, msgspec.MsgspecError):
            pass
        log.warning("store.mark_unreadable", path=str(self.path))
        return None

    def write(self, recorded: Recorded) -> None:
        """Costs some microseconds: one sector in place, not synced. What is lost of it is only newer."""
        if recorded == self._last:
            return
        text = msgspec.json.encode(recorded)
        line = b"%s %08x" % (text, zlib.crc32(text))
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, line.ljust(MARK_BYTES - 1) + b"\n", 0)
        finally:
            os.close(descriptor)
        self._last = recorded


def check_present(database: Path, evidence: Sequence[Path]) -> None:
    """Refuse to begin anew where a database must have been."""
    with suppress(FileNotFoundError):
        if database.stat().st_size > 0:
            return
    found = [path for path in (MarkFile(database).path, *evidence) if path.exists()]
    if found:
        state = "is empty" if database.exists() else "is missing"
        raise IntegrityError(
            f"the database {database} {state}, although {found[0]} says that there was one",
            hint="restore a backup with `fleetplane restore`; to begin with nothing, give another data"
            f" directory, or move {' and '.join(str(path) for path in found)} away",
        )


def check_kept(
    database: Path | str,
    recorded: Recorded | None,
    lineage: str,
    revision: int,
    audit_seq: int,
    link: bytes | None,
) -> None:
    """Refuse a database that is not what its mark says; `link` is its hash of the marked audit entry."""
    if recorded is None:
        return
    if recorded.lineage != lineage:
        raise IntegrityError(
            f"{database} is not the database that was here: its lineage is {lineage[:8]}, the mark's"
            f" {recorded.lineage[:8]}",
            hint=DAMAGED,
        )
    if revision < recorded.revision or audit_seq < recorded.audit_seq:
        raise IntegrityError(
            f"{database} is at revision {revision} and audit entry {audit_seq}, but revision"
            f" {recorded.revision} and audit entry {recorded.audit_seq} had been acknowledged:"
            " its write-ahead log was lost or damaged, or an older copy was put in its place",
            hint=DAMAGED,
        )
    if link is not None and link.hex() != recorded.audit_hash:
        raise IntegrityError(
            f"{database} has another audit entry {recorded.audit_seq} than the one that was acknowledged",
            hint=DAMAGED,
        )


async def check_whole(engine: Engine, database: Path | str, recorded: Recorded | None) -> bool:
    """Refuse a database that has lost something; returns whether nothing was ever written to it."""
    mark, link = await engine.mark(), None
    if recorded is not None and (row := await engine.audit_row(recorded.audit_seq)) is not None:
        link = row.hash  # else it was archived, or there are none yet
    check_kept(database, recorded, await engine.lineage(), mark.revision, mark.audit_seq, link)
    return mark.audit_seq == 0


class Keeper:
    """Lets a mark follow what is durable."""

    def __init__(self, file: MarkFile) -> None:
        self._file = file
        self._source: Callable[[], Recorded] | None = None

    def follow(self, source: Callable[[], Recorded]) -> None:
        self._source = source
        self.note()

    def note(self) -> None:
        if self._source is None:
            return
        try:
            self._file.write(self._source())
        except OSError as error:
            log.warning("store.mark_not_written", path=str(self._file.path), error=str(error))

    async def run(self) -> None:
        while True:
            self.note()
            await asyncio.sleep(MARK_SECONDS)


@asynccontextmanager
async def kept(file: MarkFile) -> AsyncIterator[Keeper]:
    """A mark that follows its source, and is exact at the end."""
    keeper = Keeper(file)
    following = asyncio.create_task(boundary.kept("store/mark", keeper.run))
    try:
        yield keeper
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        keeper.note()


def begin(
    database: sqlite3.Connection,
    *,
    above: int,
    now_ns: int,
    actor: str,
    action: str,
    about: str,
    key: bytes,
    instead_of: Iterable[str] = (),
) -> str:
    """Make what is there the beginning of a new lineage, in one transaction; returns its id.

    It is noted in the database that the lineage that is there and those that it was begun `instead_of` are
    given up, for servers that share the database and remember one of them.
    """
    lineage = new_id()
    database.execute("BEGIN IMMEDIATE")
    present, before = database.execute("SELECT lineage, replaced FROM meta").fetchone()
    replaced = " ".join(dict.fromkeys([*before.split(), present, *instead_of]))
    number, revision, seq, link = database.execute(
        "SELECT number, revision, audit_seq, audit_hash FROM groups ORDER BY number DESC LIMIT 1"
    ).fetchone()
    entry = audit.ChainEntry(
        seq=seq + 1,
        revision=max(revision + 1, above + 1, first_revision(now_ns)),
        at_ns=now_ns,
        actor=actor,
        action=action,
        changes=(audit.AuditedChange("lineage", "", "", f"{lineage} {about}", ""),),
    )
    row = audit.append(link, entry, key)
    database.execute("INSERT INTO audit (seq, hash, entry) VALUES (?, ?, ?)", (row.seq, row.hash, row.entry))
    database.execute("DELETE FROM log")
    database.execute("DELETE FROM groups")
    # Lists are of these revisions: whoever watches from one must not be taken for one of the old lineage.
    database.execute("UPDATE kinds SET revision = ?", (entry.revision,))
    database.execute(
        "UPDATE meta SET lineage = ?, first_revision = ?, replaced = ?", (lineage, entry.revision, replaced)
    )
    database.execute(
        "INSERT INTO groups (number, revision, compacted, audit_seq, audit_hash, term, server, boot,"
        " group_id, at_ns) VALUES (?, ?, ?, ?, ?, 0, '', 0, ?, ?)",
        (number + 1, entry.revision, entry.revision, row.seq, row.hash, b"", now_ns),
    )
    database.execute("COMMIT")
    return lineage
