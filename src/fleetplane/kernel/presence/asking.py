"""Asking a database that several servers share about something beside the log."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fleetplane.kernel.errors import Unavailable

T = TypeVar("T")

ASK_SECONDS = 3.0
"""For an answer of the database: as long as a dead connection is believed in."""


async def answered(asking: Coroutine[Any, Any, T]) -> T:
    """What the database answers; raises `Unavailable` if it does not.

    Whoever is cancelled does not wait for a database that cannot be reached, as ending its call would: a
    server that ends its watches, or takes the seat, must not be kept from it.
    """
    task = asyncio.create_task(asking, name="presence-asks")
    task.add_done_callback(_ended)
    try:
        async with asyncio.timeout(ASK_SECONDS):
            return await asyncio.shield(task)
    except TimeoutError:
        raise Unavailable(
            f"the database did not answer within {ASK_SECONDS:.0f} seconds", hint="try again"
        ) from None
    finally:
        task.cancel()


def _ended(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # whoever waited was told
