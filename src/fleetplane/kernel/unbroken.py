"""Work that is not left half done by whoever asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


async def finish(work: Coroutine[None, None, T]) -> T:
    """Run the work to its end, also when cancelled meanwhile; only then is the cancellation passed on.

    For what has two halves, such as a write and what memory makes of it: what is being written when its
    caller leaves is written all the same.
    """
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # retrieved, so that it is not reported as lost
        raise
