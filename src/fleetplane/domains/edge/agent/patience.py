"""When to be cancelled: only once something has come to its end, or as soon as something else happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeVar

T = TypeVar("T")


async def to_the_end(work: Coroutine[None, None, T]) -> T:
    """Cancelled meanwhile, the work is finished all the same, and then the cancellation goes on."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # seen; we are leaving
        raise


async def in_thread(work: Callable[[], T]) -> T:
    """Blocking work on a thread, which nobody can call back."""
    return await to_the_end(asyncio.to_thread(work))


async def unless(event: asyncio.Event, work: Coroutine[None, None, None]) -> bool:
    """Do the work, but not a moment longer than until the event; whether it came to its end."""
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
