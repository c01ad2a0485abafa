"""The NVML provider: reports this machine's GPUs to the device API and keeps the report current.

One *life* is one enumeration of the driver: its GPUs, their verdicts and the thread that waits for
their events. Inside a life come any number of *sessions*, each one connection to the device API,
each starting from nothing; so a server that was restarted, emptied or replaced ends up with
the truth.

Verdicts are decided in `health` and kept in `ledger`, the driver is asked in `driver`, the device
API is spoken to in `session`. This module only ties their lives together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn, assert_never

import grpc
import grpc.aio

from fleetplane.domains.gpus import xids
from fleetplane.domains.gpus.agent import driver
from fleetplane.domains.gpus.agent.driver import EventMonitor, GpusLost, Occurrence, WaitFailed
from fleetplane.domains.gpus.agent.health import GpuUuid
from fleetplane.domains.gpus.agent.ledger import Ledger
from fleetplane.domains.gpus.agent.library import Device, DriverEvent, DriverEventKind, Library
from fleetplane.domains.gpus.agent.session import DeviceLink, ProviderSession, SessionLog
from fleetplane.kernel.clock import Backoff, Clock
from fleetplane.node import link as node_link
from fleetplane.node.connection import (
    ConnectionAttempt,
    ConnectionRetries,
    Follow,
    KeepConnected,
    no_check_in,
)
from fleetplane.node.figures import Measured
from fleetplane.node.link import LinkLost

MEASURE_SECONDS = 10.0
"""For one look at all GPUs; a driver that is held up measures nothing meanwhile."""


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


class GpuProvider:
    """Runs until cancelled. Leaves its GPUs registered: silence is the server's to judge."""

    def __init__(
        self,
        *,
        library: Library,
        connect: Callable[[], DeviceLink],
        policy: ProviderPolicy,
        clock: Clock,
        log: SessionLog,
        check_in: Follow = no_check_in,
        settings: Follow = no_check_in,
    ) -> None:
        self._library = library
        self._connect = connect
        self._policy = policy
        self._clock = clock
        self._log = log
        self._check_in = check_in
        self._settings = settings
        self._changed = asyncio.Event()
        self._enumerate = asyncio.Event()
        """Look again at whether a new life is due: it was asked for, or is due at another time."""
        self._enumerate_asked = False
        self._devices: Mapping[GpuUuid, Device] = {}
        self.ledger = Ledger(ignored_xids=policy.ignored_xids, lower_case_names=policy.lower_case_names)

    def __repr__(self) -> str:
        return f"<Provider {self.ledger!r} of {self._library!r}>"

    async def measure(self) -> Measured:
        """What the GPUs of this enumeration measure now, by the names under which they are registered."""
        named = {gpu.uuid: gpu.name for gpu in self.ledger.gpus}
        devices = {named[uuid]: device for uuid, device in self._devices.items() if uuid in named}
        return await driver.in_thread(lambda: driver.measured(devices), limit_seconds=MEASURE_SECONDS)

    def enumerate_again(self) -> None:
        """Begin a new life as soon as possible."""
        self._enumerate_asked = True
        self._enumerate.set()

    def set_to(
        self,
        *,
        heartbeat_seconds: float,
        ignored_xids: frozenset[int],
        enumerate_every_seconds: float | None,
    ) -> None:
        """Go on with other settings: from the next pause, the next XID and the last enumeration on."""
        self._policy = replace(
            self._policy,
            heartbeat_seconds=heartbeat_seconds,
            ignored_xids=ignored_xids,
            enumerate_every_seconds=enumerate_every_seconds,
        )
        self.ledger.ignored_xids = ignored_xids
        self._enumerate.set()

    async def run(self) -> NoReturn:
        while True:
            self._enumerate_asked = False
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
        began = asyncio.get_running_loop().time()
        while not self._enumerate_asked:
            self._enumerate.clear()
            every = self._policy.enumerate_every_seconds
            try:
                async with asyncio.timeout_at(None if every is None else began + every):
                    await self._enumerate.wait()
            except TimeoutError:
                return

    def _adopt(self, seen: driver.Enumeration) -> None:
        self._devices = seen.devices
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
            case DriverEvent(kind=DriverEventKind.XID):
                self._on_xid(occurrence, now_ns)
            case DriverEvent(kind=DriverEventKind.MIG_CONFIG):
                self._log.info("gpu_divided_anew", gpu=occurrence.uuid)
                self.enumerate_again()
            case DriverEvent():
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

    def _on_xid(self, event: DriverEvent, now_ns: int) -> None:
        severity = xids.severity(event.data, self._policy.ignored_xids)
        self._log.warning(
            "gpu_xid", gpu=event.uuid, xid=event.data, text=xids.describe(event.data), severity=severity.value
        )
        if event.uuid is not None and self.ledger.on_xid(
            event.uuid, event.data, now_ns=now_ns, instance=event.instance
        ):
            self._changed.set()

    async def _keep_connected(self) -> None:
        """The waits begin anew after a session in which the server has heard all we had to say."""
        await KeepConnected(
            endings=(LinkLost, grpc.aio.AioRpcError),
            waits=ConnectionRetries(backoff=self._policy.backoff),
            lost=self._lost,
            clock=self._clock,
        ).run(self._serve)

    async def _serve(self, attempt: ConnectionAttempt) -> None:
        async with self._connect() as link:
            await self._open_session(link, attempt).run()

    def _lost(self, why: Exception, seconds: float) -> None:
        words = node_link.words(why) if isinstance(why, grpc.aio.AioRpcError) else str(why)
        self._log.warning("device_api_lost", error=words, retry_in_seconds=round(seconds, 2))

    def _open_session(self, link: DeviceLink, attempt: ConnectionAttempt) -> ProviderSession:
        return ProviderSession(
            link,
            self.ledger,
            self._changed,
            on_settled=attempt.established,
            heartbeat_seconds=lambda: self._policy.heartbeat_seconds,
            backoff=self._policy.backoff,
            clock=self._clock,
            log=self._log,
            check_in=self._check_in,
            settings=self._settings,
        )
