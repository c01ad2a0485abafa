"""Work that is not left half done by whoever asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def run_to_completion(work: Coroutine[None, None, T]) -> T:
    """Run the work to its end, however often cancelled meanwhile; only then is a cancellation passed on.

    For what has two halves, such as a write and what memory makes of it: what is being written when its
    caller leaves is written all the same.
    """
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError):  # again, as by a time-out around whoever was cancelled
                await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # retrieved, so that it is not reported as lost
        raise
