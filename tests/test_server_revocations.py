"""Who is revoked is cut off, also if whoever revoked it did not wait for the answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.gpus.serving import gpus_only

from fleetplane.kernel.identity.revocation import Revocations, Revoked, revocation_key
from fleetplane.kernel.store import Store
from fleetplane.server import root, serving

SECONDS = 60.0


async def test_a_server_tells_of_a_revocation_whose_author_left_while_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, ready = asyncio.Event(), asyncio.Event()
    made: list[tuple[Revocations, Store]] = []

    class SeenRevocations(Revocations):
        def __init__(self, store: Store, clock: Any) -> None:
            super().__init__(store, clock)
            made.append((self, store))

    monkeypatch.setattr(root, "_stop_on_signals", lambda: stop)
    monkeypatch.setattr(serving, "Revocations", SeenRevocations)
    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as tasks:
        tasks.create_task(root.serve(gpus_only(tmp_path), announce=lambda *_: ready.set()))
        await ready.wait()
        [(revocations, store)] = made
        told = asyncio.Queue[Revoked]()
        revocations.subscribe(told.put_nowait)
        # What the server writes as it starts is done.
        await store.transact(lambda _: None, actor="test", action="nothing", touches=())
        revoking = tasks.create_task(revocations.revoke(principal="agent/1", reason="lost", actor="ada"))
        while not store.pending(revocation_key("agent/1")):
            await asyncio.sleep(0)
        while store.statistics().queued:
            await asyncio.sleep(0)
        assert revoking.cancel()  # while it is being written
        assert (await told.get()).principal == "agent/1"
        stop.set()
