"""An installation moves from its file to PostgreSQL: lineage, secrets, claims and audit chain go with it."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.shared.cli_runner import execute
from support.shared.postgres_server import PostgresServer
from support.shared.storekit import KINDS, SCOPE, THING, flat, put, taken
from support.shared.telemetry_place import measure, measured

from fleetplane import __version__
from fleetplane import settings as configuration
from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import AlreadyExists, IntegrityError, NotFound, SettingsError
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.kernel.store.engines.postgres_servers import ServerState, seen
from fleetplane.server.migration import migrate
from fleetplane.server.offline import DATABASE, DataDirectory

CLOCK = SystemClock()


def place(data: Path, url: str = "") -> DataDirectory:
    config = data.with_suffix(".toml")
    config.touch(mode=0o600)
    config.write_text(f'data_dir = "{data}"\n[store]\nurl = "{url}"\n')
    return DataDirectory(configuration.load(config=config, flags={}), CLOCK)


async def fill(where: DataDirectory) -> str:
    """What a server leaves in its data directory; the lineage."""
    wanted = StoreSettings(path=where.database)
    async with Store.open(
        wanted, kinds=KINDS, clock=CLOCK, audit_key=lambda is_new: where.keys.audit(may_create=is_new)
    ) as store:
        for value in range(3):
            await put(store, "x", value)
        await store.transact(
            lambda draft: draft.claim(THING, SCOPE, "slug", "nice", "x"), actor="t", action="c", touches=[]
        )
        await store.put_secret("key", b"\x00sealed")
        return store.lineage


async def look(where: DataDirectory, url: str, lineage: str) -> None:
    wanted = StoreSettings(path=where.database, url=url, server="one")
    async with Store.open(
        wanted, kinds=KINDS, clock=CLOCK, audit_key=lambda is_new: where.keys.audit(may_create=is_new)
    ) as store:
        assert store.lineage == lineage
        found = store.get(THING, SCOPE, "x")
        assert found is not None
        assert (found.spec.value, found.revision) == (2, 3)
        assert store.claimed_by(THING, SCOPE, "slug", "nice") == "x"
        assert await store.get_secret("key") == b"\x00sealed"
        resumed = flat(await taken(store.watch(THING, after=1), 3))
        assert [event.revision for event in resumed] == [2, 3], "a cursor of before is still good"
        await put(store, "y")
        async with asyncio.timeout(60):
            while (one := (await seen(url))[0]).state is not ServerState.ACTIVE:
                await asyncio.sleep(0.05)
        assert (one.name, one.term, one.version) == ("one", 1, __version__)
        rows = [row async for row in store.audit()]
        assert audit.verify(rows, store.audit_head(), where.audit_key()).intact


def test_everything_moves_and_goes_on_where_it_was(tmp_path: Path, postgres: PostgresServer) -> None:
    url = postgres.database()
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    with pytest.raises(SettingsError, match="is required"):
        migrate(place(data))
    with pytest.raises(NotFound, match="no database"):
        migrate(place(data, url))
    lineage = asyncio.run(fill(place(data)))
    asyncio.run(measure(data / "telemetry.db"))
    where = place(data, url)
    done = migrate(where)
    assert done.measured == 2
    assert {one.name for one in data.glob("telemetry.db*")} == {"telemetry.db.migrated"}
    assert asyncio.run(measured(data / "other.db", url)) == {"one": 2.0}
    assert (done.lineage, done.aside) == (lineage, data / f"{DATABASE}.migrated")
    assert done.aside.is_file()
    assert not where.database.exists()
    asyncio.run(look(where, url, lineage))
    told = execute("servers", "--config", str(data.with_suffix(".toml")), "-o", "json")
    assert told.code == 0, told.err
    (left,) = json.loads(told.out)
    assert (left["name"], left["state"], left["boot"]) == ("one", "gone", 1)
    assert left["renewed_seconds_ago"] is None, "it said that it left"
    alone = execute("servers", "--data-dir", str(data))
    assert (alone.code != 0, "one server uses alone" in alone.err) == (True, True)

    # A database that is in use is left as it is, and so is the file.
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    asyncio.run(fill(place(other)))
    with pytest.raises(AlreadyExists, match="is in use"):
        migrate(place(other, url))
    assert place(other).database.is_file()

    # One whose audit log was rewritten does not move.
    with closing(sqlite3.connect(other / DATABASE)) as database:
        database.execute("UPDATE audit SET entry = (SELECT entry FROM audit WHERE seq = 1) WHERE seq = 2")
        database.commit()
    empty = postgres.database()
    with pytest.raises(IntegrityError, match="audit log"):
        migrate(place(other, empty))
