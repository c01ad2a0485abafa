"""A tenant that floods the writer waits for itself; its neighbours have their share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.shared.storekit import OTHER, THING, Spec, opened_faulty, put

from fleetplane.kernel.errors import ResourceExhausted
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft
from fleetplane.kernel.store.queue import FairQueue, share_of

LIMIT, GROUP = 512, 16


async def test_a_noisy_neighbour_costs_a_quiet_tenant_one_turn(tmp_path: Path) -> None:
    settings = {"queue_limit": LIMIT, "group_limit": GROUP}
    async with opened_faulty(tmp_path / "store.db", **settings) as (store, engine):
        engine.gate.clear()
        first = asyncio.create_task(put(store, "first"))
        await engine.committing.wait()
        noise = [asyncio.create_task(put(store, f"n{n}", scope="org/noisy/ws/1")) for n in range(LIMIT)]
        await asyncio.sleep(0)
        with pytest.raises(ResourceExhausted):
            await put(store, "more", scope="org/noisy")
        # The queue is full, and not with theirs: they are let in, and have every other place.
        quiet = [asyncio.create_task(put(store, f"q{n}", scope="org/quiet")) for n in range(GROUP)]
        await asyncio.sleep(0)
        assert store.statistics().queued == LIMIT + GROUP
        before = len(engine.commits)
        engine.gate.set()
        await asyncio.gather(first, *quiet)
        theirs = [any(row.scope == "org/quiet" for row in group.puts) for group in engine.commits[before:]]
        assert theirs[:3] == [False, True, True], "the first, and two groups in which they have half"
        assert not any(theirs[3:])
        assert sum(task.done() for task in noise) < LIMIT / 2
        await asyncio.gather(*noise)


async def test_readers_wait_for_all_tenants_writes_that_were_accepted(tmp_path: Path) -> None:
    async with opened_faulty(tmp_path / "store.db", group_limit=4) as (store, engine):
        engine.gate.clear()
        first = asyncio.create_task(put(store, "first", kind=OTHER))
        await engine.committing.wait()
        early = [asyncio.create_task(put(store, f"n{n}", n, scope="org/a")) for n in range(20)]
        late = [asyncio.create_task(put(store, f"n{n}", n, scope="org/b")) for n in range(2)]
        await asyncio.sleep(0)
        waiting = asyncio.create_task(store.settled(THING))
        await asyncio.sleep(0)
        engine.gate.set()
        await waiting
        assert len(store.list(THING)) == 22, "an earlier write of another tenant was not waited for"
        await asyncio.gather(first, *early, *late)
        assert not store.pending(THING)


async def test_what_touches_the_same_resource_is_written_in_its_order(tmp_path: Path) -> None:
    """Whoever's turn it is: a reader waits for the last of them only."""
    seen: list[int] = []

    def noting(number: int) -> Callable[[Draft], object]:
        def change(draft: Draft) -> object:
            seen.append(number)
            return draft.put(THING, "org/z", "shared", spec=Spec(value=number))

        return change

    async with opened_faulty(tmp_path / "store.db", group_limit=2) as (store, engine):
        engine.gate.clear()
        first = asyncio.create_task(put(store, "first"))
        await engine.committing.wait()
        shared = THING.key("org/z", "shared")
        tasks = []
        for number in range(12):
            scope = f"org/{'abc'[number % 3]}"
            touches = [shared, THING.key(scope, "x")]
            tasks.append(
                asyncio.create_task(store.transact(noting(number), actor="t", action="t", touches=touches))
            )
        await asyncio.sleep(0)
        engine.gate.set()
        await asyncio.gather(first, *tasks)
        assert seen == list(range(12))


class Waiting:
    def __init__(self, share: str, number: int) -> None:
        self.share, self.number, self.behind, self.taken = share, number, (), False


@given(st.lists(st.sampled_from("abcd"), max_size=60), st.integers(1, 7))
def test_everybody_has_a_share_and_nobody_is_overtaken_within_it(shares: list[str], limit: int) -> None:
    queue: FairQueue[Waiting] = FairQueue()
    for number, share in enumerate(shares):
        queue.push(Waiting(share, number))
    taken: list[Waiting] = []
    while len(queue):
        waiting = {share for share in "abcd" if any(s.share == share for s in rest(queue))}
        group = queue.take(limit)
        assert 0 < len(group) <= limit
        if len(waiting) <= limit:
            assert {one.share for one in group} == waiting, "somebody who waits had no turn"
        assert [one.number for one in group] == sorted(one.number for one in group)
        taken += group
    assert sorted(one.number for one in taken) == list(range(len(shares)))
    for share in set(shares):
        own = [one.number for one in taken if one.share == share]
        assert own == sorted(own)


def rest(queue: FairQueue[Waiting]) -> list[Waiting]:
    return [one for waiting in queue._shares.values() for one in waiting]


def test_a_share_is_a_tenants() -> None:
    assert share_of([Key("k", "org/acme/ws/web", "x"), Key("k", "org/zeta", "y")]) == "org/acme"
    assert share_of([Key("k", "tenant/a", "x")]) == "tenant/a"
    assert share_of([]) == share_of([Key("k", "", "x")]) == ""
