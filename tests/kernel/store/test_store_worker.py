"""A thread that does one thing after another for an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from fleetplane.kernel.store.engines.sqlite_writer import EngineThread

DEADLINE_SECONDS = 60


@pytest.fixture
def worker() -> Iterator[EngineThread]:
    made = EngineThread("worked-on")
    yield made
    made.stop()
    made._thread.join(DEADLINE_SECONDS)
    assert not made._thread.is_alive()


async def test_calls_are_done_in_their_order_in_one_thread(worker: EngineThread) -> None:
    done: list[int] = []
    calls = [worker.call(done.append, number) for number in range(100)]
    name = worker.call(lambda: threading.current_thread().name)
    async with asyncio.timeout(DEADLINE_SECONDS):
        await asyncio.gather(*calls)
        assert await name == "worked-on"
    assert done == list(range(100))


async def test_what_a_call_raises_reaches_its_caller_and_nobody_else(worker: EngineThread) -> None:
    broken, sound = worker.call(int, "x"), worker.call(int, "7")
    async with asyncio.timeout(DEADLINE_SECONDS):
        with pytest.raises(ValueError, match="invalid literal"):
            await broken
        assert await sound == 7


async def test_a_call_is_done_although_its_caller_was_cancelled(worker: EngineThread) -> None:
    begun, go_on, done = threading.Event(), threading.Event(), list[str]()

    def work() -> None:
        begun.set()
        assert go_on.wait(DEADLINE_SECONDS)
        done.append("first")

    first, second = worker.call(work), worker.call(done.append, "second")
    assert await asyncio.to_thread(begun.wait, DEADLINE_SECONDS)
    first.cancel()
    second.cancel()
    go_on.set()
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await worker.call(lambda: list(done)) == ["first", "second"]


def test_a_loop_that_is_closed_is_told_nothing(worker: EngineThread) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert go_on.wait(DEADLINE_SECONDS)

    async def ask_and_leave() -> None:
        worker.call(work)
        assert await asyncio.to_thread(begun.wait, DEADLINE_SECONDS)

    asyncio.run(ask_and_leave())
    go_on.set()

    async def ask_again() -> int:
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await worker.call(int, "7")

    assert asyncio.run(ask_again()) == 7
