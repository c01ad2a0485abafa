"""Servers of two releases over one store: what the newer one brings is written once the older one is gone.

In virtual time, over the database in memory; `OLD` and `NEW` are the same kind as each release knows it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.shared import virtual_loop
from support.shared.memory_engine import Link, MemoryDatabase, MemoryEngine
from support.shared.storekit import THING, opened, put
from support.shared.virtual_loop import LoopClock

from fleetplane.kernel.errors import FleetplaneError, IntegrityError, Unavailable
from fleetplane.kernel.resources import AnyKind, Kind, Nothing
from fleetplane.kernel.store import Draft, Store, StoreSettings
from fleetplane.kernel.store.servers.leader_lease import LIFE_SECONDS
from fleetplane.kernel.store.servers.level import LEVEL, NAME, Levels, check, common
from fleetplane.kernel.store.servers.replica import Replica

FIRST, NEXT = Levels(1, 1), Levels(1, 3)
DELAY_SECONDS = 60.0
LONG_SECONDS = DELAY_SECONDS + 3 * LIFE_SECONDS


class OldSpec(msgspec.Struct, frozen=True):
    count: int = 0


class NewSpec(msgspec.Struct, frozen=True):
    count: int = 0
    tint: str = ""


class StrictSpec(msgspec.Struct, frozen=True):
    count: str = ""


OLD: Kind[OldSpec, Nothing] = Kind("pot", OldSpec, Nothing)
NEW: Kind[NewSpec, Nothing] = Kind("pot", NewSpec, Nothing)
LID: Kind[NewSpec, Nothing] = Kind("lid", NewSpec, Nothing, since_level=3)


def grow(draft: Draft) -> None:
    """Of the older release."""
    before = draft.get(OLD, "", "a")
    draft.put(OLD, "", "a", spec=OldSpec(count=1 if before is None else before.spec.count + 1))


def tint(draft: Draft) -> None:
    """Of the newer one, which has a field more from the second level on."""
    before = draft.get(NEW, "", "a")
    count = 1 if before is None else before.spec.count + 1
    draft.put(NEW, "", "a", spec=NewSpec(count=count, tint="blue" if draft.level >= 3 else ""))


class Server:
    def __init__(self, database: MemoryDatabase, name: str, levels: Levels, *kinds: AnyKind) -> None:
        self.link = Link(chance=random.Random(1))
        self._database, self._name, self._levels, self._kinds = database, name, levels, kinds
        self._standby: Replica
        self.running: asyncio.Task[None]

    @property
    def store(self) -> Store:
        return self._standby.store

    async def start(self) -> None:
        settings = StoreSettings(
            path=Path("/nowhere"), levels=self._levels, level_delay_seconds=DELAY_SECONDS
        )
        self._standby = await Replica.load(
            MemoryEngine(self._database, self.link),
            settings,
            server=self._name,
            kinds=self._kinds,
            clock=LoopClock(self.link.chance),
        )
        self.running = asyncio.create_task(self._run())
        await asyncio.sleep(1)

    async def _run(self) -> None:
        async with self._standby.active() as store:
            await store.writing()

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)

    async def does(self, change: object, *touches: object) -> None:
        await self.store.transact(change, actor="t", action="t", touches=touches or [OLD.key("", "a")])  # type: ignore[arg-type]

    @property
    def pot(self) -> NewSpec:
        found = self.store.get(NEW, "", "a")
        assert found is not None
        return found.spec


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """For an hour of virtual time at most."""
    virtual_loop.run(asyncio.wait_for(scenario, 3600))


@asynccontextmanager
async def two_releases() -> AsyncIterator[tuple[Server, Server]]:
    """One server of each; the older one is active."""
    database = MemoryDatabase(LoopClock(random.Random(1)).now_ns)
    old = Server(database, "old", FIRST, OLD)
    new = Server(database, "new", NEXT, NEW, LID)
    await old.start()
    await new.start()
    try:
        yield old, new
    finally:
        await old.stop()
        await new.stop()


def test_a_new_field_is_written_only_once_no_server_runs_that_would_lose_it() -> None:
    async def scenario() -> None:
        async with two_releases() as (old, new):
            for _ in range(3):
                await new.does(tint)
                await asyncio.sleep(DELAY_SECONDS)
                assert new.store.level == 1
                assert new.pot.tint == ""
                await old.does(grow)
            await old.stop()
            await asyncio.sleep(LONG_SECONDS)
            assert new.store.level == 3
            await new.does(tint)
            assert new.pot == NewSpec(count=7, tint="blue")
            with pytest.raises(IntegrityError, match=r"at level 3, and this program supports 1:.*lose"):
                await old.start()
            assert new.pot.tint == "blue"

    run(scenario())


def test_an_older_server_that_stood_still_while_the_level_rose_writes_nothing_and_ends() -> None:
    """Nobody had heard of it; it knows nothing of the field, and would write its object back without."""

    async def scenario() -> None:
        async with two_releases() as (old, new):
            await old.does(grow)
            old.link.stopped.clear()
            await asyncio.sleep(LONG_SECONDS)
            assert new.store.level == 3
            await new.does(tint)
            writing = asyncio.create_task(old.does(grow))
            old.link.stopped.set()
            with pytest.raises(FleetplaneError):
                await writing
            with pytest.raises(FleetplaneError):
                await old.running
            await new.store.confirmed()
            assert new.pot == NewSpec(count=2, tint="blue")

    run(scenario())


def test_an_older_server_that_stands_by_and_stood_still_writes_nothing_and_ends() -> None:
    async def scenario() -> None:
        database = MemoryDatabase(LoopClock(random.Random(1)).now_ns)
        new, old = Server(database, "new", NEXT, NEW), Server(database, "old", FIRST, OLD)
        seated = Server(database, "seated", FIRST, OLD)
        for one in (seated, new):  # the seat has been somebody's: it is no new store
            await one.start()
        await seated.stop()
        await asyncio.sleep(1)
        await old.start()
        try:
            await old.does(grow)
            old.link.stopped.clear()
            await asyncio.sleep(LONG_SECONDS)
            assert new.store.level == 3
            await new.does(tint)
            old.link.stopped.set()
            for _ in range(10):  # some of them after it was heard of again
                with pytest.raises(FleetplaneError):
                    await old.does(grow)
                await asyncio.sleep(1)
            await new.store.confirmed()
            assert new.pot == NewSpec(count=2, tint="blue")
            with pytest.raises(IntegrityError, match="at level 3"):
                await old.running
        finally:
            await new.stop()
            await old.stop()

    run(scenario())


def test_the_level_waits_for_an_older_server_that_is_restarted() -> None:
    async def scenario() -> None:
        async with two_releases() as (old, new):
            for _ in range(5):
                await old.stop()
                await asyncio.sleep(0.8 * DELAY_SECONDS)
                await old.start()
                await old.does(grow)
                assert new.store.level == 1
            await new.stop()  # and back to the older release altogether
            await asyncio.sleep(LONG_SECONDS)
            await old.does(grow)
            assert old.store.level == 1

    run(scenario())


def test_a_new_store_begins_at_the_level_of_its_first_server() -> None:
    async def scenario() -> None:
        database = MemoryDatabase(LoopClock(random.Random(1)).now_ns)
        new = Server(database, "new", NEXT, NEW, LID)
        await new.start()
        try:
            await asyncio.sleep(1)
            assert new.store.level == 3
        finally:
            await new.stop()

    run(scenario())


def test_a_new_kind_is_refused_until_its_level_is_reached() -> None:
    async def scenario() -> None:
        async with two_releases() as (old, new):
            key = LID.key("", "a")
            with pytest.raises(Unavailable, match="lid cannot be written yet: the store is at level 1, and"):
                await new.does(lambda draft: draft.put(LID, "", "a", spec=NewSpec()), key)
            await old.stop()
            await asyncio.sleep(LONG_SECONDS)
            await new.does(lambda draft: draft.put(LID, "", "a", spec=NewSpec()), key)
            assert new.store.get(LID, "", "a") is not None

    run(scenario())


def test_the_level_is_what_all_have_in_common() -> None:
    assert common([]) is None
    assert common([Levels(1, 3), Levels(2, 2), Levels(1, 4)]) == 2
    assert common([Levels(1, 1), Levels(2, 3)]) is None


def test_a_program_is_told_which_levels_do_not_meet() -> None:
    for level in (2, 3):
        check(level, Levels(2, 3))
    with pytest.raises(IntegrityError, match="at level 4, and this program supports 2 to 3"):
        check(4, Levels(2, 3))
    with pytest.raises(IntegrityError, match="at level 1, and this program supports 2 to 3") as caught:
        check(1, Levels(2, 3))
    assert "older release" in caught.value.advice


async def test_a_database_file_is_at_the_level_of_the_program_that_opens_it(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    async with opened(path) as store:
        assert (store.level, store.get(LEVEL, "", NAME)) == (1, None)  # nothing is written for the first
        before = store.revision
    async with opened(path, levels=NEXT) as store:
        assert (store.level, store.revision) == (3, before + 1)
        numbers = store.statistics()
        assert (numbers.level, numbers.supported_level) == (3, 3)
    async with opened(path, levels=NEXT) as store:
        assert (store.level, store.revision) == (3, before + 1)
    with pytest.raises(IntegrityError, match="the store is at level 3, and this program supports 1 to 2:"):
        async with opened(path):
            pass
    with pytest.raises(IntegrityError, match="the store is at level 3, and this program supports 4 to 5"):
        async with opened(path, levels=Levels(4, 5)):
            pass
    async with opened(tmp_path / "new.db", levels=Levels(4, 5)) as store:
        assert store.level == 5


async def test_what_a_newer_program_wrote_is_told_by_its_level_and_not_as_damage(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    async with opened(path, levels=NEXT) as store:
        await put(store, "a")
    strict: Kind[StrictSpec, Nothing] = Kind(THING.name, StrictSpec, Nothing)
    opening = Store.open(StoreSettings(path=path), kinds=[strict], clock=LoopClock(random.Random(1)))
    with pytest.raises(IntegrityError, match="the store is at level 3"):
        async with opening:
            pass
