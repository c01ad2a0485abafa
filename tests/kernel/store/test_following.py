"""Whoever follows a kind hears of everything from then on, and begins again if too much has happened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

from support.shared.storekit import DEADLINE_SECONDS, THING, opened, put

from fleetplane.kernel.store import Store, follow
from fleetplane.kernel.watch import EventBatch, Watch


async def next_of(following: AsyncGenerator[EventBatch]) -> list[int]:
    async with asyncio.timeout(DEADLINE_SECONDS):
        batch = await anext(following)
    return [event.resource.spec.value for event in batch.events]


async def lapsed(store: Store) -> None:
    """More than any watch that was open before is told of: the ring has moved on, and the log is cut."""
    for value in range(100, 120):
        await put(store, "a", value)
    await store.compact(store.revision)


async def test_what_is_there_is_looked_at_first_and_what_comes_is_told(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        await put(store, "a", 1)
        seen: list[int] = []

        async def look(_watch: Watch) -> None:
            await put(store, "b", 2)  # while it looks: comes after
            seen.extend(one.spec.value for one in store.list(THING))

        following = follow(store, THING, begin=look)
        assert await next_of(following) == [2]
        assert seen == [1, 2]
        await put(store, "a", 3)
        assert await next_of(following) == [3]
        assert seen == [1, 2]
        await following.aclose()


async def test_who_falls_behind_what_is_kept_looks_again_and_goes_on(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db", ring_events=4, tombstones=1) as store:
        looks: list[str] = []
        following = follow(
            store,
            THING,
            begin=lambda _watch: looks.append("begin"),
            again=lambda _watch: looks.append("again"),
        )
        waiting = asyncio.ensure_future(next_of(following))
        while not looks:
            await asyncio.sleep(0)
        await put(store, "a", 1)
        assert await waiting == [1]
        await remove_many(store)
        await lapsed(store)
        waiting = asyncio.ensure_future(next_of(following))
        async with asyncio.timeout(DEADLINE_SECONDS):
            while len(looks) < 2:
                await asyncio.sleep(0)
        assert looks == ["begin", "again"]
        await put(store, "a", 5)
        assert await waiting == [5]
        await following.aclose()


async def remove_many(store: Store) -> None:
    """So many deletions that memory does not know them any more."""
    for number in range(8):
        await put(store, f"gone-{number}", number)
        await store.transact(
            lambda draft, number=number: draft.delete(THING, "org/a", f"gone-{number}"),  # type: ignore[misc]
            actor="tester",
            action="delete",
            touches=[THING.key("org/a", f"gone-{number}")],
        )


async def test_a_store_that_closes_ends_it(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        following = follow(store, THING)
        waiting = asyncio.ensure_future(next_of(following))
        await asyncio.sleep(0)
    (outcome,) = await asyncio.gather(waiting, return_exceptions=True)
    assert isinstance(outcome, Exception)
