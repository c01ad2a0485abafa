"""No step that the authority takes while the server opens its listeners is missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.gpus.serving import gpus_only

from fleetplane.kernel.identity import Authority
from fleetplane.rpc import Listener, ListenerSpec, open_listener
from fleetplane.server import front, root, serving
from fleetplane.server.front import Presenting

SECONDS = 60.0


async def test_a_step_of_the_authority_while_listeners_open_renews_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, renewed = asyncio.Event(), asyncio.Event()
    made, opening = list[Authority](), list[str]()

    class SeenAuthority(Authority):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            made.append(self)

    @asynccontextmanager
    async def stepping(spec: ListenerSpec, *, grace_seconds: float) -> AsyncIterator[Listener]:
        opening.append(spec.name)
        if len(opening) == 1:
            await made[0].announce(actor="ada")
        async with open_listener(spec, grace_seconds=grace_seconds) as listener:
            yield listener

    async def renew(_: Presenting) -> None:
        renewed.set()

    monkeypatch.setattr(root, "_stop_on_signals", lambda: stop)
    monkeypatch.setattr(serving, "Authority", SeenAuthority)
    monkeypatch.setattr(front, "open_listener", stepping)
    monkeypatch.setattr(Presenting, "_renew", renew)
    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as tasks:
        tasks.create_task(root.serve(gpus_only(tmp_path), announce=lambda *_: None))
        await renewed.wait()
        stop.set()
