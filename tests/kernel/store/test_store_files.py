"""The store's files: one owner, private modes, and a schema that old and new databases share."""

from __future__ import annotations

import asyncio
import gc
import os
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import create_engine, inspect
from support.shared.storekit import SCOPE, THING, Spec, Status, asked, audit_of, opened, put, told

from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.audit.archive import verify_file
from fleetplane.kernel.errors import Compacted, IntegrityError, SettingsError, Unavailable
from fleetplane.kernel.resources import Resource, encode
from fleetplane.kernel.store import StoreSettings
from fleetplane.kernel.store.engines.sqlite_writer import JOURNAL_LIMIT_BYTES
from fleetplane.kernel.store.lineage import standing
from fleetplane.kernel.store.migrations.runner import configuration
from fleetplane.kernel.store.schema import METADATA, SCHEMA_REVISION


async def test_a_second_process_is_told_who_holds_the_database(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    holder = (
        "import asyncio, sys, pathlib\n"
        "from support.shared.storekit import opened\n"
        "async def main():\n"
        "    async with opened(pathlib.Path(sys.argv[1])):\n"
        "        print('open', flush=True)\n"
        "        sys.stdin.read()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        holder,
        path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        assert await process.stdout.readline() == b"open\n"
        with pytest.raises(Unavailable, match=f"store.db is in use by process {process.pid}"):
            async with opened(path):
                pass
        await process.communicate(b"")
    async with opened(path):
        pass


async def test_the_same_process_cannot_open_it_twice_either(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db"):
        with pytest.raises(Unavailable, match=f"process {os.getpid()}"):
            async with opened(tmp_path / "store.db"):
                pass


async def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "data" / "deep" / "store.db"
    before = os.umask(0o022)
    try:
        async with opened(path) as store:
            await put(store, "x")
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(
        ("store.db", "store.db-wal", "store.db-shm", "store.db.lock", "store.db.mark"), 0o600
    )
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_every_commit_is_synced_and_logged_ahead(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        assert await asked(store, "PRAGMA journal_mode") == "wal"
        assert await asked(store, "PRAGMA synchronous") == 2  # FULL


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="ring_events must be positive"):
        StoreSettings(path=tmp_path / "store.db", ring_events=0)
    with pytest.raises(SettingsError, match="is a directory"):
        StoreSettings(path=tmp_path)


def _schema(path: Path) -> dict[str, object]:
    engine = create_engine(f"sqlite:///{path}")
    try:
        found = inspect(engine)
        return {
            table: (
                [(c["name"], str(c["type"]), c["nullable"]) for c in found.get_columns(table)],
                found.get_pk_constraint(table)["constrained_columns"],
                found.get_indexes(table),
                "WITHOUT ROWID" in str(_definition(path, table)).upper(),
            )
            for table in found.get_table_names()
        }
    finally:
        engine.dispose()


def _definition(path: Path, table: str) -> object:
    with closing(sqlite3.connect(path)) as database:
        return database.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0]


async def test_migrations_lead_to_the_same_schema_as_a_fresh_database(tmp_path: Path) -> None:
    fresh, migrated = tmp_path / "fresh.db", tmp_path / "migrated.db"
    async with opened(fresh):
        pass
    with closing(
        sqlite3.connect(migrated)
    ) as database:  # at the very first step: nothing but the stamp's table
        database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
    async with opened(migrated) as store:
        await put(store, "x", 1)
        assert store.get(THING, SCOPE, "x") is not None
        assert (await audit_of(store)).intact
    assert _schema(fresh) == _schema(migrated)
    assert set(_schema(fresh)) == {*METADATA.tables, "alembic_version"}


async def test_a_database_of_before_the_log_keeps_its_content_and_its_cursors(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    _at_schema(path, "0005")
    rows, link = [], audit.GENESIS
    for seq in range(1, 4):  # transactions of two things each, and then a secret
        row = audit.append(link, audit.ChainEntry(seq, min(2 * seq, 4), 0, "t", "put", ()))
        link = row.hash
        rows.append((row.seq, row.hash, row.entry))
    things = [_thing(name, n) for n, name in enumerate("abab", 1)]
    with closing(sqlite3.connect(path)) as database, database:
        database.executemany("INSERT INTO audit VALUES (?, ?, ?)", rows)
        for n, thing in enumerate(things):
            body = encode(thing)
            event = (thing.revision, n % 2, "ADDED" if n < 2 else "MODIFIED", "thing", SCOPE, body)
            database.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", event)
            kept = ("thing", SCOPE, thing.name, thing.revision, body)
            database.execute("INSERT OR REPLACE INTO resources VALUES (?, ?, ?, ?, ?)", kept)
        database.execute("INSERT INTO kinds VALUES ('thing', 4)")
        database.execute("INSERT INTO claims VALUES ('thing', ?, 'slug', 'nice', 'a')", (SCOPE,))
        database.execute("INSERT INTO secrets VALUES ('key', x'01')")
        database.execute("UPDATE meta SET revision = 4, audit_seq = 3, audit_hash = ?", (link,))
        lineage = database.execute("SELECT lineage FROM meta").fetchone()[0]
    async with opened(path) as store:
        assert (store.revision, store.lineage, store.audit_head().seq) == (4, lineage, 3)
        assert [(thing.name, thing.spec.value) for thing in store.list(THING)] == [("a", 3), ("b", 4)]
        assert store.claimed_by(THING, SCOPE, "slug", "nice") == "a"
        assert await store.get_secret("key") == b"\x01"
        assert told((await store.watch(THING, after=1).next()).events) == [
            ("ADDED", "b", 2),
            ("MODIFIED", "a", 3),
            ("MODIFIED", "b", 4),
        ]
        await put(store, "a", 5)
        page = await store._engine.groups(after=0, limit=100)
        assert [one.mark.number for one in page.groups] == [1, 2, 3, 4]
        assert [len(one.log) for one in page.groups] == [2, 2, 0, 1]
        await store.compact(4)
        assert (await audit_of(store)).intact
    async with opened(path) as store:  # and it can be trimmed
        with pytest.raises(Compacted):
            store.watch(THING, after=1)


async def test_a_file_that_was_not_opened_since_can_be_asked_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    _at_schema(path, "0005")
    with closing(sqlite3.connect(path)) as database:
        stand = standing(database)
        assert stand is not None
        assert (stand.revision, stand.audit_seq) == (0, 0)
    assert (await verify_file(path)).intact


def _thing(name: str, revision: int) -> Resource[Spec, Status]:
    return Resource(
        kind="thing",
        scope=SCOPE,
        name=name,
        uid=name,
        labels={},
        spec=Spec(value=revision),
        status=None,
        conditions=(),
        revision=revision,
        created_revision=(revision + 1) % 2 + 1,
        generation=1,
        created_at_ns=0,
        updated_at_ns=0,
    )


def _at_schema(path: Path, revision: str) -> None:
    """A database as an older version left it."""
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        command.upgrade(configuration(connection), revision)
    engine.dispose()


async def test_cursors_from_before_every_event_had_a_revision_are_told_to_list_again(tmp_path: Path) -> None:
    """All events of a transaction had the same one: who had seen some of them cannot be helped."""
    path = tmp_path / "old.db"
    _at_schema(path, "0001")
    row = audit.append(audit.GENESIS, audit.ChainEntry(1, 1, 0, "t", "put", ()))
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("INSERT INTO audit VALUES (1, ?, ?)", (row.hash, row.entry))
        database.execute("UPDATE meta SET revision = 1, audit_seq = 1, audit_hash = ?", (row.hash,))
        rows = [(1, n, "ADDED", "thing", SCOPE, b"") for n in range(3)]
        database.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", rows)
    async with opened(path) as store:
        assert store.revision == 2
        assert (await audit_of(store)).intact
        with pytest.raises(Compacted):
            store.watch(THING, after=1)
        await put(store, "x", 1)
        assert [event.revision for event in (await store.watch(THING, after=2).next()).events] == [3]
    assert (await verify_file(path)).intact


def test_the_newest_migration_is_the_one_that_databases_are_stamped_with() -> None:
    from alembic.script import ScriptDirectory

    assert ScriptDirectory.from_config(configuration()).get_current_head() == SCHEMA_REVISION


async def test_a_database_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with opened(path):
        pass
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(IntegrityError, match="schema 9999, which this version does not know"):
        async with opened(path):
            pass


async def test_a_database_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE recipes (name TEXT)")
    with pytest.raises(IntegrityError, match="something else"):
        async with opened(path):
            pass
    path.write_text("no database at all, in many words; " * 200)
    with pytest.raises(IntegrityError, match="damaged"):
        async with opened(path):
            pass


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE resources SET body = CAST('text' AS TEXT)",
        "UPDATE resources SET body = x'c1'",
        "DELETE FROM meta",
    ],
)
async def test_a_database_whose_rows_were_edited_is_refused_and_not_crashed_on(
    tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "store.db"
    async with opened(path) as store:
        await put(store, "x", 1)
    with closing(sqlite3.connect(path)) as database, database:
        assert database.execute(damage).rowcount == 1
    with pytest.raises(IntegrityError):
        async with opened(path):
            pass
    gc.collect()  # a connection that was left open is an error here, and not in whichever test comes next


def test_opening_a_current_database_does_not_load_alembic(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys, pathlib\n"
        "from support.shared.storekit import opened\n"
        "async def main():\n"
        "    for _ in range(2):\n"
        "        async with opened(pathlib.Path(sys.argv[1])):\n"
        "            pass\n"
        "asyncio.run(main())\n"
        "sys.exit('alembic' in sys.modules)\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, tmp_path / "store.db"],
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


async def test_a_place_that_cannot_be_used_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Unavailable, match="cannot be used"):
        async with opened(tmp_path / "file" / "data" / "store.db"):
            pass


async def test_the_log_beside_the_database_shrinks_again(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with opened(path) as store:
        assert await asked(store, "PRAGMA journal_size_limit") == JOURNAL_LIMIT_BYTES
