"""The hand-driven coroutine: armed only when it waits, cancelled only once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fleetplane.rpc.serving.guard import Guard


class Watched:
    def __init__(self, cleanup_seconds: float = 60.0) -> None:
        self.cleanup_seconds = cleanup_seconds
        self.seen: list[str] = []

    def suspended(self) -> None:
        self.seen.append("suspended")

    def cancelling(self) -> None:
        self.seen.append("cancelling")

    def resumed(self) -> None:
        self.seen.append("resumed")

    def overstayed(self) -> None:
        self.seen.append("overstayed")


async def run(watched: Watched, work: Callable[[], Awaitable[Any]]) -> Any:
    return await Guard(watched, work())


async def test_what_never_waits_is_never_armed() -> None:
    async def work() -> int:
        return 7

    watched = Watched()
    assert await run(watched, work) == 7
    assert watched.seen == []


async def test_what_waits_is_armed_once() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        return 7

    watched = Watched()
    assert await run(watched, work) == 7
    assert watched.seen == ["suspended"]


@pytest.mark.parametrize("wait", [True, False])
async def test_an_exception_passes_through(wait: bool) -> None:
    async def work() -> None:
        if wait:
            await asyncio.sleep(0)
        raise KeyError("x")

    with pytest.raises(KeyError):
        await run(Watched(), work)


async def test_an_exception_may_be_caught_inside_after_waiting() -> None:
    async def work() -> str:
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_exception, KeyError("x"))
        try:
            await future
        except KeyError:
            return "caught"
        return "missed"

    assert await run(Watched(), work) == "caught"


async def test_futures_can_be_awaited_directly() -> None:
    async def work() -> int:
        return 7

    assert await Guard(Watched(), asyncio.ensure_future(work())) == 7


@pytest.mark.parametrize("pause", [0, 0.02])
async def test_later_cancellations_leave_the_cleanup_in_peace(pause: float) -> None:
    steps: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            for step in range(3):
                await asyncio.sleep(pause)
                steps.append(f"cleanup {step}")

    watched = Watched()
    task = asyncio.create_task(run(watched, work))
    await asyncio.sleep(0.001)
    for _ in range(5):
        task.cancel()
        await asyncio.sleep(0.005)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ["cleanup 0", "cleanup 1", "cleanup 2"]
    assert watched.seen == ["suspended", "cancelling"]


async def test_a_cleanup_that_never_ends_is_ended() -> None:
    async def work() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.Event().wait()

    watched = Watched(cleanup_seconds=0.02)
    task = asyncio.create_task(run(watched, work))
    await asyncio.sleep(0.001)
    task.cancel()
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert watched.seen == ["suspended", "cancelling", "overstayed"]


async def test_a_timeout_inside_still_works() -> None:
    async def work() -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(10)
        except TimeoutError:
            return "timed out"
        return "not"

    watched = Watched()
    assert await run(watched, work) == "timed out"
    assert watched.seen == ["suspended", "cancelling", "resumed"]


async def test_a_handler_that_timed_out_inside_is_cancelled_once_like_any_other() -> None:
    steps: list[str] = []

    async def work() -> None:
        for _ in range(2):
            try:
                async with asyncio.timeout(0.001):
                    await asyncio.sleep(10)
            except TimeoutError:
                await asyncio.sleep(0.001)
                steps.append("timed out")
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(0.02)
            steps.append("cleaned up")

    watched = Watched()
    task = asyncio.create_task(run(watched, work))
    async with asyncio.timeout(60):
        while len(steps) < 2:
            await asyncio.sleep(0.001)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.002)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ["timed out", "timed out", "cleaned up"]
    assert watched.seen == ["suspended", *["cancelling", "resumed"] * 2, "cancelling"]


async def test_a_cancellation_that_comes_while_a_handler_times_out_inside_is_not_lost() -> None:
    steps: list[str] = []
    go_on = asyncio.Event()

    async def work() -> None:
        async with asyncio.timeout(0.001):
            try:
                await asyncio.sleep(60)
            finally:
                steps.append("timing out")
                await go_on.wait()
                steps.append("cleaned up")

    watched = Watched()
    task = asyncio.create_task(run(watched, work))
    async with asyncio.timeout(60):
        while not steps:
            await asyncio.sleep(0.001)
    task.cancel()
    asyncio.get_running_loop().call_later(0.01, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ["timing out", "cleaned up"]
    assert watched.seen == ["suspended", "cancelling"]


async def test_that_something_awaited_was_cancelled_is_no_cancellation_of_the_handler() -> None:
    async def work() -> str:
        other = asyncio.ensure_future(asyncio.sleep(10))
        asyncio.get_running_loop().call_soon(other.cancel)
        try:
            await other
        except asyncio.CancelledError:
            await asyncio.sleep(0.001)
            return "went on"
        return "not"

    watched = Watched()
    assert await run(watched, work) == "went on"
    assert watched.seen == ["suspended"]


async def test_an_error_during_a_hurried_cleanup_reaches_the_handler() -> None:
    async def work() -> str:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            try:
                await asyncio.sleep(10)  # until it is hurried
            except asyncio.CancelledError:
                failing = loop.create_future()
                loop.call_soon(failing.set_exception, KeyError("x"))
                try:
                    await failing
                except KeyError:
                    return "caught"
        return "missed"

    watched = Watched(cleanup_seconds=0.01)
    task = asyncio.create_task(run(watched, work))
    await asyncio.sleep(0.001)
    task.cancel()
    assert await task == "caught"
    assert watched.seen == ["suspended", "cancelling", "overstayed"]


async def test_a_failing_task_inside_ends_its_group_and_not_the_call() -> None:
    async def fail() -> None:
        raise KeyError("x")

    async def work() -> str:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail())
                await asyncio.sleep(10)
        except* KeyError:
            await asyncio.sleep(0.001)
        return "went on"

    watched = Watched()
    assert await run(watched, work) == "went on"
    assert watched.seen == ["suspended", "cancelling", "resumed"]


async def test_a_task_group_inside_still_works() -> None:
    async def work() -> int:
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(asyncio.sleep(0.001, 1))
            second = tasks.create_task(asyncio.sleep(0.002, 2))
        return first.result() + second.result()

    assert await run(Watched(), work) == 3
