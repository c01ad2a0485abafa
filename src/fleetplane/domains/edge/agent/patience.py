"""Being cancelled only after something has come to its end: what is half written helps nobody."""

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
