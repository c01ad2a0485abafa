"""Events and outcomes of configurations on their way to the server, which acknowledges each by an id."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.node.outbox import Outbox

LIMIT: Final = 256

Payload = pb.Event | pb.ConfigStatus


def receipt_of(payload: Payload) -> str:
    """The id under which the server acknowledges it."""
    if isinstance(payload, pb.Event):
        return payload.event_id
    return f"{payload.config_id}:{payload.version}:{pb.ConfigApplyStatus.Name(payload.status)}"


class ProxyOutbox(Outbox[str, Payload]):
    def __init__(self, *, limit: int = LIMIT) -> None:
        super().__init__(limit=limit)
        self.receipts: asyncio.Queue[Payload] = asyncio.Queue(limit)
        """What the server says that it has, for whoever kept it elsewhere as well."""
        self._replaced: Counter[str] = Counter()
        """By id, what went out on this stream, was replaced since, and is still to be acknowledged."""

    def add(self, payload: Payload) -> None:
        receipt = receipt_of(payload)
        entry = self._entries.get(receipt)
        if entry is not None and entry.sent_at is not None:
            self._replaced[receipt] += 1
        self.put(receipt, payload)

    def new_stream(self) -> None:
        self._replaced.clear()
        super().new_stream()

    def acknowledged(self, receipt: str) -> bool:
        """Whether it is what is kept under this id; it may be what was kept before."""
        if self._replaced[receipt]:
            self._replaced[receipt] -= 1
            return False
        payload = self.confirmed(receipt)
        if payload is not None and not self.receipts.full():
            self.receipts.put_nowait(payload)
        return payload is not None
