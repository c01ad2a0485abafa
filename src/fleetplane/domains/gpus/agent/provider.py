"""The NVML provider: what this machine's GPUs are, told to the device API and kept true.

One *life* is one enumeration of the driver: its GPUs, their verdicts and the thread that waits for
their events. Inside a life come any number of *sessions*, each one connection to the device API,
each starting from nothing; so a server that was restarted, emptied or replaced ends up with
the truth.

Verdicts are decided in `health` and kept in `ledger`, the driver is asked in `driver`, the device
API is spoken to in `session`. This module only ties their lives together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, assert_never

import grpc
import grpc.aio

from fleetplane.domains.gpus.agent import driver, xids
from fleetplane.domains.gpus.agent.driver import EventMonitor, GpusLost, Occurrence, WaitFailed
from fleetplane.domains.gpus.agent.ledger import Ledger
from fleetplane.domains.gpus.agent.library import Event, EventKind, Library
from fleetplane.domains.gpus.agent.link import DeviceLink, LinkLost
from fleetplane.domains.gpus.agent.session import Log, Session
from fleetplane.kernel.backoff import Backoff
from fleetplane.kernel.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderPolicy:
    heartbeat_seconds: float = 10.0
    """A third of the lease that the device API grants by default."""
    ignored_xids: frozenset[int] = xids.APPLICATION_XIDS
    health_check: bool = True
    lower_case_names: bool = False
    enumerate_every_seconds: float | None = None
    """None: enumerate at the start and when asked to. Enumerating is what lets GPUs recover."""
    backoff: Backoff = field(default_factory=Backoff)


class Provider:
    """Runs until cancelled. Leaves its GPUs registered: silence is the server's to judge."""

    def __init__(
        self,
        *,
        library: Library,
        connect: Callable[[], DeviceLink],
        policy: ProviderPolicy,
        clock: Clock,
        log: Log,
    ) -> None:
        self._library = library
        self._connect = connect
        self._policy = policy
        self._clock = clock
        self._log = log
        self._changed = asyncio.Event()
        self._enumerate = asyncio.Event()
        self.ledger = Ledger(ignored_xids=policy.ignored_xids, lower_case_names=policy.lower_case_names)

    def __repr__(self) -> str:
        return f"<Provider {self.ledger!r} of {self._library!r}>"

    def enumerate_again(self) -> None:
        """Begin a new life as soon as possible."""
        self._enumerate.set()

    async def run(self) -> NoReturn:
        while True:
            self._enumerate.clear()
            await self._life()

    async def _life(self) -> None:
        await driver.in_thread(self._library.open)
        monitor: EventMonitor | None = None
        try:
            seen = await driver.in_thread(lambda: driver.enumerate_gpus(self._library))
            self._adopt(seen)
            if self._policy.health_check and seen.devices:
                monitor = await self._subscribe(seen)
            async with asyncio.TaskGroup() as tasks:
                running: list[asyncio.Task[None]] = [tasks.create_task(self._keep_connected())]
                if monitor is not None:
                    running.append(tasks.create_task(monitor.run()))
                await self._until_next_enumeration()
                for task in running:
                    task.cancel()
        finally:
            if monitor is None or not monitor.stuck:
                await driver.in_thread(self._library.close, limit_seconds=driver.STOP_LIMIT_SECONDS)

    async def _until_next_enumeration(self) -> None:
        try:
            async with asyncio.timeout(self._policy.enumerate_every_seconds):
                await self._enumerate.wait()
        except TimeoutError:
            return

    def _adopt(self, seen: driver.Enumeration) -> None:
        self.ledger.adopt(seen.sightings.values(), now_ns=self._clock.now_ns())
        self._log.info(
            "gpus_enumerated",
            driver=seen.driver_version,
            gpus=len(seen.sightings),
            without_uuid=seen.skipped,
            gone=len(self.ledger.gone()),
        )

    async def _subscribe(self, seen: driver.Enumeration) -> EventMonitor | None:
        subscribed = await driver.in_thread(lambda: driver.subscribe(self._library, seen.devices))
        if subscribed is None:
            self._log.warning("gpu_events_unsupported", gpus=len(seen.devices))
            return None
        events, listening = subscribed
        self._log.info("gpu_events_watched", gpus=listening)
        return EventMonitor(events, seen.devices, self._on_occurrence)

    async def _on_occurrence(self, occurrence: Occurrence) -> None:
        now_ns = self._clock.now_ns()
        match occurrence:
            case Event(kind=EventKind.XID):
                self._on_xid(occurrence, now_ns)
            case Event():
                kind = occurrence.kind.name or "other"
                self._log.info("gpu_event", gpu=occurrence.uuid, kind=kind, data=occurrence.data)
            case GpusLost(answering=answering):
                for gpu in self.ledger.on_lost(answering, now_ns=now_ns):
                    self._log.warning("gpu_lost", gpu=gpu.name)
                    self._changed.set()
            case WaitFailed(message=message):
                self._log.warning("gpu_events_failed", error=message)
            case _:
                assert_never(occurrence)

    def _on_xid(self, event: Event, now_ns: int) -> None:
        severity = xids.severity(event.data, self._policy.ignored_xids)
        self._log.warning(
            "gpu_xid", gpu=event.uuid, xid=event.data, text=xids.describe(event.data), severity=severity.value
        )
        if event.uuid is not None and self.ledger.on_xid(event.uuid, event.data, now_ns=now_ns):
            self._changed.set()

    async def _keep_connected(self) -> NoReturn:
        """Sessions, one after another; the waits between them grow until one succeeds."""
        attempt = -1
        while True:
            session: Session | None = None
            delay = 0.0
            try:
                async with self._connect() as link:
                    session = self._open_session(link)
                    await session.run()
            except* (LinkLost, grpc.aio.AioRpcError) as lost:
                attempt = 0 if session is not None and session.settled else attempt + 1
                delay = self._policy.backoff.delay_seconds(attempt, jitter=self._clock.random())
                self._log.warning("device_api_lost", error=_words(lost), retry_in_seconds=round(delay, 2))
            await self._clock.sleep(delay)

    def _open_session(self, link: DeviceLink) -> Session:
        return Session(
            link,
            self.ledger,
            self._changed,
            heartbeat_seconds=self._policy.heartbeat_seconds,
            backoff=self._policy.backoff,
            clock=self._clock,
            log=self._log,
        )


def _words(group: BaseExceptionGroup[BaseException]) -> str:
    """The first cause, in one line. The others are that one seen from other tasks."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)
