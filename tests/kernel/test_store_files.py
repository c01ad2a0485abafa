"""The store's files: one owner, private modes, and a schema that old and new databases share."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect
from storekit import SCOPE, THING, audit_of, opened, put

from fleetplane.kernel.errors import IntegrityError, SettingsError, Unavailable
from fleetplane.kernel.store import StoreSettings
from fleetplane.kernel.store.migrations.runner import configuration
from fleetplane.kernel.store.schema import METADATA, SCHEMA_REVISION
from fleetplane.kernel.store.sqlite import JOURNAL_LIMIT_BYTES


async def test_a_second_process_is_told_who_holds_the_database(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    holder = (
        "import asyncio, sys, pathlib\n"
        "from storekit import opened\n"
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
    async with asyncio.timeout(20):
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
    assert modes == dict.fromkeys(("store.db", "store.db-wal", "store.db-shm", "store.db.lock"), 0o600)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_every_commit_is_synced_and_logged_ahead(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        writer = store._engine._writer  # type: ignore[attr-defined]
        assert (await writer.exec_driver_sql("PRAGMA journal_mode")).scalar() == "wal"
        assert (await writer.exec_driver_sql("PRAGMA synchronous")).scalar() == 2  # FULL


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


def test_opening_a_current_database_does_not_load_alembic(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys, pathlib\n"
        "from storekit import opened\n"
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
        writer = store._engine._writer  # type: ignore[attr-defined]
        assert (await writer.exec_driver_sql("PRAGMA journal_size_limit")).scalar() == JOURNAL_LIMIT_BYTES
