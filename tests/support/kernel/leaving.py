"""Whoever asks for something and leaves while it is being written."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from fleetplane.kernel.store import Store

SECONDS = 60.0


async def being_written(store: Store) -> None:
    """Return when what is about to be queued is on its way to the disk."""
    async with asyncio.timeout(SECONDS):
        while not store.statistics().queued:
            await asyncio.sleep(0)
        while store.statistics().queued:
            await asyncio.sleep(0)


async def leave_while_written(store: Store, asked: Coroutine[Any, Any, Any]) -> None:
    """Ask for something, go away while it is written, and wait until that is done. Nobody else may write."""
    asking, commit = asyncio.create_task(asked), store._engine.commit

    async def left(rows: Any) -> Any:
        asking.cancel()
        return await commit(rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store._engine, "commit", left)
        async with asyncio.timeout(SECONDS):
            with pytest.raises(asyncio.CancelledError):
                await asking
    await store.transact(lambda _: None, actor="test", action="nothing", touches=())
