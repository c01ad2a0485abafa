"""What is simulated goes the same way every time."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from support.shared.virtual_loop import run

TASKS = 50


def _cancelled() -> tuple[list[int], list[asyncio.Task[None]]]:
    """In which order tasks of a group are cancelled, and the tasks."""
    order: list[int] = []

    async def wait(number: int) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            order.append(number)

    async def work() -> list[asyncio.Task[None]]:
        with suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(wait(number)) for number in range(TASKS)]
                await asyncio.sleep(0)
                raise ValueError
        return tasks

    return order, run(work())


def test_tasks_of_a_group_are_cancelled_in_the_same_order_every_time() -> None:
    first, kept = _cancelled()
    second, others = _cancelled()
    assert not {id(task) for task in kept} & {id(task) for task in others}
    assert sorted(first) == list(range(TASKS))
    assert first == second


def test_no_time_passes_beside_what_is_done_in_a_thread() -> None:
    async def work() -> float:
        ticking = asyncio.create_task(asyncio.sleep(3600))
        await asyncio.sleep(0)
        await asyncio.to_thread(time.sleep, 0.01)
        ticking.cancel()
        return asyncio.get_running_loop().time()

    assert run(work()) == 0.0
