"""The limits of open WebSockets hold also for those that come at once."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest
from support.boards.boards_rig import until

from fleetplane.sim.clock import VirtualClock
from fleetplane.web.sockets.conversation import Conversation, SocketApp


class _Silent(SocketApp):
    def converse(self, *_: Any) -> Conversation[Any]:
        return _Waiting()  # type: ignore[return-value]


class _Waiting:
    async def serve(self) -> None:
        await asyncio.Event().wait()


async def test_sockets_that_come_at_once_are_counted_before_they_are_accepted() -> None:
    app = _Silent(
        clock=VirtualClock(),
        authenticate=lambda _: pytest.fail("nobody has a token"),
        sockets_limit=100,
        sockets_per_caller=2,
    )
    accepted, slow = [], asyncio.Event()

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        accepted.append(message["type"] == "websocket.accept")
        await slow.wait()

    scope = {"type": "websocket", "headers": [], "query_string": b"", "client": ("192.0.2.1", 1)}
    tasks = [asyncio.create_task(app(dict(scope), receive, send)) for _ in range(10)]
    await until(lambda: len(accepted) == 10)
    assert sum(accepted) == 2
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(app) == 0
