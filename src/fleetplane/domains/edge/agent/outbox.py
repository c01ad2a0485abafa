"""Results on their way to the server, and whatever session there is to carry news.

A result counts as told once the stream it went out on has outlived it by a while; if the stream
breaks before that, it goes out again on the next. A server knows a result that it has seen.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Protocol

from fleetplane.domains.edge.agent.journal import Journal
from fleetplane.kernel.clock import Clock

SETTLED_SECONDS: Final = 30.0
"""A stream that stands this long after a result has delivered it: keepalive would have ended a dead one."""
WAITING_LIMIT: Final = 4096
"""Results. The oldest goes first; whoever still wants it asks again and gets it from the journal."""


class Carrier(Protocol):
    async def send_progress(self, command_id: str, chunk: bytes) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    result: bytes
    sent_at: float | None = None


class Outbox:
    def __init__(self, journal: Journal, clock: Clock, *, settled_seconds: float = SETTLED_SECONDS) -> None:
        self._journal = journal
        self._clock = clock
        self._settled_seconds = settled_seconds
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._changed = asyncio.Event()
        self._carrier: Carrier | None = None
        self.dropped_chunks = 0

    def __repr__(self) -> str:
        return f"<Outbox {len(self._waiting)} waiting, {self.dropped_chunks} chunks dropped>"

    def load(self) -> None:
        """What an earlier process could not tell."""
        for record in self._journal.undelivered():
            self.result(record.id, record.result or b"")

    # From commands.

    def result(self, command_id: str, result: bytes) -> None:
        self._waiting[command_id] = _Waiting(result=result)
        self._waiting.move_to_end(command_id)
        while len(self._waiting) > WAITING_LIMIT:
            self._waiting.popitem(last=False)
        self._changed.set()

    async def progress(self, command_id: str, chunk: bytes) -> None:
        """Tell it now or never."""
        if self._carrier is None:
            self.dropped_chunks += 1
        else:
            await self._carrier.send_progress(command_id, chunk)

    # From a session.

    def attach(self, carrier: Carrier) -> None:
        """Everything goes out once on a new stream."""
        self._carrier = carrier
        self._waiting = OrderedDict(
            (command_id, _Waiting(result=waiting.result)) for command_id, waiting in self._waiting.items()
        )
        self._changed.set()

    def detach(self, carrier: Carrier) -> None:
        if self._carrier is carrier:
            self._carrier = None

    def unsent(self) -> list[tuple[str, bytes]]:
        return [
            (command_id, waiting.result)
            for command_id, waiting in self._waiting.items()
            if waiting.sent_at is None
        ]

    def sent(self, command_id: str, result: bytes) -> None:
        waiting = self._waiting.get(command_id)
        if waiting is not None and waiting.result is result:
            self._waiting[command_id] = _Waiting(result=result, sent_at=self._clock.monotonic())

    def settle(self) -> None:
        """The stream stands: forget what went out long enough ago."""
        now = self._clock.monotonic()
        for command_id, waiting in list(self._waiting.items()):
            if waiting.sent_at is not None and now - waiting.sent_at >= self._settled_seconds:
                del self._waiting[command_id]
                self._journal.delivered(command_id)

    async def changed(self) -> None:
        await self._changed.wait()
        self._changed.clear()
