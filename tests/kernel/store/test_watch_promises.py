"""The six promises of a watch, and what happens to those who cannot keep up."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.shared.storekit import (
    DEADLINE_SECONDS,
    OTHER,
    SCOPE,
    THING,
    Spec,
    flat,
    opened,
    opened_faulty,
    put,
    put_together,
    remove,
    taken,
    told,
)

from fleetplane.kernel.errors import Compacted, ResourceExhausted, Unavailable
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.watch import Event, EventBatch, EventType


async def test_watches_are_ordered_unique_and_reliable(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db", coalesce_after_events=10_000) as store:
        watch = store.watch(THING)

        async def write(writer: int) -> None:
            for value in range(20):
                await put(store, f"w{writer}", value)

        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(taken(watch, 200))
            for writer in range(10):
                tasks.create_task(write(writer))
        events = flat(reading.result())
        revisions = [event.revision for event in events]
        assert revisions == list(range(1, 201))
        for writer in range(10):
            values = [event.resource.spec.value for event in events if event.resource.name == f"w{writer}"]
            assert values == list(range(20))


async def test_watches_are_atomic(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db", replay_page_events=4) as store:
        watch = store.watch(THING)
        for value in range(30):
            await put_together(store, ["a", "b", "c"], value)
        for reader in (watch, store.watch(THING, after=0)):
            batches = await taken(reader, 90)
            assert [event.revision for event in flat(batches)] == list(range(1, 91))
            for batch in batches:
                assert len(batch.events) % 3 == 0, "whole transactions"
                assert all(event.revision <= batch.revision for event in batch.events)


@pytest.mark.parametrize("ring", [4096, 2], ids=["from the ring", "from memory and history"])
async def test_resuming_after_any_event_of_a_transaction_loses_nothing(tmp_path: Path, ring: int) -> None:
    names = [f"n{number:02d}" for number in range(20)]
    async with opened(tmp_path / "store.db", ring_events=ring, replay_page_events=4) as store:
        await put_together(store, names, 0)
        before = store.revision
        await put_together(store, names, 1)
        for received in range(21):
            watch = store.watch(THING, after=before + received)
            rest = flat(await taken(watch, store.revision))
            assert [event.resource.name for event in rest] == names[received:]


async def test_what_is_there_is_told_apart_by_revision(tmp_path: Path) -> None:
    """Whoever lists in the order of revisions may go on after any of them."""
    async with opened(tmp_path / "store.db") as store:
        await put_together(store, ["a", "b", "c"], 1)
        await put(store, "a", 2)
        present = sorted(store.list(THING), key=lambda thing: thing.revision)
        assert [thing.name for thing in present] == ["b", "c", "a"]
        for place, thing in enumerate(present):
            rest = flat(await taken(store.watch(THING, after=thing.revision), store.revision))
            assert {event.resource.name for event in rest} >= {one.name for one in present[place + 1 :]}


async def test_a_replayed_transaction_larger_than_a_page_is_still_atomic(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    names = [f"n{number}" for number in range(20)]
    async with opened(path) as store:
        await put(store, "first")
        await put_together(store, names, 1)
        await put(store, "last")
    async with opened(path, replay_page_events=4) as store:
        batches = await taken(store.watch(THING, after=0), 22)
        assert [len(batch.events) for batch in batches] == [1, 20, 1]


async def test_watches_are_resumable_across_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with opened(path) as store:
        for value in range(10):
            await put(store, "x", value)
        await remove(store, "x")
    async with opened(path, replay_page_events=3) as store:
        watch = store.watch(THING, after=4)
        await put(store, "x", 99)
        events = flat(await taken(watch, 12))
        assert [event.revision for event in events] == list(range(5, 13))
        assert told(events)[-3:] == [("MODIFIED", "x", 9), ("DELETED", "x", 9), ("ADDED", "x", 99)]


async def test_a_resumed_watch_joins_the_present_without_gap_or_duplicate(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with opened(path) as store:
        for value in range(50):
            await put(store, "x", value)
    async with opened(path, ring_events=1000, coalesce_after_events=1000, replay_page_events=7) as store:
        watch = store.watch(THING, after=0)

        async def write() -> None:
            for value in range(50, 100):
                await put(store, "x", value)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(write())
            reading = tasks.create_task(taken(watch, 100))
        assert [event.revision for event in flat(reading.result())] == list(range(1, 101))


async def test_a_replay_stops_where_memory_does_though_the_database_is_ahead(tmp_path: Path) -> None:
    async with opened_faulty(tmp_path / "store.db", ring_events=1) as (store, engine):
        for value in range(5):
            await put(store, "x", value)
        engine.gate_after.clear()
        engine.committed.clear()
        ahead = asyncio.ensure_future(put(store, "x", 5))
        await asyncio.wait_for(
            engine.committed.wait(), DEADLINE_SECONDS
        )  # on disk, but not yet told to anyone
        watch = store.watch(THING, after=0)
        assert [event.revision for event in flat(await taken(watch, 5))] == [1, 2, 3, 4, 5]
        engine.gate_after.set()
        await ahead
        assert [event.revision for event in flat(await taken(watch, 6))] == [6]


async def test_a_watch_may_begin_at_any_revision_within_the_ring_or_before_it(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db", ring_events=4, coalesce_after_events=100) as store:
        for value in range(10):
            await put(store, "x", value)
        for after in range(11):
            events = flat(await taken(store.watch(THING, after=after), 10))
            assert [event.revision for event in events] == list(range(after + 1, 11))


async def test_a_snapshot_is_continued_by_a_watch_after_its_revision(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        for name in "abc":
            await put(store, name)
        revision, things = store.snapshot(THING)
        watch = store.watch(THING, after=revision)
        await remove(store, "b")
        assert [thing.name for thing in things] == ["a", "b", "c"]
        assert told(flat(await taken(watch, 4))) == [("DELETED", "b", 0)]


async def test_watches_are_bookmarkable(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        watch = store.watch(THING)
        await put(store, "x", kind=OTHER)
        bookmark = await watch.next(idle_seconds=0.01)
        assert (bookmark.revision, list(bookmark.events), watch.revision) == (1, [], 1)
        await put(store, "y")
        assert told((await watch.next(idle_seconds=10)).events) == [("ADDED", "y", 0)]
        assert (await watch.next(idle_seconds=0.01)).revision == 2


async def test_an_idle_period_starts_anew_with_each_wait(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        watch = store.watch(THING)
        loop = asyncio.get_running_loop()
        first = asyncio.ensure_future(watch.next(idle_seconds=60))
        await put(store, "x")
        assert (await first).events
        start = loop.time()
        assert not (await watch.next(idle_seconds=0.4)).events
        assert loop.time() - start > 0.35


async def test_a_revision_that_is_no_longer_kept_is_a_compaction_error(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with opened(path) as store:
        for value in range(10):
            await put(store, "x", value)
        await store.compact(6)
        with pytest.raises(Compacted, match="history begins after 5"):
            store.watch(THING, after=4)
        assert len(flat(await taken(store.watch(THING, after=5), 10))) == 5
    async with opened(path) as store:
        with pytest.raises(Compacted):
            store.watch(THING, after=4)
        assert [event.revision for event in flat(await taken(store.watch(THING, after=5), 10))] == [
            6,
            7,
            8,
            9,
            10,
        ]
        assert store.get(THING, SCOPE, "x") is not None


async def test_a_revision_in_the_future_is_a_compaction_error(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        with pytest.raises(Compacted, match="in the future"):
            store.watch(THING, after=1)


async def test_a_watch_that_history_overtakes_while_it_replays_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with opened(path) as store:
        for value in range(20):
            await put(store, "x", value)
    async with opened(path, replay_page_events=2) as store:
        watch = store.watch(THING, after=0)
        assert [event.revision for event in (await watch.next()).events] == [1, 2]
        await store.compact(15)
        with pytest.raises(Compacted):
            await watch.next()


async def test_the_log_is_trimmed_to_its_length_by_itself(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db", history_revisions=20, history_slack_revisions=5) as store:
        for value in range(100):
            await put(store, "x", value)
        statistics = store.statistics()
        assert 20 <= statistics.revision - statistics.compacted <= 25
        with pytest.raises(Compacted):
            store.watch(THING, after=statistics.compacted - 1)
        page = await store.history("thing", "", after=statistics.compacted, until=100)
        assert len(page.events) == 100 - statistics.compacted


async def test_a_slow_reader_is_coalesced_by_key_within_the_ring(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db", ring_events=1000, coalesce_after_events=10) as store:
        await put(store, "old")
        watch = store.watch(THING)
        for value in range(1, 21):
            await put(store, "old", value)
            await put(store, "new", value)
        await put(store, "fleeting")
        await remove(store, "fleeting")
        batch = await watch.next()
        assert told(batch.events) == [("MODIFIED", "old", 20), ("ADDED", "new", 20)]
        assert batch.revision == store.revision
        assert store.statistics().coalesced_events == 40


async def _churn(store: Store) -> None:
    for value in range(1, 21):
        await put(store, "kept", value)
    await put(store, "fleeting")
    await remove(store, "fleeting")
    await remove(store, "doomed")
    await remove(store, "phoenix")
    await put(store, "phoenix", 7)
    await put(store, "new", 1)


@pytest.mark.parametrize("tombstones", [100, 1])
async def test_a_reader_that_fell_off_the_ring_still_ends_with_every_last_state(
    tmp_path: Path, tombstones: int
) -> None:
    """With tombstones from memory; without enough of them, by replaying the log."""
    async with opened(tmp_path / "store.db", ring_events=4, tombstones=tombstones) as store:
        for name in ("kept", "doomed", "phoenix", "quiet"):
            await put(store, name)
        watch = store.watch(THING)
        await _churn(store)
        events = flat(await taken(watch, store.revision))
        if tombstones == 100:
            assert told(events) == [
                ("MODIFIED", "kept", 20),
                ("DELETED", "doomed", 0),
                ("DELETED", "phoenix", 0),
                ("ADDED", "phoenix", 7),
                ("ADDED", "new", 1),
            ]
            assert store.statistics().refills == 1
        else:
            assert [event.revision for event in events] == list(range(5, store.revision + 1))
        gone = [
            event for event in events if event.type is EventType.DELETED and event.resource.name == "doomed"
        ]
        assert gone[0].resource.revision == gone[0].revision > gone[0].resource.created_revision
        await put(store, "after")
        assert told((await watch.next()).events) == [("ADDED", "after", 0)]


async def test_a_reader_whose_missing_history_is_compacted_is_told_so(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db", ring_events=4, tombstones=1) as store:
        for name in ("kept", "doomed", "phoenix"):
            await put(store, name)
        watch = store.watch(THING)
        await _churn(store)
        await store.compact(store.revision)
        with pytest.raises(Compacted):
            await watch.next()


async def test_an_idle_watcher_is_not_slow_however_much_others_change(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db", ring_events=4) as store:
        watch = store.watch(THING)
        waiting = asyncio.ensure_future(watch.next())
        for value in range(20):
            await put(store, "x", value, kind=OTHER)
        assert not waiting.done()
        await put(store, "mine")
        assert told((await waiting).events) == [("ADDED", "mine", 0)]
        assert store.statistics().refills == 0


async def test_memory_is_bounded_however_many_watchers_never_read(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db", ring_events=16, tombstones=8) as store:
        watches = [store.watch(THING) for _ in range(200)]
        for value in range(100):
            await put(store, "x", value)
            await remove(store, "x")
        statistics = store.statistics()
        assert (statistics.ring_events, statistics.tombstones, statistics.watchers) == (16, 8, 200)
        gc.collect()
        kept = {id(referent) for watch in watches for referent in gc.get_referents(watch)}
        assert len(kept) < 200 * 4 + 20  # a hub, two strings and three small numbers each: no events
        for watch in watches:
            watch.close()
        assert store.statistics().watchers == 0


async def test_there_are_only_so_many_watches(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db", watch_limit=2) as store:
        with store.watch(THING), store.watch(THING), pytest.raises(ResourceExhausted):
            store.watch(THING)
        store.watch(THING).close()


async def test_only_watchers_of_that_kind_and_scope_are_woken(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        scopes = ["", "org", "org/a", "org/a/x", "org/b"]
        waiting = {scope: asyncio.ensure_future(store.watch(THING, scope).next()) for scope in scopes}
        other = asyncio.ensure_future(store.watch(OTHER).next())
        await asyncio.sleep(0)
        await put(store, "x", scope="org/a")
        heard = {scope for scope in scopes if waiting[scope].done() or await _soon(waiting[scope])}
        assert heard == {"", "org", "org/a"}
        assert not other.done()
        for task in (*waiting.values(), other):
            task.cancel()


async def _soon(task: asyncio.Future[Any]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return task.done()


async def test_watchers_at_the_same_place_share_one_batch_and_its_memo(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        waiting = [asyncio.ensure_future(store.watch(THING, SCOPE).next()) for _ in range(10)]
        await asyncio.sleep(0)
        await put(store, "x")
        batches = await asyncio.gather(*waiting)
        assert len({id(batch) for batch in batches}) == 1
        batches[0].events[0].memo["json"] = b"{}"
        assert batches[9].events[0].memo == {"json": b"{}"}


async def test_a_name_deleted_and_made_again_in_one_transaction_tells_both(tmp_path: Path) -> None:
    def renew(draft: Draft) -> None:
        draft.delete(THING, SCOPE, "x")
        draft.put(THING, SCOPE, "x", spec=Spec(value=2))

    path = tmp_path / "store.db"
    async with opened(path) as store:
        before = (await put(store, "x", 1)).value
        watch = store.watch(THING)
        await store.transact(renew, actor="t", action="renew", touches=[THING.key(SCOPE, "x")])
        batch = await watch.next()
        assert told(batch.events) == [("DELETED", "x", 1), ("ADDED", "x", 2)]
        assert [event.resource.uid == before.uid for event in batch.events] == [True, False]
    async with opened(path) as store:
        assert told(flat(await taken(store.watch(THING, after=1), 2))) == told(batch.events)


@pytest.mark.parametrize("woken", [False, True])
async def test_a_cancelled_wait_loses_nothing(tmp_path: Path, woken: bool) -> None:
    async with opened(tmp_path / "store.db") as store:
        watch = store.watch(THING)
        publish = store._hub.publish
        for value in range(10):
            waiting = asyncio.ensure_future(watch.next())
            await asyncio.sleep(0)

            def publish_then_cancel(
                events: Sequence[Event], revision: int, waiting: asyncio.Future[EventBatch] = waiting
            ) -> None:
                publish(events, revision)
                waiting.cancel()  # woken, but cancelled before it can read

            if woken:
                store._hub.publish = publish_then_cancel  # type: ignore[method-assign]
            else:
                waiting.cancel()
            await put(store, f"n{value}")
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert [event.revision for event in flat(await taken(watch, value + 1))] == [value + 1]


async def test_a_cancelled_replay_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with opened(path) as store:
        for value in range(20):
            await put(store, "x", value)
    async with opened(path, replay_page_events=5) as store:
        watch = store.watch(THING, after=0)
        for _ in range(5):
            waiting = asyncio.ensure_future(watch.next())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        assert [event.revision for event in flat(await taken(watch, 20))] == list(range(1, 21))


async def test_a_watch_has_one_consumer(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        watch = store.watch(THING)
        first = asyncio.ensure_future(watch.next())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="consumer"):
            await watch.next()
        watch.close()
        with pytest.raises(Unavailable):
            await first


async def test_closing_a_watch_ends_its_iteration(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        seen: list[str] = []
        async with store.watch(THING) as watch:

            async def follow() -> None:
                async for batch in watch:
                    seen.extend(event.resource.name for event in batch.events)

            async with asyncio.TaskGroup() as tasks:
                following = tasks.create_task(follow())
                await asyncio.sleep(0)
                await put(store, "x")
                await _soon(following)
                watch.close()
        assert seen == ["x"]
        assert store.statistics().watchers == 0


async def test_closing_the_store_ends_every_watch_promptly(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        waiting = [asyncio.ensure_future(store.watch(THING).next(idle_seconds=60)) for _ in range(5)]
        await asyncio.sleep(0)
    answers = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)
    assert all(isinstance(answer, Unavailable) for answer in answers)
