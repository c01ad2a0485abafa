"""What runs every change of a suite several times notices those that depend on it."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from support.shared.run_twice import run_twice
from support.shared.storekit import SCOPE, THING, Spec, opened, put

from fleetplane.kernel.errors import AlreadyExists
from fleetplane.kernel.store import Draft


async def test_a_change_of_its_draft_alone_may_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_twice(monkeypatch) as seen:
        async with opened(tmp_path / "store.db") as store:
            assert (await put(store, "x", 1)).revision == 1
            assert (await put(store, "x", 2)).revision == 2
    assert len(seen) == 2


async def test_a_change_that_leaves_something_behind_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, seen = count(), set[str]()

    def counts(draft: Draft) -> None:
        for _ in range(next(turns) + 1):
            draft.put(THING, SCOPE, "x", spec=Spec(value=1), renew=True)
            draft.put(THING, SCOPE, f"y{next(turns)}", spec=Spec(value=1))

    def remembers(draft: Draft) -> None:
        if "x" in seen:
            raise AlreadyExists("x")
        seen.add("x")

    async def run(change: object) -> None:
        async with opened(tmp_path / "store.db") as store:
            touches = [THING.key(SCOPE, "x"), *(THING.key(SCOPE, f"y{n}") for n in range(100))]
            await store.transact(change, actor="t", action="impure", touches=touches)  # type: ignore[arg-type]

    with pytest.raises(AssertionError, match="impure"), run_twice(monkeypatch):
        await run(counts)
    with (
        pytest.raises(AssertionError, match="impure"),
        run_twice(monkeypatch),
        pytest.raises(AlreadyExists),
    ):
        await run(remembers)
