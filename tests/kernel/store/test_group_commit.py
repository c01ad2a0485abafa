"""The writer: groups, settlement, cancellation, and what callers are told when a commit fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.shared.storekit import (
    DEADLINE_SECONDS,
    OTHER,
    SCOPE,
    THING,
    FaultyEngine,
    Spec,
    Status,
    audit_of,
    flat,
    opened,
    opened_faulty,
    put,
    taken,
)

from fleetplane.kernel.errors import (
    AlreadyExists,
    IntegrityError,
    ResourceExhausted,
    StorageFull,
    Unavailable,
)
from fleetplane.kernel.resources import Resource
from fleetplane.kernel.store import ABSENT, Committed, Store

Writing = asyncio.Task[Committed[Resource[Spec, Status]]]


async def _held(store: Store, engine: FaultyEngine, name: str) -> Writing:
    """A write whose commit has begun and does not end until the gate opens."""
    engine.gate.clear()
    engine.committing.clear()
    writing = asyncio.create_task(put(store, name, 1))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await engine.committing.wait()
    return writing


async def _queued(store: Store, *names: str) -> list[Writing]:
    writes = [asyncio.create_task(put(store, name, 1)) for name in names]
    await asyncio.sleep(0)
    return writes


async def test_what_arrives_during_a_commit_is_gathered_into_the_next(tmp_path: Path) -> None:
    async with opened_faulty(tmp_path / "store.db") as (store, engine):
        first = await _held(store, engine, "first")
        others = await _queued(store, *(f"n{number}" for number in range(50)))
        assert store.statistics().queued == 50
        engine.gate.set()
        await asyncio.gather(first, *others)
        assert [len(group.audit) for group in engine.commits] == [1, 50]
        assert store.statistics().largest_group == 50


async def test_a_group_limit_of_one_commits_each_write_by_itself(tmp_path: Path) -> None:
    async with opened_faulty(tmp_path / "store.db", group_limit=1) as (store, engine):
        await asyncio.gather(*(put(store, f"n{number}") for number in range(10)))
        assert [len(group.audit) for group in engine.commits] == [1] * 10


async def test_nothing_is_seen_or_answered_before_it_is_durable(tmp_path: Path) -> None:
    async with opened_faulty(tmp_path / "store.db") as (store, engine):
        watch = store.watch(THING)
        writing = await _held(store, engine, "x")
        assert store.get(THING, SCOPE, "x") is None
        assert store.revision == 0
        assert not (await watch.next(idle_seconds=0.01)).events
        assert not writing.done()
        engine.gate.set()
        assert (await writing).revision == 1
        assert store.get(THING, SCOPE, "x") is not None


async def test_a_transaction_that_changes_nothing_waits_for_what_it_saw(tmp_path: Path) -> None:
    async with opened_faulty(tmp_path / "store.db") as (store, engine):
        first = await _held(store, engine, "first")
        await _queued(store, "x")
        looking = asyncio.create_task(
            store.transact(lambda draft: draft.get(THING, SCOPE, "x"), actor="t", action="look", touches=[])
        )
        await asyncio.sleep(0)
        engine.gate.set()
        seen = await looking
        assert first.done()
        assert seen.revision == 2
        assert store.get(THING, SCOPE, "x") == seen.value


async def test_the_queue_is_bounded(tmp_path: Path) -> None:
    async with opened_faulty(tmp_path / "store.db", queue_limit=3) as (store, engine):
        first = await _held(store, engine, "first")
        others = await _queued(store, "a", "b", "c")
        with pytest.raises(ResourceExhausted):
            await put(store, "d")
        assert store.statistics().queue_refusals == 1
        assert not store.pending(THING.key(SCOPE, "d"))
        engine.gate.set()
        await asyncio.gather(first, *others)


async def test_a_reader_can_wait_for_what_was_accepted_before_it_came(tmp_path: Path) -> None:
    async with opened_faulty(tmp_path / "store.db") as (store, engine):
        assert store.unsettled(THING, SCOPE, "x") is None
        assert not store.pending(THING)
        writing = await _held(store, engine, "x")
        assert store.pending(THING)
        assert store.pending(THING.key(SCOPE, "x"))
        assert not store.pending(THING.key(SCOPE, "y"))
        assert not store.pending(OTHER)
        assert store.unsettled(THING, SCOPE, "y") is None
        one, kind = store.unsettled(THING, SCOPE, "x"), store.unsettled(THING)
        assert one is not None
        assert kind is not None
        engine.gate.set()
        await asyncio.gather(one, kind)
        assert store.get(THING, SCOPE, "x") is not None
        await writing
        assert store.unsettled(THING) is None
        await store.settled(THING)


async def test_later_writes_do_not_extend_a_readers_wait(tmp_path: Path) -> None:
    async with opened_faulty(tmp_path / "store.db", group_limit=1) as (store, engine):
        writing = await _held(store, engine, "x")
        waiter = store.unsettled(THING, SCOPE, "x")
        assert waiter is not None
        (later,) = await _queued(store, "x")
        engine.gate.set()
        engine.committing.clear()
        await waiter
        assert writing.done() or store.revision == 1
        await later


async def test_one_reader_that_gives_up_does_not_take_the_others_along(tmp_path: Path) -> None:
    async with opened_faulty(tmp_path / "store.db") as (store, engine):
        writing = await _held(store, engine, "x")
        readers = [asyncio.create_task(store.settled(THING, SCOPE, "x")) for _ in range(3)]
        await asyncio.sleep(0)
        readers[0].cancel()
        await asyncio.sleep(0)
        assert not readers[1].done()
        engine.gate.set()
        await asyncio.gather(*readers[1:], writing)


async def test_a_refused_write_is_settled_only_with_the_writes_before_it(tmp_path: Path) -> None:
    async with opened_faulty(tmp_path / "store.db") as (store, engine):
        first = await _held(store, engine, "first")
        (writing,) = await _queued(store, "x")
        refused = asyncio.create_task(
            store.transact(
                lambda draft: draft.put(THING, SCOPE, "x", spec=Spec(value=9), expect=ABSENT),
                actor="t",
                action="put",
                touches=[THING.key(SCOPE, "x")],
            )
        )
        await asyncio.sleep(0)
        waiter = store.unsettled(THING, SCOPE, "x")
        assert waiter is not None
        engine.gate.set()
        await waiter
        assert store.get(THING, SCOPE, "x") is not None
        await asyncio.gather(first, writing)
        with pytest.raises(AlreadyExists):
            await refused


# Cancellation.


async def test_a_caller_that_leaves_the_queue_leaves_no_write(tmp_path: Path) -> None:
    async with opened_faulty(tmp_path / "store.db") as (store, engine):
        first = await _held(store, engine, "first")
        leaving, staying = await _queued(store, "leaving", "staying")
        leaving.cancel()
        await asyncio.sleep(0)
        engine.gate.set()
        await asyncio.gather(first, staying)
        assert [thing.name for thing in store.list(THING)] == ["first", "staying"]
        assert not store.pending(THING)


async def test_a_caller_that_leaves_during_its_commit_leaves_a_whole_write(tmp_path: Path) -> None:
    async with opened_faulty(tmp_path / "store.db") as (store, engine):
        leaving = await _held(store, engine, "leaving")
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        engine.gate.set()
        await store.settled(THING)
        assert store.get(THING, SCOPE, "leaving") is not None
        assert (await put(store, "next")).revision == 2
        assert (await audit_of(store)).intact


async def test_many_callers_coming_and_going_never_break_the_writer(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db", group_limit=4) as store:
        for round_number in range(20):
            writes = [asyncio.create_task(put(store, f"n{n}", round_number)) for n in range(10)]
            for _ in range(round_number % 5):
                await asyncio.sleep(0)
            for write in writes[:: 1 + round_number % 3]:
                write.cancel()
            await asyncio.gather(*writes, return_exceptions=True)
        await store.settled(THING)
        events = flat(await taken(store.watch(THING, after=0), store.revision))
        assert [event.revision for event in events] == list(range(1, store.revision + 1))
        assert (await audit_of(store)).intact


# Failing commits.


async def test_a_failed_commit_fails_exactly_its_group_and_changes_nothing(tmp_path: Path) -> None:
    async with opened_faulty(tmp_path / "store.db") as (store, engine):
        first = await _held(store, engine, "first")
        others = await _queued(store, "a", "b")
        engine.fail_before = None
        engine.gate.set()
        await first
        assert (await asyncio.gather(*others))[0].revision == 2

        watch = store.watch(THING)
        engine.fail_before = StorageFull("no space left")
        answers = await asyncio.gather(put(store, "c"), put(store, "d"), return_exceptions=True)
        assert [type(answer) for answer in answers] == [StorageFull, StorageFull]
        assert answers[0] is not answers[1]
        assert (store.revision, store.get(THING, SCOPE, "c")) == (3, None)
        assert not store.pending(THING)
        assert not store.statistics().writable

        assert (await put(store, "e")).revision == 4
        assert store.statistics().writable
        assert [event.resource.name for event in (await watch.next()).events] == ["e"]
        assert (await audit_of(store)).intact


async def test_a_refusal_based_on_a_write_that_failed_is_not_told(tmp_path: Path) -> None:
    """Whoever was refused because of a write that then failed is told of the failure instead."""
    async with opened_faulty(tmp_path / "store.db") as (store, engine):
        key = THING.key(SCOPE, "x")

        def create(value: int) -> asyncio.Task[Committed[Resource[Spec, Status]]]:
            return asyncio.create_task(
                store.transact(
                    lambda draft: draft.put(THING, SCOPE, "x", spec=Spec(value=value), expect=ABSENT),
                    actor="t",
                    action="put",
                    touches=[key],
                )
            )

        def refuse() -> asyncio.Task[Committed[object]]:
            def change(_: object) -> object:
                raise ValueError("by its own reasons")

            return asyncio.create_task(store.transact(change, actor="t", action="x", touches=[]))

        engine.fail_before = Unavailable("the disk is gone")
        answers = await asyncio.gather(refuse(), create(1), create(2), return_exceptions=True)
        assert [type(answer) for answer in answers] == [ValueError, Unavailable, Unavailable]


async def test_a_commit_that_failed_after_it_happened_is_acknowledged(tmp_path: Path) -> None:
    async with opened_faulty(tmp_path / "store.db") as (store, engine):
        engine.fail_after = Unavailable("the answer was lost")
        assert (await put(store, "x")).revision == 1
        assert store.get(THING, SCOPE, "x") is not None
        assert (await put(store, "y")).revision == 2
        assert (await audit_of(store)).intact


@pytest.mark.parametrize("happened", [True, False])
async def test_a_commit_of_unknown_fate_is_found_out_before_the_next(tmp_path: Path, happened: bool) -> None:
    async with opened_faulty(tmp_path / "store.db") as (store, engine):
        watch = store.watch(THING)
        if happened:
            engine.fail_after = Unavailable("the answer was lost")
        else:
            engine.fail_before = Unavailable("the disk is gone")
        engine.unreadable = 4
        with pytest.raises(Unavailable, match="does not say"):
            await put(store, "x")
        with pytest.raises(Unavailable, match="cannot be read"):
            await put(store, "y")  # still unreadable: nothing may be written on unknown ground
        assert not store.statistics().writable
        assert (await put(store, "z")).revision == (2 if happened else 1)
        names = [event.resource.name for event in flat(await taken(watch, store.revision))]
        assert names == (["x", "z"] if happened else ["z"])
        assert (await audit_of(store)).intact


async def test_a_database_changed_by_someone_else_stops_the_writer(tmp_path: Path) -> None:
    async def overtaken(path: Path) -> None:
        async with opened_faulty(path) as (store, _):
            await put(store, "x")
            async with opened_faulty(path) as (intruder, _):
                await put(intruder, "y")
            for _ in range(2):
                with pytest.raises(Unavailable):
                    await put(store, "z")
            assert store.get(THING, SCOPE, "x") is not None

    with pytest.raises(IntegrityError, match="someone else"):
        await overtaken(tmp_path / "store.db")
