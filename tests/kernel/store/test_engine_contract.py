"""What every engine owes the store. A new engine is added to `engines` and must pass as it is."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.shared.enginekit import EMPTY, group
from support.shared.postgres_server import PostgresServer

from fleetplane.kernel.errors import FleetplaneError, IntegrityError
from fleetplane.kernel.store import StoreSettings
from fleetplane.kernel.store.engine import (
    Claim,
    ClaimRow,
    Engine,
    GroupAuthor,
    LogRow,
    ResourceRow,
    SecretRow,
    StoreContents,
    WriteGroup,
)
from fleetplane.kernel.store.engines.postgres import PostgresEngine
from fleetplane.kernel.store.engines.sqlite import SqliteEngine

EngineFactory = Callable[[Path], Awaitable[Engine]]


async def _sqlite(directory: Path) -> Engine:
    # Where two write, one waits for the other's disk: as long as that takes.
    return await SqliteEngine.open(StoreSettings(path=directory / "store.db", busy_timeout_seconds=60.0))


@pytest.fixture
def factory(request: pytest.FixtureRequest) -> EngineFactory:
    if request.param == "sqlite":
        return _sqlite
    server: PostgresServer = request.getfixturevalue("postgres")
    url = server.database()

    async def made(_: Path) -> Engine:
        return await PostgresEngine.open(url)

    return made


engines = pytest.mark.parametrize("factory", ["sqlite", "postgres"], indirect=True)


@asynccontextmanager
async def _opened(factory: EngineFactory, directory: Path) -> AsyncIterator[Engine]:
    engine = await factory(directory)
    try:
        yield engine
    finally:
        await engine.close()


async def _resources(engine: Engine) -> dict[str, ResourceRow]:
    async with engine.load(["thing"]) as contents:
        return {row.name: row async for page in contents.resources for row in page}


async def _contents(engine: Engine) -> StoreContents:
    async with engine.load([]) as contents:
        return contents


async def _fate(engine: Engine, group: WriteGroup) -> bool:
    return (await engine.settle(group.before, group.id, group.author)).written


@engines
async def test_a_new_database_is_empty(factory: EngineFactory, tmp_path: Path) -> None:
    async with _opened(factory, tmp_path) as engine:
        contents = await _contents(engine)
        assert (contents.mark, contents.kinds, list(contents.claims)) == (EMPTY, {}, [])
        assert await engine.mark() == EMPTY
        assert await _resources(engine) == {}


@engines
async def test_a_committed_group_is_there_after_reopening(factory: EngineFactory, tmp_path: Path) -> None:
    first = group(EMPTY, "a", "b")
    first.claims = [ClaimRow("thing", "s", "slug", "nice", "a"), ClaimRow("thing", "s", "slug", "nasty", "a")]
    first.secrets = [SecretRow("key", b"\x00\xff", 1), SecretRow("old", b"1", 1)]
    second = group(first.after, "b", body=b"newer")
    second.deletes = [("thing", "s", "a")]
    second.releases = [Claim("thing", "s", "slug", "nasty"), Claim("thing", "s", "slug", "nice")]
    second.claims = [ClaimRow("thing", "s", "slug", "nice", "b")]
    second.secret_deletes = [("old",)]
    async with _opened(factory, tmp_path) as engine:
        await engine.commit(first)
        await engine.commit(second)
    async with _opened(factory, tmp_path) as engine:
        contents = await _contents(engine)
        assert contents.mark == second.after
        assert contents.kinds == {"thing": 3}
        assert list(contents.claims) == [ClaimRow("thing", "s", "slug", "nice", "b")]
        assert await _resources(engine) == {"b": ResourceRow("thing", "s", "b", 3, b"newer")}
        assert (await engine.secret("key"), await engine.secret("old")) == (b"\x00\xff", None)
        rows = [row async for page in engine.audit() for row in page]
        assert rows == [*first.audit, *second.audit]
        assert [row async for page in engine.audit(after=1) for row in page] == second.audit


@engines
async def test_a_group_on_other_ground_is_refused_whole(factory: EngineFactory, tmp_path: Path) -> None:
    async with _opened(factory, tmp_path) as engine:
        first = group(EMPTY, "a")
        assert (await engine.commit(first)).written
        late = group(EMPTY, "b")
        outcome = await engine.commit(late)
        assert (outcome.written, outcome.mark) == (False, first.after)
        assert await engine.mark() == first.after
        assert not await _fate(engine, late), "another group has its number"
        assert set(await _resources(engine)) == {"a"}
        await engine.commit(group(first.after, "c"))  # and the engine goes on


@engines
async def test_a_group_that_fails_midway_leaves_nothing(factory: EngineFactory, tmp_path: Path) -> None:
    async with _opened(factory, tmp_path) as engine:
        broken = group(EMPTY, "a")
        broken.audit = [*broken.audit, *broken.audit]  # the same entry twice cannot be stored
        with pytest.raises(FleetplaneError):
            await engine.commit(broken)
        assert await engine.mark() == EMPTY
        assert await _resources(engine) == {}
        await engine.commit(group(EMPTY, "a"))


@engines
async def test_history_comes_in_whole_transactions(factory: EngineFactory, tmp_path: Path) -> None:
    async with _opened(factory, tmp_path) as engine:
        mark = EMPTY
        for size in (2, 1, 5, 1):
            made = group(mark, *(f"n{n}" for n in range(size)))
            await engine.commit(made)
            mark = made.after

        async def page(after: int, until: int, limit: int) -> tuple[list[int], bool]:
            found = await engine.history("thing", after=after, until=until, limit=limit)
            return [row.revision for row in found.events], found.complete

        assert await page(0, 9, 100) == ([1, 2, 3, 4, 5, 6, 7, 8, 9], True)
        assert await page(0, 9, 9) == ([1, 2, 3, 4, 5, 6, 7, 8, 9], True)
        assert await page(0, 9, 5) == ([1, 2, 3], False)
        assert await page(3, 9, 2) == ([4, 5, 6, 7, 8], False)
        assert await page(5, 9, 2) == ([6, 7, 8], False), "the rest of a transaction"
        assert await page(0, 3, 100) == ([1, 2, 3], True)
        assert await page(9, 9, 100) == ([], True)
        assert (await engine.history("other", after=0, until=9, limit=10)).events == []


@engines
async def test_compaction_removes_history_and_says_how_far(factory: EngineFactory, tmp_path: Path) -> None:
    async with _opened(factory, tmp_path) as engine:
        first = group(EMPTY, "a")
        await engine.commit(first)
        second = group(first.after, "b")
        second.after = replace(second.after, compacted=1)
        await engine.commit(second)
        page = await engine.history("thing", after=0, until=2, limit=10)
        assert (page.compacted, [row.revision for row in page.events]) == (1, [2])
        assert set(await _resources(engine)) == {"a", "b"}


@engines
async def test_the_condition_is_the_groups_number_and_not_the_revision(
    factory: EngineFactory, tmp_path: Path
) -> None:
    """A secret moves the audit chain and no revision: who does not know of it must not write on."""
    async with _opened(factory, tmp_path) as engine:
        first = group(EMPTY)
        first.secrets = [SecretRow("key", b"1", 1)]
        assert (await engine.commit(first)).mark.revision == 0
        assert not (await engine.commit(group(EMPTY, "a"))).written
        assert (await engine.commit(group(first.after, "a"))).written


@engines
async def test_a_claim_that_has_an_owner_is_refused_by_the_database_itself(
    factory: EngineFactory, tmp_path: Path
) -> None:
    async with _opened(factory, tmp_path) as engine:
        first = group(EMPTY, "a")
        first.claims = [ClaimRow("thing", "s", "token", "t1", "a")]
        await engine.commit(first)
        second = group(first.after, "b")
        second.claims = [ClaimRow("thing", "s", "token", "t1", "b")]
        with pytest.raises(IntegrityError):
            await engine.commit(second)
        assert not await _fate(engine, second)
        assert replace(await engine.mark(), number=1) == first.after, "an engine may have taken its number"
        assert list((await _contents(engine)).claims) == first.claims


@engines
async def test_the_fate_of_a_group_is_known_by_its_id(factory: EngineFactory, tmp_path: Path) -> None:
    async with _opened(factory, tmp_path) as engine:
        first = group(EMPTY, "a")
        await engine.commit(first)
        assert await _fate(engine, first)
        assert not (await engine.settle(EMPTY, b"another", GroupAuthor())).written
        never = group(first.after, "b")
        settled = await engine.settle(never.before, never.id, never.author)
        assert (settled.written, settled.mark.revision) == (False, 1)
        assert (await engine.commit(group(settled.mark, "c"))).written


@engines
async def test_groups_are_read_whole_in_order_and_with_their_author(
    factory: EngineFactory, tmp_path: Path
) -> None:
    async with _opened(factory, tmp_path) as engine:
        mark, made = EMPTY, []
        if isinstance(engine, PostgresEngine):  # writes for servers that it knows
            assert [await engine.enlist("srv") for _ in range(3)] == [1, 2, 3]
        for size in (2, 0, 3, 5, 0):
            one = group(mark, *(f"n{n}" for n in range(size)))
            one.author = GroupAuthor("srv", 3, 0)
            if not size:
                one.log = [LogRow(mark.revision, 0, "SECRET", "", "", b"body")]
            outcome = await engine.commit(one)
            assert (outcome.written, outcome.mark, outcome.author) == (True, one.after, one.author)
            made.append(one)
            mark = one.after

        async def numbers(after: int, limit: int) -> list[int]:
            page = await engine.groups(after=after, limit=limit)
            assert page.head == mark
            assert page.before == (made[after - 1].after if after else EMPTY)
            for found in page.groups:
                wrote = made[found.mark.number - 1]
                assert (found.mark, found.id, found.author) == (wrote.after, wrote.id, wrote.author)
                assert list(found.log) == wrote.log
            return [found.mark.number for found in page.groups]

        assert await numbers(0, 100) == [1, 2, 3, 4, 5]
        assert await numbers(0, 4) == [1, 2]
        assert await numbers(0, 1) == [1], "at least one, however large"
        assert await numbers(2, 3) == [3]
        assert await numbers(3, 2) == [4]
        assert await numbers(5, 100) == []


@engines
async def test_what_is_behind_the_horizon_is_deleted_a_bit_at_a_time(
    factory: EngineFactory, tmp_path: Path
) -> None:
    async with _opened(factory, tmp_path) as engine:
        mark = EMPTY
        for _ in range(5):
            one = group(mark, "a", "b")
            await engine.commit(one)
            mark = one.after
        assert await engine.trim(100) == 0
        last = group(mark, "a")
        last.after = replace(last.after, compacted=7)
        await engine.commit(last)
        assert await engine.history_bytes() == 4 * len(b"body")
        assert [await engine.trim(5), await engine.trim(5)] == [5, 1]
        page = await engine.groups(after=0, limit=100)
        assert [found.mark.number for found in page.groups] == [4, 5, 6], "number 1 is missing: a gap"
        assert [len(found.log) for found in page.groups] == [2, 2, 1], "and what is kept is whole"
        history = await engine.history("thing", after=7, until=11, limit=100)
        assert [row.revision for row in history.events] == [8, 9, 10, 11]


@engines
async def test_two_writers_at_once_never_both_write(factory: EngineFactory, tmp_path: Path) -> None:
    async with _opened(factory, tmp_path) as one, _opened(factory, tmp_path) as other:
        mark = EMPTY
        for turn in range(10):
            groups = [group(mark, f"one{turn}"), group(mark, f"other{turn}")]
            outcomes = await asyncio.gather(one.commit(groups[0]), other.commit(groups[1]))
            assert sorted(outcome.written for outcome in outcomes) == [False, True]
            winner = groups[0] if outcomes[0].written else groups[1]
            assert outcomes[0].mark == outcomes[1].mark == winner.after
            mark = winner.after
        assert len((await one.groups(after=0, limit=1000)).groups) == 10


async def test_a_reader_who_leaves_while_a_connection_is_made_leaves_nobody_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await _sqlite(tmp_path)
    connecting, going_on = threading.Event(), threading.Event()
    connect = sqlite3.connect
    made: list[tuple[threading.Thread, sqlite3.Connection]] = []

    def held_back(*args: Any, **options: Any) -> sqlite3.Connection:
        connecting.set()
        assert going_on.wait(60)
        made.append((threading.current_thread(), connect(*args, **options)))
        return made[0][1]

    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", held_back)
        async with engine.load([]):  # has the only connection there is
            reading = asyncio.create_task(engine.lineage())
            assert await asyncio.to_thread(connecting.wait, 60)
            reading.cancel()
            await asyncio.sleep(0)
            assert not reading.done()
            going_on.set()
            with pytest.raises(asyncio.CancelledError):
                await reading
    thread, connection = made[0]
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.total_changes  # noqa: B018  # asked for, to be told that there is nobody
    await engine.close()
