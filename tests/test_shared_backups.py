"""Backups of a store in PostgreSQL: the same file as of any store, and the way back into either."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from contextlib import AbstractAsyncContextManager, closing
from pathlib import Path

import pytest
from support.shared.cli_runner import Invoke, Outcome
from support.shared.edited_backups import described, members, packed_of
from support.shared.postgres_server import PostgresServer
from support.shared.storekit import KINDS, SCOPE, THING, put
from support.shared.telemetry_place import measure, measured

from fleetplane import settings as configuration
from fleetplane.cli.main import run
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import AlreadyExists, IntegrityError, NotFound, Unavailable
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.kernel.store.engines import postgres_copy
from fleetplane.kernel.store.engines.postgres_copy import look
from fleetplane.server import backups
from fleetplane.server.offline import DATABASE, DataDirectory

CLOCK = SystemClock()
ACTOR = "owner/t"


def place(data: Path, url: str, key: Path) -> DataDirectory:
    data.mkdir(mode=0o700, exist_ok=True)
    config = config_of(data)
    config.touch(mode=0o600)
    config.write_text(f'data_dir = "{data}"\n[store]\nurl = "{url}"\n[identity]\nmaster_key_file = "{key}"\n')
    return DataDirectory(configuration.load(config=config, flags={}), CLOCK)


def config_of(data: Path) -> Path:
    return data.with_suffix(".toml")


def opened(where: DataDirectory, server: str = "one") -> AbstractAsyncContextManager[Store]:
    wanted = StoreSettings(path=where.database, url=where.url, server=server if where.url else "")
    return Store.open(
        wanted, kinds=KINDS, clock=CLOCK, audit_key=lambda is_new: where.keys.audit(may_create=is_new)
    )


async def write(where: DataDirectory, *names: str, server: str = "one") -> tuple[str, int]:
    async with opened(where, server) as store:
        for name in names:
            await put(store, name, 1)
        return store.lineage, store.revision


async def fill(where: DataDirectory) -> tuple[str, int]:
    async with opened(where) as store:
        await put(store, "kept", 1)
        await store.transact(
            lambda draft: draft.claim(THING, SCOPE, "slug", "nice", "kept"), actor="t", action="c", touches=[]
        )
        await store.put_secret("key", b"\x00sealed")
        return store.lineage, store.revision


async def contents(where: DataDirectory) -> tuple[str, int, list[str]]:
    """What a server finds: the lineage, its revision and the names of what there is."""
    async with opened(where) as store:
        assert store.claimed_by(THING, SCOPE, "slug", "nice") == "kept"
        assert await store.get_secret("key") == b"\x00sealed"
        return store.lineage, store.revision, [thing.name for thing in store.list(THING)]


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str]) -> Invoke:
    def call(*arguments: str) -> Outcome:
        capsys.readouterr()
        code = run(arguments)
        captured = capsys.readouterr()
        return Outcome(code=code, out=captured.out, err=captured.err)

    return call


def verified(invoke: Invoke, where: DataDirectory) -> str:
    told = invoke("audit", "verify", "--config", str(config_of(where.path)))
    return f"{told.code} {told.out.strip()} {told.err.strip()}"


def test_a_backup_of_one_engine_is_restored_into_either_as_a_new_lineage(
    tmp_path: Path, postgres: PostgresServer, invoke: Invoke
) -> None:
    key, packed = tmp_path / "master.key", tmp_path / "backup.tar"
    first = place(tmp_path / "first", postgres.database(), key)
    with pytest.raises(NotFound, match="no store in"):
        backups.make(first, packed, backups.BackupContents())
    lineage, revision = asyncio.run(fill(first))
    asyncio.run(measure(first.path / "telemetry.db", first.url))
    made = invoke("backup", str(packed), "--with-telemetry", "--config", str(config_of(first.path)))
    assert (made.code, made.err) == (0, "")
    assert f"revision {revision}" in made.out
    _, last = asyncio.run(write(first, "lost"))
    assert verified(invoke, first).startswith("0 intact: 4 entries")

    for url in (postgres.database(), ""):
        back = place(tmp_path / f"back{len(url)}", url, key)
        done = invoke("restore", str(packed), "--config", str(config_of(back.path)))
        assert done.code == 0, done.err
        new, now, names = asyncio.run(contents(back))
        assert new != lineage
        assert (now > last, names) == (True, ["kept"])
        assert verified(invoke, back).startswith("0 intact: 4 entries")
        assert asyncio.run(measured(back.path / "telemetry.db", url)) == {"one": 2.0}

    # And a backup of a file into PostgreSQL.
    again = tmp_path / "again.tar"
    backups.make(back, again, backups.BackupContents())
    there = place(tmp_path / "there", postgres.database(), key)
    backups.restore(again, there, replace=False, actor=ACTOR)
    assert asyncio.run(contents(there))[2] == ["kept"]


def test_a_restore_replaces_only_what_it_is_told_to_and_all_servers_follow_it(
    tmp_path: Path, postgres: PostgresServer, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, packed, url = tmp_path / "master.key", tmp_path / "backup.tar", postgres.database()
    one, two = place(tmp_path / "one", url, key), place(tmp_path / "two", url, key)
    asyncio.run(fill(one))
    backups.make(one, packed, backups.BackupContents())
    lineage, last = asyncio.run(write(one, "later"))
    asyncio.run(write(two, "latest", server="two"))
    before = asyncio.run(look(url)).stand

    # Not over what is there, and not under a server that runs.
    fresh = place(tmp_path / "fresh", url, key)
    with pytest.raises(AlreadyExists, match="is in use"):
        backups.restore(packed, fresh, replace=False, actor=ACTOR)

    async def while_it_runs() -> None:
        async with opened(two, "two"):
            with pytest.raises(Unavailable, match="two does"):
                await asyncio.to_thread(backups.restore, packed, one, replace=True, actor=ACTOR)

    asyncio.run(while_it_runs())

    # An interruption at the last moment leaves everything as it was: the database, and the files.
    (one.path / "audit").mkdir(exist_ok=True)
    (one.path / "audit" / "note").write_text("of before")
    mark = (one.path / f"{DATABASE}.mark").read_bytes()
    move = backups.Moves.move

    def interrupted(self: backups.Moves, source: Path, target: Path) -> None:
        move(self, source, target)
        if target.name.endswith(".mark") and target.parent == one.path:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(backups.Moves, "move", interrupted)
        with pytest.raises(KeyboardInterrupt):
            backups.restore(packed, one, replace=True, actor=ACTOR)
    assert (one.path / "audit" / "note").read_text() == "of before"
    assert (one.path / f"{DATABASE}.mark").read_bytes() == mark
    assert asyncio.run(look(url)).stand.lineage == before.lineage
    assert not list(one.path.glob("before-restore-*"))

    # A damaged backup touches nothing.
    damaged = tmp_path / "damaged.tar"
    whole = packed.read_bytes()
    damaged.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(IntegrityError):
        backups.restore(damaged, one, replace=True, actor=ACTOR)
    damaged.write_bytes(packed_of(described({**members(packed), "objects/evil": b"evil"})))
    with pytest.raises(IntegrityError, match="not authentic"):
        backups.restore(damaged, one, replace=True, actor=ACTOR)
    assert asyncio.run(look(url)).stand.lineage == before.lineage

    done = backups.restore(packed, one, replace=True, actor=ACTOR)
    assert done.aside is not None
    assert (done.aside / "audit" / "note").read_text() == "of before"
    with closing(sqlite3.connect(done.aside / DATABASE)) as kept:
        names = [row[0] for row in kept.execute("SELECT name FROM resources ORDER BY name")]
    assert names == ["kept", "later", "latest"], "what was replaced is kept beside"
    new, now, names = asyncio.run(contents(one))
    assert (new != lineage, now > last, names) == (True, True, ["kept"])
    # The other server remembers the lineage that was given up, and accepts what its owner decided.
    assert asyncio.run(write(two, "more", server="two"))[0] == new
    assert verified(invoke, two).startswith("0 intact")


def test_a_loss_that_was_accepted_is_accepted_for_all_servers(
    tmp_path: Path, postgres: PostgresServer, invoke: Invoke
) -> None:
    """A replica that lacked commits was promoted: what is there goes on as a new lineage."""
    key, url = tmp_path / "master.key", postgres.database()
    one, two = place(tmp_path / "one", url, key), place(tmp_path / "two", url, key)
    asyncio.run(fill(one))
    older = tmp_path / "older"
    older.mkdir()
    with one.copied() as copy:
        shutil.copy(copy, older / DATABASE)
    lineage, last = asyncio.run(write(two, "lost", server="two"))
    shutil.copy(two.path / f"{DATABASE}.mark", one.path / f"{DATABASE}.mark")  # both have seen it
    behind = postgres.database()  # where what is older goes
    with closing(sqlite3.connect(older / DATABASE)) as source:
        asyncio.run(postgres_copy.put(source, behind))
    one, two = place(tmp_path / "one", behind, key), place(tmp_path / "two", behind, key)
    for server in (one, two):
        with pytest.raises(IntegrityError, match="had been acknowledged"):
            asyncio.run(write(server))
    done = invoke("store", "accept-loss", "--yes", "--config", str(config_of(one.path)))
    assert (done.code, done.err) == (0, "")
    assert f"up to {last} are lost" in done.out
    for server in (one, two):
        new, now, names = asyncio.run(contents(server))
        assert (new != lineage, now > last, names) == (True, True, ["kept"])
    again = invoke("store", "accept-loss", "--yes", "--config", str(config_of(one.path)))
    assert "has lost nothing" in again.err
