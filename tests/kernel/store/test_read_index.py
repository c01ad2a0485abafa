"""The read index of a server that stands by, in virtual time: shared, exact, and not believed once old."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.shared.memory_engine import Link, MemoryDatabase, MemoryEngine
from support.shared.server_pair import Pair, with_pair
from support.shared.storekit import KINDS, SCOPE, THING, flat, put, taken
from support.shared.virtual_loop import LoopClock, run

from fleetplane.kernel.errors import IntegrityError, OutcomeUnknown, Unavailable
from fleetplane.kernel.store import StoreSettings
from fleetplane.kernel.store.engine import DatabaseMark, GroupAuthor, GroupOutcome, WriteGroup
from fleetplane.kernel.store.servers.leader_lease import FRESH_SECONDS, ReadIndex
from fleetplane.kernel.store.servers.replica import Replica

READERS = 50


def test_what_was_acknowledged_before_a_read_began_is_in_its_answer() -> None:
    async def work(servers: Pair) -> None:
        for value in range(20):
            await put(servers.active, f"x{value}", value)
            await servers.standby.index.confirm()
            assert servers.standby.store.get(THING, SCOPE, f"x{value}") is not None

    with_pair(work)


def test_readers_who_ask_at_the_same_time_share_a_look_that_began_after_all_of_them() -> None:
    async def work(servers: Pair) -> None:
        index, store = servers.standby.index, servers.standby.store
        before = index.looks
        first = [asyncio.create_task(index.confirm()) for _ in range(READERS)]
        await asyncio.sleep(0)  # the look of the first is under way
        await put(servers.active, "late", 1)
        second = [asyncio.create_task(index.confirm()) for _ in range(READERS)]
        await asyncio.gather(*second)
        assert store.get(THING, SCOPE, "late") is not None
        await asyncio.gather(*first)
        assert index.looks - before <= 3

    with_pair(work)


def test_a_server_that_cannot_renew_its_seat_refuses_reads() -> None:
    async def work(servers: Pair) -> None:
        index = servers.standby.index
        servers.link.cut = True
        with pytest.raises(Unavailable):
            await index.confirm()
        await asyncio.sleep(FRESH_SECONDS + 1)
        assert index.silent_seconds > FRESH_SECONDS
        servers.link.cut = False
        # The database answers again, but until a renewal was answered it may be one that was replaced.
        with pytest.raises(Unavailable, match="may be out of date"):
            await index.confirm()
        await asyncio.sleep(1)
        await index.confirm()

    with_pair(work)


def test_a_reader_who_leaves_takes_nothing_from_the_others() -> None:
    async def work(servers: Pair) -> None:
        index, store = servers.standby.index, servers.standby.store
        before, cancelled, mark = index.looks, list[str](), index._engine.mark

        async def noted() -> DatabaseMark:
            try:
                return await mark()
            except asyncio.CancelledError:
                cancelled.append("mark")
                raise

        index._engine.mark = noted  # type: ignore[method-assign]
        await put(servers.active, "x", 1)
        first = asyncio.create_task(index.confirm())
        await asyncio.sleep(0)
        other = asyncio.create_task(index.confirm())
        await asyncio.sleep(0)
        first.cancel()
        await other
        assert store.get(THING, SCOPE, "x") is not None
        for _ in range(READERS):  # with hardly any time each
            with suppress(TimeoutError):
                async with asyncio.timeout(0.0001):
                    await index.confirm()
        await index.confirm()
        assert cancelled == [], "a question that is cancelled costs its connection"
        assert index.looks - before <= 5

    with_pair(work)


def test_a_database_that_does_not_answer_is_not_waited_for_longer_than_its_answer_would_count() -> None:
    async def work(servers: Pair) -> None:
        index, loop = servers.standby.index, asyncio.get_running_loop()
        servers.link.delay_seconds = 60.0
        begun = loop.time()
        asked = [asyncio.create_task(index.confirm()) for _ in range(READERS)]
        refused = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(one, Unavailable) for one in refused)
        assert loop.time() - begun <= FRESH_SECONDS + 0.1

    with_pair(work)


def test_a_store_for_readers_refuses_writes_and_hears_of_secrets_that_others_change() -> None:
    async def work(servers: Pair) -> None:
        reader, heard = servers.standby.store.reader(), list[str]()

        class Cache:
            def secret_changed(self, name: str) -> None:
                heard.append(name)

            async def refresh(self) -> None:
                heard.append("refreshed")

        reader.keep_fresh(Cache())
        with pytest.raises(Unavailable, match="stands by"):
            await put(reader, "x")
        await servers.active.put_secret("key", b"1")
        await servers.active.delete_secret("key", actor="t")
        await servers.standby.index.confirm()
        await reader.refreshed()
        assert heard == ["key", "key", "refreshed"]

    with_pair(work)


def test_a_cursor_from_the_future_is_waited_for_where_another_server_may_have_shown_it() -> None:
    async def work(servers: Pair) -> None:
        store = servers.standby.store
        await put(servers.active, "x")
        assert store.revision < servers.active.revision
        assert await store.reached(servers.active.revision)
        assert not await store.reached(servers.active.revision + 1000)
        store.shared = False
        begun = asyncio.get_running_loop().time()
        assert not await store.reached(servers.active.revision + 1000)
        assert asyncio.get_running_loop().time() == begun, "a store of one server has nobody to wait for"

    with_pair(work)


class SlowAnswers(MemoryEngine):
    """What is written is written; the answer is under way until it is let go."""

    def __init__(self, database: MemoryDatabase, link: Link) -> None:
        super().__init__(database, link)
        self.written, self.let_go = asyncio.Event(), asyncio.Event()

    async def _answered(self, outcome: GroupOutcome) -> GroupOutcome:
        if outcome.written:
            self.written.set()
            await self.let_go.wait()
        return outcome

    async def take_over(self, before: DatabaseMark, author: GroupAuthor, life_seconds: float) -> GroupOutcome:
        return await self._answered(await super().take_over(before, author, life_seconds))

    async def commit(self, group: WriteGroup) -> GroupOutcome:
        return await self._answered(await super().commit(group))


async def slowly_answered() -> tuple[SlowAnswers, Replica]:
    chance = random.Random(1)
    clock = LoopClock(chance)
    engine = SlowAnswers(MemoryDatabase(clock.now_ns), Link(chance=chance))
    settings = StoreSettings(path=Path("/nowhere"))
    return engine, await Replica.load(engine, settings, server="one", kinds=KINDS, clock=clock)


def test_a_reader_does_not_meet_the_taking_over_that_is_under_way() -> None:
    async def work() -> None:
        engine, standby = await slowly_answered()
        waiting = asyncio.create_task(standby.seat.wait("one", 1))
        await engine.written.wait()
        reading = asyncio.create_task(standby.index.confirm())
        await asyncio.sleep(1)
        engine.let_go.set()
        author = await waiting
        assert author.term == 1
        await reading

    run(work())


def test_what_a_reader_meets_in_the_log_before_its_writer_was_answered_is_applied_once() -> None:
    async def work() -> None:
        engine, standby = await slowly_answered()
        engine.let_go.set()
        async with standby.active() as store:
            watch = store.watch(THING, after=0)
            engine.let_go.clear()
            engine.written.clear()
            writing = asyncio.create_task(put(store, "x", 1))
            await engine.written.wait()
            assert store.get(THING, SCOPE, "x") is None, "nobody was told that it is kept"
            await standby.index.confirm()
            assert store.get(THING, SCOPE, "x") is not None, "the database says so"
            engine.let_go.set()
            assert (await writing).revision == store.revision == 1
            await put(store, "y", 1)
            assert [event.resource.name for event in flat(await taken(watch, 2))] == ["x", "y"]

    run(work())


def test_what_is_kept_and_cannot_be_shown_is_not_told_as_refused() -> None:
    async def work() -> None:
        engine, standby = await slowly_answered()
        engine.let_go.set()
        standby.store._applier.own = Mock(side_effect=IntegrityError("a defect"))  # type: ignore[method-assign]
        told: list[asyncio.Task[object]] = []

        async def served() -> None:
            async with standby.active() as store:
                told.append(asyncio.create_task(put(store, "x", 1)))
                await store.writing()

        with pytest.raises(IntegrityError, match="a defect"):
            await served()
        with pytest.raises(OutcomeUnknown):
            await told[0]

    run(work())


def test_who_asks_in_the_moment_in_which_a_look_ends_begins_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task is done then, and its callback has not run: waiting for it once more would hold the loop."""
    shield, waits = asyncio.shield, 0

    def counted(task: asyncio.Task[None]) -> asyncio.Future[None]:
        nonlocal waits
        waits += 1
        assert waits < 100, "whoever asks waits for ever for a look that has ended"
        return shield(task)

    async def work() -> None:
        answered = asyncio.get_running_loop().create_future()
        at, clock = Mock(number=1), LoopClock(random.Random(1))

        async def mark() -> Mock:
            await answered
            return at

        index = ReadIndex(Mock(mark=mark), Mock(mark=at), Mock(), Mock(heard=clock.monotonic()), clock)
        first = asyncio.create_task(index.confirm())
        for _ in range(5):  # until the look waits for the database
            await asyncio.sleep(0)
        answered.set_result(None)  # it ends in the step after this one, and in the next one somebody asks
        await asyncio.gather(first, asyncio.create_task(index.confirm()))
        assert index.looks == 2

    monkeypatch.setattr(asyncio, "shield", counted)
    run(work())
