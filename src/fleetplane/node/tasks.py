"""Tasks that are finished before their owner is cancelled, given up at an event, or ended with a block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

from fleetplane.kernel.unbroken import run_to_completion

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run blocking work on a thread. A thread cannot be cancelled, so two calls never overlap unnoticed."""
    return await run_to_completion(asyncio.to_thread(work))


async def unless(event: asyncio.Event, work: Coroutine[None, None, None]) -> bool:
    """Run the work until the event is set at the latest; whether it came to its end."""
    first, second = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (first, second):
            if not task.done():
                task.cancel()
        await asyncio.wait([first, second])
    if first.cancelled():
        return False
    first.result()
    return True


@asynccontextmanager
async def beside(works: Iterable[Coroutine[None, None, None]]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run these beside the block; at its end they are cancelled and awaited.

    For generators, which may be left at any `yield`: a task group would take that for a failure. What a task
    raises is for the block to look at.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # retrieved, so that it is not reported as lost
