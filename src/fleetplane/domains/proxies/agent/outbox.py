"""Queues of the agent: events and outcomes to the server until acknowledged, and the newest configuration."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

from fleetplane.domains.proxies.agent.nginx.confirmation import VersionState, VersionStatus
from fleetplane.domains.proxies.nginx.rendering import checksum
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.node.outbox import Outbox


class Updates:
    """Holds one pending update; a newer one marks the former as superseded."""

    def __init__(self, overtaken: Callable[[VersionStatus], None]) -> None:
        self._overtaken = overtaken
        self._waiting: pb.ConfigUpdate | None = None
        self._current: pb.ConfigUpdate | None = None
        self._arrived = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Updates waiting={self._waiting and self._waiting.version}>"

    def offer(self, update: pb.ConfigUpdate) -> None:
        if _same(update, self._current) or _same(update, self._waiting):
            return  # the server asks again while we are at it, after a reconnect for instance
        if self._waiting is not None and update.version < self._waiting.version:
            self._tell_overtaken(update, by=self._waiting)
            return
        if self._waiting is not None:
            self._tell_overtaken(self._waiting, by=update)
        self._waiting = update
        self._arrived.set()

    def _tell_overtaken(self, update: pb.ConfigUpdate, *, by: pb.ConfigUpdate) -> None:
        self._overtaken(
            VersionStatus(
                config_id=update.config_id,
                version=update.version,
                state=VersionState.FAILED,
                error=f"superseded by version {by.version}",
            )
        )

    async def next(self) -> pb.ConfigUpdate:
        """The newest; it is being dealt with until this is asked again."""
        self._current = None
        while self._waiting is None:
            self._arrived.clear()
            await self._arrived.wait()
        self._current, self._waiting = self._waiting, None
        return self._current


def _same(update: pb.ConfigUpdate, other: pb.ConfigUpdate | None) -> bool:
    return other is not None and update.version == other.version and checksum(update) == checksum(other)


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
