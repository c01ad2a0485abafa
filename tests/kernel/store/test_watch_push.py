"""A watcher that waits is handed its events at once, and resumed only when it is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.shared.storekit import DEADLINE_SECONDS, THING, opened, put, put_together

from fleetplane.kernel.errors import Unavailable
from fleetplane.kernel.store import Store
from fleetplane.kernel.watch import Audience, EventBatch, Watch


class Sink:
    """Remembers what it was given; may owe or fail from some point on."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self.owes: asyncio.Future[None] | None = None
        self.fails: Exception | None = None

    def take(self, batch: EventBatch) -> Awaitable[None] | None:
        if self.fails is not None:
            raise self.fails
        self.values += values(batch)
        return self.owes


def values(batch: EventBatch) -> list[int]:
    return [event.resource.spec.value for event in batch.events]


async def waiting(watch: Watch) -> asyncio.Task[EventBatch]:
    """A consumer that has begun to wait."""
    task = asyncio.create_task(watch.next())
    while watch._wait is None:
        await asyncio.sleep(0)
    return task


async def written(store: Store, *numbers: int) -> None:
    for number in numbers:
        await put(store, "a", number)


async def test_a_sink_takes_every_event_while_its_consumer_sleeps(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        sink = Sink()
        with store.watch(THING) as watch:
            watch.push_to(sink.take)
            consumer = await waiting(watch)
            await written(store, 1, 2, 3)
            assert sink.values == [1, 2, 3]
            assert not consumer.done()
            assert watch.revision == store.revision
            consumer.cancel()


async def test_a_transaction_of_several_events_is_pushed_once_and_whole(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        batches: list[list[int]] = []
        with store.watch(THING) as watch:
            watch.push_to(lambda batch: batches.append(values(batch)))
            consumer = await waiting(watch)
            await put_together(store, ["a", "b", "c"], 7)
            await put_together(store, ["a", "b", "c"], 8)
            assert batches == [[7, 7, 7], [8, 8, 8]]
            consumer.cancel()


async def test_what_a_sink_owes_is_awaited_before_anything_else_is_delivered(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        sink = Sink()
        with store.watch(THING) as watch:
            watch.push_to(sink.take)
            consumer = await waiting(watch)
            sink.owes = asyncio.get_running_loop().create_future()
            await written(store, 1)
            await written(store, 2, 3)
            assert sink.values == [1]
            assert not consumer.done()
            sink.owes.set_result(None)
            async with asyncio.timeout(DEADLINE_SECONDS):
                batch = await consumer
            assert values(batch) == [2, 3]


async def test_what_a_sink_raises_reaches_the_consumer_and_not_the_writer(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        sink = Sink()
        with store.watch(THING) as watch:
            watch.push_to(sink.take)
            consumer = await waiting(watch)
            sink.fails = OSError("the other end is gone")
            await written(store, 1)
            with pytest.raises(OSError, match="the other end is gone"):
                await consumer


async def test_a_consumer_that_does_not_wait_is_not_pushed_past(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        sink = Sink()
        with store.watch(THING) as watch:
            watch.push_to(sink.take)
            await written(store, 1, 2)
            assert sink.values == []
            assert values(await watch.next()) == [1, 2]


async def test_closing_a_watch_drops_what_its_sink_owes_and_has_not_begun(tmp_path: Path) -> None:
    async def never_begun() -> None:
        raise AssertionError("the watch was closed before")

    async with opened(tmp_path / "store.db") as store:
        first, second = store.watch(THING), store.watch(THING)
        first.push_to(lambda _batch: never_begun())
        second.push_to(lambda _batch: first.close())
        consumers = [await waiting(first), await waiting(second)]
        await written(store, 1)
        with pytest.raises(Unavailable):
            await consumers[0]
        consumers[1].cancel()
        second.close()


class Crowd(Audience):
    """Prepares the values of a batch; may fail at it."""

    def __init__(self) -> None:
        self.prepared: list[list[int]] = []
        self.told_of: list[tuple[list[int], int]] = []
        self.fails: Exception | None = None

    def prepare(self, batch: EventBatch) -> list[int]:
        if self.fails is not None:
            raise self.fails
        self.prepared.append(values(batch))
        return self.prepared[-1]

    def told(self, batch: EventBatch, sinks: int) -> None:
        self.told_of.append((values(batch), sinks))


async def test_what_happened_is_prepared_once_for_all_who_are_told_of_it(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        crowd, got = Crowd(), [list[list[int]]() for _ in range(5)]
        with ExitStack() as stack:
            watches = [stack.enter_context(store.watch(THING)) for _ in got]
            for watch, taken in zip(watches, got, strict=True):
                watch.push_to(taken.append, crowd)
            consumers = [await waiting(watch) for watch in watches]
            await written(store, 1, 2)
            assert crowd.prepared == [[1], [2]]
            assert crowd.told_of == [([1], 5), ([2], 5)]
            assert all(taken == [[1], [2]] for taken in got)
            assert all(taken[0] is got[0][0] for taken in got)
            for consumer in consumers:
                consumer.cancel()


async def test_what_cannot_be_prepared_reaches_every_consumer_and_not_the_writer(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        crowd, plain = Crowd(), Sink()
        with store.watch(THING) as first, store.watch(THING) as second, store.watch(THING) as third:
            first.push_to(plain.take, crowd)
            second.push_to(plain.take, crowd)
            third.push_to(plain.take)
            consumers = [await waiting(watch) for watch in (first, second, third)]
            crowd.fails = ValueError("cannot be encoded")
            await written(store, 1)
            for consumer in consumers[:2]:
                with pytest.raises(ValueError, match="cannot be encoded"):
                    await consumer
            assert plain.values == [1]
            consumers[2].cancel()


async def test_a_closed_watch_claims_nothing_that_happened_later(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        sink = Sink()
        watch = store.watch(THING)
        watch.push_to(sink.take)
        consumer = await waiting(watch)
        await written(store, 1)
        delivered = store.revision
        watch.close()
        await written(store, 2)
        assert (watch.revision, sink.values) == (delivered, [1])
        with pytest.raises(Unavailable):
            await consumer


async def test_a_watch_closed_by_anothers_sink_does_not_claim_what_it_was_not_given(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        given: list[int] = []
        first, second = store.watch(THING), store.watch(THING)
        first.push_to(lambda _batch: second.close())
        second.push_to(lambda batch: given.extend(values(batch)))
        consumers = [await waiting(first), await waiting(second)]
        before = store.revision
        await written(store, 1)
        assert (given, second.revision) == ([], before)
        with pytest.raises(Unavailable):
            await consumers[1]
        consumers[0].cancel()
        first.close()


async def test_a_watch_that_ended_with_its_store_goes_on_where_it_was(tmp_path: Path) -> None:
    """What is still applied after the end was told to nobody, and must not be passed over."""
    async with opened(tmp_path / "store.db") as store:
        await written(store, 1)
        with store.watch(THING) as watch:
            consumer = await waiting(watch)
            revision = store.revision
            store._hub.close()
            await written(store, 2)
            assert store.revision > revision
            assert watch.revision == revision
            with pytest.raises(Unavailable):
                await consumer
