"""When work is cancelled: after its end, at an event, or with the block that it ran beside."""

from __future__ import annotations

import ast
import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest

import fleetplane
from fleetplane.kernel.unbroken import run_to_completion
from fleetplane.node.tasks import beside, in_thread, unless

PACKAGE = Path(fleetplane.__file__).parent


async def test_work_is_finished_before_its_owner_is_cancelled() -> None:
    go_on, done = asyncio.Event(), []

    async def work() -> None:
        await go_on.wait()
        done.append(True)

    owner = asyncio.create_task(run_to_completion(work()))
    await asyncio.sleep(0)
    owner.cancel()
    await asyncio.sleep(0)
    assert not owner.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await owner
    assert done == [True]


async def test_work_is_finished_however_often_its_owner_is_cancelled() -> None:
    go_on = asyncio.Event()
    owner = asyncio.create_task(run_to_completion(_until_set(go_on)))
    for _ in range(3):
        await asyncio.sleep(0)
        owner.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not owner.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await owner


async def _until_set(event: asyncio.Event) -> None:
    await event.wait()


async def test_a_thread_is_waited_for() -> None:
    started, go_on, done = threading.Event(), threading.Event(), []

    def work() -> None:
        started.set()
        go_on.wait(60)
        done.append(True)

    owner = asyncio.create_task(in_thread(work))
    assert await asyncio.to_thread(started.wait, 60)
    owner.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await owner
    assert done == [True]


async def test_work_is_given_up_at_the_event_and_its_errors_are_passed_on() -> None:
    event = asyncio.Event()
    assert await unless(event, asyncio.sleep(0))

    async def fails() -> None:
        raise ValueError("why")

    with pytest.raises(ValueError, match="why"):
        await unless(event, fails())
    event.set()
    assert not await unless(event, asyncio.sleep(3600))


async def test_a_generator_that_is_left_early_ends_what_runs_beside_it() -> None:
    ended = []

    async def source() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    async def stream() -> AsyncGenerator[int, None]:
        async with beside([source(), source()]):
            await asyncio.sleep(0)
            for number in range(10):
                yield number

    async with aclosing(stream()) as numbers:
        async for number in numbers:
            assert number == 0
            break
    assert ended == [True, True]


async def test_nothing_beside_a_block_is_no_error() -> None:
    async with beside([]) as tasks:
        assert tasks == []


def test_tasks_without_an_owner_are_made_nowhere_in_agents() -> None:
    """A task group or `node.tasks` owns each; `node/programs/run.py` waits for its guard itself."""
    places = [*PACKAGE.glob("domains/*/agent/**/*.py"), *PACKAGE.glob("node/**/*.py")]
    found = {
        str(path.relative_to(PACKAGE))
        for path in places
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in ("create_task", "ensure_future")
        and isinstance(node.value, ast.Name)
        and node.value.id in ("asyncio", "loop")
    }
    assert found <= {"node/tasks.py", "node/programs/run.py"}
