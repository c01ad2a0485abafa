"""The change of a commit hook is durable with its transaction, or not at all."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from support.shared.storekit import OTHER, SCOPE, THING, Spec, opened, put, remove

from fleetplane.kernel.errors import Conflict
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft, HookedChange
from fleetplane.kernel.store.draft import UndeclaredChange

NOTE = THING.key(SCOPE, "note")


def noting(draft: Draft, value: Any) -> None:
    changed = sorted((before is None, after is None) for before, after in draft.differences())
    draft.put(THING, SCOPE, "note", spec=Spec(value=len(changed), padding=value.name))


def hook(actor: str, _action: str, touches: Collection[Key]) -> HookedChange | None:
    assert actor == "tester"
    if THING.key(SCOPE, "quiet") in touches:
        return None
    return HookedChange(change=noting, touches=frozenset({NOTE}))


async def test_a_hook_writes_in_the_same_transaction_and_the_answer_stays(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path / "s.db") as store:
        store.add_hook(hook, THING)
        done = await put(store, "a", 1)
        note = store.get(THING, SCOPE, "note")
        assert note is not None
        assert (done.value.name, note.revision) == ("a", done.revision)
        assert note.spec == Spec(value=1, padding="a")


async def test_a_hook_may_add_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path / "s.db") as store:
        store.add_hook(hook, THING)
        await put(store, "quiet")
        assert store.get(THING, SCOPE, "note") is None


async def test_a_hook_that_refuses_undoes_the_transaction(tmp_path: Path) -> None:
    def refusing(_draft: Draft, _value: Any) -> None:
        raise Conflict("not so")

    async with opened(tmp_path / "s.db") as store:
        store.add_hook(lambda *_: HookedChange(change=refusing))
        with pytest.raises(Conflict, match="not so"):
            await put(store, "a")
        assert store.get(THING, SCOPE, "a") is None


async def test_a_hook_declares_what_it_touches(tmp_path: Path) -> None:
    async with opened(tmp_path / "s.db") as store:
        store.add_hook(lambda *_: HookedChange(change=noting))
        with pytest.raises(UndeclaredChange):
            await put(store, "a")


async def test_a_draft_tells_what_was_before_and_what_is_now(tmp_path: Path) -> None:
    seen: list[tuple[int | None, int | None]] = []

    def looking(draft: Draft, _value: Any) -> None:
        for before, after in draft.differences():
            seen.append((before.spec.value if before else None, after.spec.value if after else None))

    async with opened(tmp_path / "s.db") as store:
        store.add_hook(lambda *_: HookedChange(change=looking))
        await put(store, "a", 1)
        await put(store, "a", 2)
        await remove(store, "a")
    assert seen == [(None, 1), (1, 2), (2, None)]


async def test_a_hook_of_a_kind_is_called_for_transactions_that_touch_it_and_once(tmp_path: Path) -> None:
    called: list[str] = []

    def of_things(*_: object) -> None:
        called.append("things")

    def of_every_write(*_: object) -> None:
        called.append("all")

    async with opened(tmp_path / "s.db") as store:
        store.add_hook(of_things, THING, OTHER)
        store.add_hook(of_every_write)
        await store.put_secret("one", b"1")
        assert called == ["all"]
        await store.transact(
            lambda _: None,
            actor="tester",
            action="look",
            touches=(THING.key(SCOPE, "a"), OTHER.key(SCOPE, "a")),
        )
    assert called == ["all", "all", "things"]
