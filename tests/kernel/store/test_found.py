"""Changes of whatever is there, while more is coming."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.shared.storekit import SCOPE, THING, Spec, opened, put

from fleetplane.kernel.errors import Conflict
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft, Store, transact_found
from fleetplane.kernel.store.transaction import ATTEMPTS


def things(reader: Store | Draft) -> Sequence[Key]:
    return [one.key for one in reader.list(THING, SCOPE)]


def cleared(draft: Draft, keys: Sequence[Key]) -> int:
    for key in keys:
        draft.delete(THING, key.scope, key.name)
    return len(keys)


async def clear(store: Store) -> int:
    done = await transact_found(store, things, cleared, actor="tester", action="clear")
    return done.value


async def test_what_came_between_the_look_and_the_transaction_is_changed_too(tmp_path: Path) -> None:
    async with opened(tmp_path / "s.db") as store:
        await put(store, "one")
        coming = asyncio.create_task(put(store, "two"))
        clearing = asyncio.create_task(clear(store))  # looks before the other is written
        await coming
        assert await clearing == 2
        assert not store.list(THING, SCOPE)


async def test_nothing_to_change_is_no_error(tmp_path: Path) -> None:
    async with opened(tmp_path / "s.db") as store:
        assert await clear(store) == 0


async def test_whoever_always_loses_is_told_so(tmp_path: Path) -> None:
    looks = 0

    async with opened(tmp_path / "s.db") as store:

        def growing(reader: Store | Draft) -> Sequence[Key]:
            nonlocal looks
            looks += 1
            return [THING.key(SCOPE, f"{looks}")]

        with pytest.raises(Conflict, match="all the time"):
            await transact_found(store, growing, cleared, actor="tester", action="clear")
    assert looks == 2 * ATTEMPTS


async def test_many_who_replace_the_oldest_at_once_keep_the_number(tmp_path: Path) -> None:
    """More than may lose in a row: each of them moves the list on for all others."""
    async with opened(tmp_path / "s.db") as store:
        for number in range(60):
            await put(store, f"old-{number:02}")

        async def replace_the_oldest(number: int) -> None:
            key = THING.key(SCOPE, f"young-{number:02}")

            def by_age(reader: Store | Draft) -> Sequence[Key]:
                found = sorted(reader.list(THING, SCOPE), key=lambda one: one.created_revision)
                return [one.key for one in found]

            def change(draft: Draft, keys: Sequence[Key]) -> None:
                cleared(draft, keys)
                draft.put(THING, SCOPE, key.name, spec=Spec())

            await transact_found(
                store,
                lambda reader: by_age(reader)[:1],
                change,
                actor="tester",
                action="replace",
                touches=[key],
                among=by_age,
            )

        async with asyncio.TaskGroup() as tasks:
            for number in range(50):
                tasks.create_task(replace_the_oldest(number))
        left = [one.name for one in store.list(THING, SCOPE)]
        assert left == [f"old-{number}" for number in range(50, 60)] + [f"young-{n:02}" for n in range(50)]
