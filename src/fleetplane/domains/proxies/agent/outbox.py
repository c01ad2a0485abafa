"""What the server must hear even if the connection breaks: kept until it says that it has it.

Bounded: with a server away for long the oldest goes, and is counted. What is only of passing
interest, such as health, is not kept here but made anew.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

LIMIT: Final = 256

Payload = pb.Event | pb.ConfigStatus


def receipt_of(payload: Payload) -> str:
    """The id under which the server acknowledges it."""
    if isinstance(payload, pb.Event):
        return payload.event_id
    return f"{payload.config_id}:{payload.version}:{pb.ConfigApplyStatus.Name(payload.status)}"


class Outbox:
    def __init__(self, *, limit: int = LIMIT) -> None:
        self._waiting: OrderedDict[str, Payload] = OrderedDict()
        self._limit = limit
        self._changed = asyncio.Event()
        self.dropped = 0
        self.on_receipt: Callable[[Payload], None] = lambda _: None

    def __repr__(self) -> str:
        return f"<Outbox waiting={len(self._waiting)} dropped={self.dropped}>"

    def put(self, payload: Payload) -> None:
        receipt = receipt_of(payload)
        self._waiting.pop(receipt, None)  # said again: it goes to the end, and out once more
        self._waiting[receipt] = payload
        if len(self._waiting) > self._limit:
            self._waiting.popitem(last=False)
            self.dropped += 1
        self._changed.set()

    def acknowledged(self, receipt: str) -> bool:
        payload = self._waiting.pop(receipt, None)
        if payload is not None:
            self.on_receipt(payload)
        return payload is not None

    def waiting(self) -> list[Payload]:
        return list(self._waiting.values())

    def wake(self) -> None:
        """Somebody should look again at what is waiting."""
        self._changed.set()

    async def changed(self) -> None:
        await self._changed.wait()
        self._changed.clear()
