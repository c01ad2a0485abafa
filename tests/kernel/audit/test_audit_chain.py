"""The audit chain: what it records, and that no edit of it or of the data goes unnoticed."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from support.shared.storekit import SCOPE, THING, opened, put, remove

from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.audit.archive import verify_file
from fleetplane.kernel.audit.chain import AuditedChange, ChainEntry, ChainVerdict, Head, Row, verify
from fleetplane.kernel.errors import IntegrityError, NotFound, Unavailable


def chain(length: int) -> list[Row]:
    rows: list[Row] = []
    previous = audit.GENESIS
    for seq in range(1, length + 1):
        change = AuditedChange("put", "thing", "s", f"n{seq}", audit.digest(b"%d" % seq))
        rows.append(audit.append(previous, ChainEntry(seq, seq, seq * 1000, "alice", "put", (change,))))
        previous = rows[-1].hash
    return rows


def head(rows: list[Row]) -> Head:
    return Head(revision=len(rows), seq=len(rows), hash=rows[-1].hash)


def edited(row: Row) -> Row:
    return Row(seq=row.seq, hash=row.hash, entry=row.entry.replace(b"alice", b"mallo"))


def rehashed(row: Row) -> Row:
    entry = row.entry.replace(b"alice", b"mallo")
    return Row(seq=row.seq, hash=audit.link(audit.GENESIS, entry), entry=entry)


def test_an_untouched_chain_is_intact() -> None:
    rows = chain(5)
    assert verify(rows, head(rows)) == ChainVerdict(intact=True, entries=5, revision=5)
    assert verify([], Head(revision=0, seq=0, hash=audit.GENESIS)).intact


@pytest.mark.parametrize(
    ("damage", "broken_seq", "problem"),
    [
        (lambda rows: [*rows[:2], edited(rows[2]), *rows[3:]], 3, "does not match its hash"),
        (lambda rows: [rehashed(rows[0]), *rows[1:]], 2, "does not match its hash"),
        (lambda rows: [*rows[:2], *rows[3:]], 3, "entry 3 is missing"),
        (lambda rows: [rows[0], rows[2], rows[1], *rows[3:]], 2, "entry 2 is missing"),
        (lambda rows: rows[1:], 1, "entry 1 is missing"),
        (lambda rows: rows[:4], 5, "ends at entry 4, but 5 were written"),
        (lambda rows: [], 1, "ends at entry 0"),
    ],
)
def test_an_edit_is_found_where_it_was_made(
    damage: Callable[[list[Row]], list[Row]], broken_seq: int, problem: str
) -> None:
    rows = chain(5)
    verdict = verify(damage(rows), head(rows))
    assert (verdict.intact, verdict.broken_seq) == (False, broken_seq)
    assert problem in verdict.problem


def test_a_chain_that_grew_behind_its_record_is_not_intact() -> None:
    rows = chain(5)
    assert "not the one that was recorded" in verify(rows, head(rows[:4])).problem
    short = Head(revision=4, seq=5, hash=rows[-1].hash)
    assert "the store is at revision 4" in verify(rows, short).problem


async def test_every_transaction_is_recorded_with_who_what_and_digests(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        await put(store, "x", 1)
        await store.transact(
            lambda draft: draft.claim(THING, SCOPE, "slug", "nice", "x"),
            actor="bob",
            action="claim",
            touches=[],
        )
        await store.put_secret("ca", b"hush", actor="carol")
        await remove(store, "x")
        entries = [audit.read(row) async for row in store.audit()]
        assert [(entry.seq, entry.revision, entry.actor, entry.action) for entry in entries] == [
            (1, 1, "tester", "put"),
            (2, 2, "bob", "claim"),
            (3, 2, "carol", "secret.put"),
            (4, 3, "tester", "delete"),
        ]
        changes = [[(c.operation, c.kind, c.name) for c in entry.changes] for entry in entries]
        assert changes == [
            [("put", "thing", "x")],
            [("claim", "thing", "slug=nice")],
            [("secret.put", "", "ca")],
            [("delete", "thing", "x")],
        ]
        assert len([row async for row in store.audit(after=3)]) == 1


async def test_a_file_is_verified_while_its_server_runs_and_after(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with opened(path) as store:
        for number in range(20):
            await put(store, f"n{number % 7}", number)
        assert await verify_file(path) == ChainVerdict(intact=True, entries=20, revision=20)
    before = path.read_bytes()
    assert await verify_file(path) == ChainVerdict(intact=True, entries=20, revision=20)
    assert path.read_bytes() == before
    async with opened(path) as store:
        assert store.revision == 20


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        (
            "UPDATE audit SET entry = replace(entry, 'tester', 'nobody') WHERE seq = 3",
            "entry 3 does not match",
        ),
        ("DELETE FROM audit WHERE seq = 2", "entry 2 is missing"),
        ("DELETE FROM audit WHERE seq = 5", "ends at entry 4, but 5 were written"),
        (
            "UPDATE groups SET revision = 2 WHERE number = (SELECT max(number) FROM groups)",
            "the store is at revision 2",
        ),
        (
            "UPDATE resources SET body = body || x'00' WHERE name = 'b'",
            "thing org/a b is not what was last written",
        ),
        (
            "DELETE FROM resources WHERE name = 'b'",
            "thing org/a b was written and never deleted, but is gone",
        ),
        ("INSERT INTO resources VALUES ('thing', 's', 'forged', 3, x'00')", "thing s forged is not what was"),
        ("DELETE FROM claims", "claim thing org/a slug=nice was written and never deleted, but is gone"),
        ("UPDATE claims SET owner = 'c'", "claim thing org/a slug=nice is not what was last written"),
        ("DELETE FROM secrets", "secret ca was written and never deleted, but is gone"),
        ("DELETE FROM meta", "the chain's end is not the one that was recorded"),
    ],
)
async def test_an_edit_of_the_file_is_found(tmp_path: Path, sql: str, problem: str) -> None:
    path = tmp_path / "store.db"
    async with opened(path) as store:
        await store.put_secret("ca", b"hush")
        await store.transact(
            lambda draft: draft.claim(THING, SCOPE, "slug", "nice", "a"), actor="a", action="a", touches=[]
        )
        for name in "abc":
            await put(store, name, 1)
    with closing(sqlite3.connect(path)) as database, database:
        assert database.execute(sql.replace("replace(entry", "replace(CAST(entry AS TEXT)")).rowcount == 1
        database.execute("UPDATE audit SET entry = CAST(entry AS BLOB)")
    verdict = await verify_file(path)
    assert not verdict.intact
    assert problem in verdict.problem


async def test_compaction_leaves_the_chain_whole(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with opened(path, history_revisions=5, history_slack_revisions=1) as store:
        for number in range(30):
            await put(store, "x", number)
        await store.compact(store.revision)
    assert await verify_file(path) == ChainVerdict(intact=True, entries=30, revision=30)


async def test_a_missing_or_foreign_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        await verify_file(tmp_path / "none.db")
    (tmp_path / "text.db").write_text("not a database, but long enough to look at" * 100)
    with pytest.raises(IntegrityError, match="is damaged"):
        await verify_file(tmp_path / "text.db")
    sqlite3.connect(tmp_path / "empty.db").close()
    (tmp_path / "empty.db").touch()
    with pytest.raises(Unavailable, match="cannot be read"):
        await verify_file(tmp_path / "empty.db")


def test_a_verdict_is_told_in_a_sentence() -> None:
    assert str(ChainVerdict(intact=True, entries=5, revision=4)) == "intact: 5 entries, up to revision 4"
    broken = ChainVerdict(intact=False, entries=5, revision=4, problem="entry 6 is missing")
    assert str(broken) == "not intact: entry 6 is missing; good are 5 entries, up to revision 4"
