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

from fleetplane.domains.proxies.agent.reports.log_lines import (
    LoggedTraffic,
    access_batch,
    error_entries,
    read_traffic,
    requests_of,
)
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.backoff import Backoff
from fleetplane.kernel.clock import Clock
from fleetplane.node.logs.tail import FileTail, LineBatch

ATTEMPTS: Final = 6
"""For a batch that the server refuses in words. Then it goes, lest it hold up all that follow."""

Deliver = Callable[[pb.LogBatch], Awaitable[str]]
"""Send a batch and wait for its receipt; what the server had against it, empty if nothing."""


@dataclass(frozen=True, slots=True)
class Parcel:
    message: pb.LogBatch
    lines: int
    note: str = ""
    """To be remembered together with the place in the log."""


class ShippedLog(Protocol):
    tail: FileTail

    def pack(self, batch: LineBatch, agent_id: str, *, columns: bool) -> Parcel:
        """`columns`: whether the server takes the access log by field."""

    def done(self) -> None: ...


class AccessLog:
    """Its lines are also counted, each once: the sums are kept in the same file as the place."""

    def __init__(self, tail: FileTail) -> None:
        self.tail = tail
        self.traffic = read_traffic(tail.note)
        self._next = self.traffic

    def __repr__(self) -> str:
        return f"<AccessLog {self.tail!r}>"

    def pack(self, batch: LineBatch, agent_id: str, *, columns: bool) -> Parcel:
        traffic: LoggedTraffic = self.traffic.copy()
        requests, identities, seqs = [], [], []
        for request, identity, seq in requests_of(batch.lines, agent_id):
            requests.append(request)
            identities.append(identity)
            seqs.append(seq)
            traffic.count(request)
        traffic.unreadable += len(batch.lines) - len(requests)
        self._next = traffic
        note = msgspec.json.encode(traffic).decode()
        return Parcel(access_batch(requests, identities, seqs, columns=columns), len(requests), note)

    def done(self) -> None:
        self.traffic = self._next


class ErrorLog:
    def __init__(self, tail: FileTail) -> None:
        self.tail = tail

    def __repr__(self) -> str:
        return f"<ErrorLog {self.tail!r}>"

    def pack(self, batch: LineBatch, agent_id: str, *, columns: bool) -> Parcel:  # noqa: ARG002  # few lines
        message = pb.LogBatch(entries=error_entries(batch.lines, agent_id))
        return Parcel(message, len(message.entries))

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
        log: ShippedLog,
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

    @property
    def refused_files(self) -> tuple[str, ...]:
        """Files under the log's names that are no logs."""
        return self._log.tail.refused

    async def run(self, deliver: Deliver, agent_id: str, *, columns: bool = False) -> NoReturn:
        """Ship lines over one connection; the next one begins after the last acknowledged line."""
        while True:
            full = False
            try:
                batch = await asyncio.to_thread(self._log.tail.read)
                full = batch.full
                if batch.lines:
                    await self._ship(self._log.pack(batch, agent_id, columns=columns), batch, deliver)
            except (
                OSError
            ) as error:  # a file that just went, or a full disk: what was not committed comes again
                self._logger.warning("log_not_read", log=repr(self._log), error=str(error))
            if not full:
                await self._clock.sleep(self._policy.pause_seconds)

    async def _ship(self, parcel: Parcel, batch: LineBatch, deliver: Deliver) -> None:
        if parcel.lines and (fault := await self._deliver(parcel.message, deliver)):
            self.refused_lines += parcel.lines
            self._logger.error("log_lines_refused", lines=parcel.lines, error=fault)
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
