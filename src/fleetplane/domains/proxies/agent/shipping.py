"""Sends a log to the server, batch by batch, each only once the one before it has arrived.

That is all the back-pressure there is, and enough: a slow server is sent less, and what it was
not sent yet stays in the log's own files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, NoReturn, Protocol

import msgspec
import structlog

from fleetplane.domains.proxies.agent.log_lines import Traffic, access_entries, error_entries, read_traffic
from fleetplane.domains.proxies.agent.tail import Batch, Tail
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.backoff import Backoff
from fleetplane.kernel.clock import Clock

ATTEMPTS: Final = 6
"""For a batch that the server refuses in words. Then it goes, lest it hold up all that follow."""

Deliver = Callable[[pb.LogBatch], Awaitable[str]]
"""Send a batch and wait for its receipt; what the server had against it, empty if nothing."""


@dataclass(frozen=True, slots=True)
class Parcel:
    message: pb.LogBatch
    note: str = ""
    """To be remembered together with the place in the log."""


class Log(Protocol):
    tail: Tail

    def pack(self, batch: Batch, agent_id: str) -> Parcel: ...

    def done(self) -> None: ...


class AccessLog:
    """Its lines are also counted, each once: the sums are kept in the same file as the place."""

    def __init__(self, tail: Tail) -> None:
        self.tail = tail
        self.traffic = read_traffic(tail.note)
        self._next = self.traffic

    def __repr__(self) -> str:
        return f"<AccessLog {self.tail!r}>"

    def pack(self, batch: Batch, agent_id: str) -> Parcel:
        traffic: Traffic = self.traffic.copy()
        entries = []
        for entry, request in access_entries(batch.lines, agent_id):
            entries.append(entry)
            traffic.count(request)
        traffic.unreadable += len(batch.lines) - len(entries)
        self._next = traffic
        note = msgspec.json.encode(traffic).decode()
        return Parcel(pb.LogBatch(entries=entries), note)

    def done(self) -> None:
        self.traffic = self._next


class ErrorLog:
    def __init__(self, tail: Tail) -> None:
        self.tail = tail

    def __repr__(self) -> str:
        return f"<ErrorLog {self.tail!r}>"

    def pack(self, batch: Batch, agent_id: str) -> Parcel:
        return Parcel(pb.LogBatch(entries=error_entries(batch.lines, agent_id)))

    def done(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippingPolicy:
    pause_seconds: float = 1.0
    """Between looks at a log that has nothing new, or little."""
    backoff: Backoff = field(default_factory=lambda: Backoff(first_seconds=0.5, ceiling_seconds=10.0))


class Shipper:
    def __init__(
        self,
        log: Log,
        *,
        clock: Clock,
        logger: structlog.typing.FilteringBoundLogger,
        policy: ShippingPolicy | None = None,
    ) -> None:
        self._log = log
        self._clock = clock
        self._logger = logger
        self._policy = policy or ShippingPolicy()
        self.refused_lines = 0

    def __repr__(self) -> str:
        return f"<Shipper {self._log!r} refused={self.refused_lines}>"

    async def run(self, deliver: Deliver, agent_id: str) -> NoReturn:
        """For one connection; the next one begins where this one was told that it had arrived."""
        while True:
            full = False
            try:
                batch = await asyncio.to_thread(self._log.tail.read)
                full = batch.full
                if batch.lines:
                    await self._ship(batch, deliver, agent_id)
            except (
                OSError
            ) as error:  # a file that just went, or a full disk: what was not committed comes again
                self._logger.warning("log_not_read", log=repr(self._log), error=str(error))
            if not full:
                await self._clock.sleep(self._policy.pause_seconds)

    async def _ship(self, batch: Batch, deliver: Deliver, agent_id: str) -> None:
        parcel = self._log.pack(batch, agent_id)
        if parcel.message.entries and (fault := await self._deliver(parcel.message, deliver)):
            self.refused_lines += len(parcel.message.entries)
            self._logger.error("log_lines_refused", lines=len(parcel.message.entries), error=fault)
        self._log.tail.commit(batch, parcel.note)
        self._log.done()

    async def _deliver(self, message: pb.LogBatch, deliver: Deliver) -> str:
        fault = ""
        for attempt in range(ATTEMPTS):
            if not (fault := await deliver(message)):
                return ""
            jitter = self._clock.random()
            await self._clock.sleep(self._policy.backoff.delay_seconds(attempt, jitter=jitter))
        return fault
