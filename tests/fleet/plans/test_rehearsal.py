"""Changes that are tried on a draft and then written whole, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.shared.storekit import OTHER, SCOPE, THING, Spec, opened, put, remove

from fleetplane.fleet.plans.rehearsal import Rehearsal, Stale, Written, carried_out, rehearsed
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.store import Store

CLOCK = SystemClock()
R = TypeVar("R")


def returning(change: Callable[[Rehearsal], Awaitable[R]]) -> Callable[[Rehearsal], Awaitable[Any]]:
    async def changed(rehearsal: Rehearsal) -> Callable[[Written], R]:
        value = await change(rehearsal)
        return lambda _: value

    return changed


async def both(rehearsal: Rehearsal) -> str:
    """Two kinds, a claim, a secret and a deletion."""
    draft = rehearsal.draft
    seen = draft.get(THING, SCOPE, "a")
    value = seen.spec.value if seen is not None else 0
    draft.put(THING, SCOPE, "a", spec=Spec(value=value + 1), labels={"made": "here"})
    draft.put(OTHER, SCOPE, "b", spec=Spec(value=len(draft.list(THING, SCOPE))))
    draft.claim(THING, SCOPE, "name", "x", "a")
    draft.put_secret("s", b"sealed")
    if draft.get(THING, SCOPE, "old") is not None:
        draft.delete(THING, SCOPE, "old")
    return f"{value + 1}"


async def test_a_rehearsal_writes_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path / "db") as store:
        revision = store.revision
        assert await rehearsed(store, CLOCK, both) == "1"
        assert store.revision == revision
        assert store.get(THING, SCOPE, "a") is None


async def test_what_was_rehearsed_is_written_in_one_transaction(tmp_path: Path) -> None:
    async with opened(tmp_path / "db") as store:
        await put(store, "old")
        async with store.watch(THING) as watch:
            done = await carried_out(store, CLOCK, returning(both), actor="tester", action="plan")
            batch = await anext(aiter(watch))

        assert done.value == "1"
        assert {(event.type.value, event.resource.name) for event in batch.events} == {
            ("ADDED", "a"),
            ("DELETED", "old"),
        }
        made, other = store.get(THING, SCOPE, "a"), store.get(OTHER, SCOPE, "b")
        assert made is not None
        assert made.labels == {"made": "here"}
        assert other is not None
        assert other.spec.value == 2
        assert store.claimed_by(THING, SCOPE, "name", "x") == "a"
        assert await store.get_secret("s") == b"sealed"


@pytest.mark.parametrize("interference", ["read", "list", "claim"])
async def test_nothing_is_written_once_something_that_was_read_has_moved(
    tmp_path: Path, interference: str
) -> None:
    async with opened(tmp_path / "db") as store:
        rehearsal = Rehearsal(store, CLOCK)
        await both(rehearsal)
        if interference == "read":
            await put(store, "a", 5)
        elif interference == "list":
            await put(store, "another")
        else:
            await store.transact(
                lambda draft: draft.claim(THING, SCOPE, "name", "x", "z"), actor="t", action="t", touches=()
            )
        with pytest.raises(Stale):
            await rehearsal.carry_out(lambda _: None, actor="tester", action="plan")
        assert store.get(OTHER, SCOPE, "b") is None
        assert await store.get_secret("s") is None


async def test_a_change_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    async def failing(rehearsal: Rehearsal) -> None:
        await both(rehearsal)
        raise InvalidArgument("the second object is wrong", field="objects[1]")

    async with opened(tmp_path / "db") as store:
        with pytest.raises(InvalidArgument):
            await carried_out(store, CLOCK, returning(failing), actor="tester", action="plan")
        assert store.get(THING, SCOPE, "a") is None


async def test_concurrent_changes_all_happen_one_after_the_other(tmp_path: Path) -> None:
    async def counted(rehearsal: Rehearsal) -> int:
        draft = rehearsal.draft
        seen = draft.get(THING, SCOPE, "n")
        value = (seen.spec.value if seen is not None else 0) + 1
        draft.put(THING, SCOPE, "n", spec=Spec(value=value))
        return value

    async with opened(tmp_path / "db") as store:
        done = await asyncio.gather(
            *(carried_out(store, CLOCK, returning(counted), actor="tester", action="plan") for _ in range(4))
        )
        assert sorted(one.value for one in done) == [1, 2, 3, 4]


async def test_a_value_passes_from_one_owner_to_another(tmp_path: Path) -> None:
    def claim(store: Store, owner: str) -> object:
        return store.transact(
            lambda draft: draft.claim(THING, SCOPE, "name", "x", owner), actor="t", action="t", touches=()
        )

    async def passed(rehearsal: Rehearsal) -> None:
        draft = rehearsal.draft
        draft.release(THING, SCOPE, "name", "x", "a")
        draft.claim(THING, SCOPE, "name", "x", "b")

    async with opened(tmp_path / "db") as store:
        await put(store, "gone")
        await remove(store, "gone")
        await claim(store, "a")  # type: ignore[misc]
        await carried_out(store, CLOCK, returning(passed), actor="tester", action="plan")
        assert store.claimed_by(THING, SCOPE, "name", "x") == "b"
