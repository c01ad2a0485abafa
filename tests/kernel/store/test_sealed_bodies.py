"""Kinds that may hold secrets are sealed wherever the store writes them, and plain in memory."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import msgspec
import pytest
from support.shared import virtual_loop
from support.shared.memory_engine import Link, MemoryDatabase, MemoryEngine
from support.shared.virtual_loop import LoopClock

from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import IntegrityError
from fleetplane.kernel.resources import AnyKind, Condition, Kind, Nothing
from fleetplane.kernel.store import Draft, Store, StoreSettings
from fleetplane.kernel.store.engines.sqlite import SqliteEngine
from fleetplane.kernel.store.servers.level import FIRST, SEALED, SUPPORTED, Levels
from fleetplane.kernel.store.servers.replica import FORGET_SECONDS, Replica
from fleetplane.kernel.store.transaction import Delete, Transaction

MARK = "hunter2-correct-horse"
KEY = b"k" * 32


class Holding(msgspec.Struct, frozen=True):
    text: str


SAFE: Kind[Holding, Holding] = Kind("safe", Holding, Holding, is_secret=True)
PART: Kind[Holding, Nothing] = Kind("part", Holding, Nothing, is_secret=True, is_logged=False)
PLAIN: Kind[Holding, Nothing] = Kind("plain", Holding, Nothing)
KINDS = (SAFE, PART, PLAIN)


@asynccontextmanager
async def opened(path: Path, key: bytes = KEY, levels: Levels = SUPPORTED) -> AsyncIterator[Store]:
    settings = StoreSettings(path=path, levels=levels)
    async with Store.open(settings, kinds=KINDS, clock=SystemClock(), audit_key=lambda _: key) as store:
        yield store


async def written(store: Store, name: str, text: str = MARK) -> None:
    def change(draft: Draft) -> None:
        draft.put(
            SAFE,
            "t/a",
            name,
            spec=Holding(text),
            status=Holding(text),
            conditions=[Condition(type="Ready", status="False", message=text)],
            labels={"colour": "blue"},
        )
        draft.put(PART, "t/a", name, spec=Holding(text))

    touches = [SAFE.key("t/a", name), PART.key("t/a", name)]
    await store.transact(change, actor="t", action="t", touches=touches)


async def removed(store: Store, kind: AnyKind, name: str) -> None:
    await store.apply(
        Transaction(actor="t", action="t", operations=[Delete(kind=kind, scope="t/a", name=name)])
    )


def check(store: Store, name: str, text: str = MARK) -> None:
    found, part = store.get(SAFE, "t/a", name), store.get(PART, "t/a", name)
    assert found is not None
    assert part is not None
    assert found.status is not None
    assert (found.spec.text, found.status.text, found.conditions[0].message) == (text, text, text)
    assert found.labels == {"colour": "blue"}
    assert part.spec.text == text


def in_clear(folder: Path) -> list[str]:
    """The files in which the secret can be read."""
    return sorted(one.name for one in folder.iterdir() if one.is_file() and MARK.encode() in one.read_bytes())


async def test_what_may_be_secret_is_sealed_on_disk_and_plain_in_memory_and_watches(tmp_path: Path) -> None:
    async with opened(tmp_path / "s.db") as store:
        begin = store.revision
        await written(store, "one")
        check(store, "one")
        assert in_clear(tmp_path) == []
        await written(store, "one", "another")
        await removed(store, PART, "one")
        page = await store.history("safe", "", after=begin, until=store.revision)
        assert [event.resource.spec.text for event in page.events] == [MARK, "another"]
    assert in_clear(tmp_path) == []
    async with opened(tmp_path / "s.db") as store:
        assert [one.spec.text for one in store.list(SAFE)] == ["another"]


async def test_a_sealed_body_opens_with_its_key_and_at_its_place_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    async with opened(path) as store:
        await written(store, "mine")
        await written(store, "other", "not mine")

    def moved(kind: str, name: str) -> None:
        with closing(sqlite3.connect(path)) as database, database:
            where = "WHERE kind = ? AND name = ?"
            (body,) = database.execute(f"SELECT body FROM resources {where}", (kind, "mine")).fetchone()
            (home,) = database.execute(f"SELECT body FROM resources {where}", (kind, name)).fetchone()
            into = msgspec.msgpack.decode(home)
            into["spec"] = msgspec.msgpack.decode(body)["spec"]
            database.execute(
                f"UPDATE resources SET body = ? {where}",
                (msgspec.msgpack.encode(into), kind, name),
            )

    with pytest.raises(IntegrityError, match="master key"):
        async with opened(path, b"x" * 32):
            pass
    moved("safe", "other")
    with pytest.raises(IntegrityError, match="the stored safe t/a other does not open"):
        async with opened(path):
            pass


@pytest.mark.parametrize("broken_off", [False, True])
async def test_what_was_stored_in_clear_is_sealed_at_the_next_start(
    tmp_path: Path, *, broken_off: bool
) -> None:
    path, older = tmp_path / "s.db", Levels(FIRST, FIRST)
    async with opened(path, levels=older) as store:
        for name in "abc":
            await written(store, name)
        await written(store, "gone")
        for kind in (SAFE, PART):
            await removed(store, kind, "gone")
        before = store.list(SAFE)[0]
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 0")  # as earlier releases left it
    assert in_clear(tmp_path) == ["s.db"]
    if broken_off:  # after the level had risen, and with one of three sealed
        settings = StoreSettings(path=path)
        engine = await SqliteEngine.open(settings)
        async with Store.on(engine, settings, kinds=KINDS, clock=SystemClock(), audit_key=KEY) as store:
            await store.rise(SEALED)
            await written(store, "b", "new")
        await engine.close()
        assert in_clear(tmp_path) == ["s.db"]
    async with opened(path) as store:
        for name in "ac":
            check(store, name)
        after = store.list(SAFE)[0]
        assert (after.uid, after.updated_at_ns, after.generation) == (
            before.uid,
            before.updated_at_ns,
            before.generation,
        )
        assert in_clear(tmp_path) == []
        revision, seq = store.revision, store.audit_head().seq
    async with opened(path) as store:
        check(store, "a")
        assert (store.revision, store.audit_head().seq) == (revision, seq), "and once"
    with pytest.raises(IntegrityError, match="the store is at level 2, and this program supports 1"):
        async with opened(path, levels=older):
            pass


def test_servers_seal_once_all_of_them_can_read_it() -> None:
    async def scenario() -> None:
        chance = random.Random(1)
        database = MemoryDatabase(LoopClock(chance).now_ns)

        async def server(name: str, levels: Levels) -> tuple[Replica, asyncio.Task[None]]:
            standby = await Replica.load(
                MemoryEngine(database, Link(chance=chance)),
                StoreSettings(path=Path("/nowhere"), levels=levels, level_delay_seconds=30),
                server=name,
                kinds=KINDS,
                clock=LoopClock(chance),
                audit_key=KEY,
            )

            async def run() -> None:
                async with standby.active() as store:
                    await store.writing()

            return standby, asyncio.create_task(run())

        def clear() -> int:
            kept = [group for group in database.groups if group.mark.number >= database.first]
            bodies = [row.body for row in database.resources.values()]
            bodies += [row.body for group in kept for row in group.log]
            return sum(MARK.encode() in body for body in bodies)

        old, old_task = await server("old", Levels(FIRST, FIRST))
        await asyncio.sleep(1)
        new, new_task = await server("new", SUPPORTED)
        await asyncio.sleep(1)
        await written(new.store, "a")
        await asyncio.sleep(100)
        check(old.store, "a")
        assert clear() > 0, "the older server could not read it"
        old_task.cancel()
        await asyncio.gather(old_task, return_exceptions=True)
        await asyncio.sleep(60)
        assert new.store.level == SEALED
        other, other_task = await server("other", SUPPORTED)
        await asyncio.sleep(FORGET_SECONDS + 30)
        await written(other.store, "b")
        await asyncio.sleep(1)
        for store in (new.store, other.store):
            check(store, "a")
            check(store, "b")
        assert clear() == 0
        for task in (new_task, other_task):
            task.cancel()
        await asyncio.gather(new_task, other_task, return_exceptions=True)

    virtual_loop.run(asyncio.wait_for(scenario(), 3600))
