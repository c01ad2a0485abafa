"""What every engine owes the store. A new engine is added to `engines` and must pass as it is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fleetplane.kernel import audit
from fleetplane.kernel.errors import FleetplaneError, IntegrityError
from fleetplane.kernel.store import StoreSettings
from fleetplane.kernel.store.engine import Claim, ClaimRow, Engine, EventRow, Mark, ResourceRow, WriteGroup
from fleetplane.kernel.store.sqlite import SqliteEngine

EngineFactory = Callable[[Path], Awaitable[Engine]]


async def _sqlite(directory: Path) -> Engine:
    return await SqliteEngine.open(StoreSettings(path=directory / "store.db"))


engines = pytest.mark.parametrize("factory", [pytest.param(_sqlite, id="sqlite")])
EMPTY = Mark(revision=0, compacted=0, audit_seq=0, audit_hash=audit.GENESIS)


@asynccontextmanager
async def _opened(factory: EngineFactory, directory: Path) -> AsyncIterator[Engine]:
    engine = await factory(directory)
    try:
        yield engine
    finally:
        await engine.close()


def group(before: Mark, *names: str, body: bytes = b"body") -> WriteGroup:
    """One transaction that puts these names."""
    revision, seq = before.revision + 1, before.audit_seq + 1
    row = audit.append(before.audit_hash, audit.Entry(seq, revision, 0, "t", "put", ()))
    return WriteGroup(
        before=before,
        after=replace(before, revision=revision, audit_seq=seq, audit_hash=row.hash),
        puts=[ResourceRow("thing", "s", name, revision, body) for name in names],
        events=[EventRow(revision, n, "ADDED", "thing", "s", body) for n, _ in enumerate(names)],
        kinds=[("thing", revision)],
        audit=[row],
    )


async def _resources(engine: Engine) -> dict[str, ResourceRow]:
    return {row.name: row async for page in engine.resources(["thing"]) for row in page}


@engines
async def test_a_new_database_is_empty(factory: EngineFactory, tmp_path: Path) -> None:
    async with _opened(factory, tmp_path) as engine:
        contents = await engine.contents()
        assert (contents.mark, contents.kinds, list(contents.claims)) == (EMPTY, {}, [])
        assert await engine.mark() == EMPTY
        assert await _resources(engine) == {}


@engines
async def test_a_committed_group_is_there_after_reopening(factory: EngineFactory, tmp_path: Path) -> None:
    first = group(EMPTY, "a", "b")
    first.claims = [ClaimRow("thing", "s", "slug", "nice", "a"), ClaimRow("thing", "s", "slug", "nasty", "a")]
    first.secrets = [("key", b"\x00\xff"), ("old", b"1")]
    second = group(first.after, "b", body=b"newer")
    second.deletes = [("thing", "s", "a")]
    second.releases = [Claim("thing", "s", "slug", "nasty")]
    second.claims = [ClaimRow("thing", "s", "slug", "nice", "b")]
    second.secret_deletes = [("old",)]
    async with _opened(factory, tmp_path) as engine:
        await engine.commit(first)
        await engine.commit(second)
    async with _opened(factory, tmp_path) as engine:
        contents = await engine.contents()
        assert contents.mark == second.after
        assert contents.kinds == {"thing": 2}
        assert list(contents.claims) == [ClaimRow("thing", "s", "slug", "nice", "b")]
        assert await _resources(engine) == {"b": ResourceRow("thing", "s", "b", 2, b"newer")}
        assert (await engine.secret("key"), await engine.secret("old")) == (b"\x00\xff", None)
        rows = [row async for page in engine.audit() for row in page]
        assert rows == [*first.audit, *second.audit]
        assert [row async for page in engine.audit(after=1) for row in page] == second.audit


@engines
async def test_a_group_on_other_ground_is_refused_whole(factory: EngineFactory, tmp_path: Path) -> None:
    async with _opened(factory, tmp_path) as engine:
        first = group(EMPTY, "a")
        await engine.commit(first)
        with pytest.raises(IntegrityError):
            await engine.commit(group(EMPTY, "b"))
        assert await engine.mark() == first.after
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

        assert await page(0, 4, 100) == ([1, 1, 2, 3, 3, 3, 3, 3, 4], True)
        assert await page(0, 4, 9) == ([1, 1, 2, 3, 3, 3, 3, 3, 4], True)
        assert await page(0, 4, 4) == ([1, 1, 2], False)
        assert await page(2, 4, 2) == ([3, 3, 3, 3, 3], False)
        assert await page(0, 2, 100) == ([1, 1, 2], True)
        assert await page(4, 4, 100) == ([], True)
        assert (await engine.history("other", after=0, until=4, limit=10)).events == []


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
