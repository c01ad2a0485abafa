"""What goes into the next health report, and when it is due.

A report is composed when it can be sent, never queued: a server that was away gets the present,
not the past. Between reports the reporter can be woken, because some news does not keep.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from fleetplane.domains.instances.agent.files.folder import ReceiveFolder
from fleetplane.domains.instances.agent.identity.folder import IdentityFolder
from fleetplane.domains.instances.agent.machine import MachineSampler
from fleetplane.domains.instances.agent.report import health_report
from fleetplane.domains.instances.agent.spot import SpotNotice, SpotSource
from fleetplane.gen.nstance.v1 import agent_pb2
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Unavailable

LEAST_GAP_SECONDS: Final = 0.2
"""Between two reports, however often we are woken: a server that answers each report with a patch
would otherwise keep both sides busy for ever."""


class InstanceReporter:
    def __init__(
        self,
        *,
        version: str,
        instance_id: str,
        interval_seconds: float,
        machine: MachineSampler,
        identity: IdentityFolder,
        received: ReceiveFolder,
        clock: Clock,
    ) -> None:
        self.interval_seconds = interval_seconds
        self._version = version
        self._instance_id = instance_id
        self._machine = machine
        self._identity = identity
        self._received = received
        self._clock = clock
        self._wake = asyncio.Event()
        self.notice: SpotNotice | None = None
        self.count = 0

    def __repr__(self) -> str:
        return f"<Reporter {self._instance_id} count={self.count} notice={self.notice}>"

    @property
    def enabled(self) -> bool:
        return self.interval_seconds > 0

    def wake(self) -> None:
        """Something happened that the server should not wait for."""
        self._wake.set()

    def set_notice(self, notice: SpotNotice | None) -> None:
        if notice != self.notice:
            self.notice = notice
            self.wake()

    async def pause(self) -> None:
        """Until the next report is due."""
        await self._clock.sleep(LEAST_GAP_SECONDS)
        try:
            async with asyncio.timeout(max(0.0, self.interval_seconds - LEAST_GAP_SECONDS)):
                await self._wake.wait()
        except TimeoutError:
            return

    async def compose(self) -> agent_pb2.HealthReportRequest:
        self._wake.clear()
        self.count += 1
        return await asyncio.to_thread(self._compose, self.count)

    def _compose(self, count: int) -> agent_pb2.HealthReportRequest:
        # First: a patch that is applied meanwhile stores its hash last, so no hash goes with older files.
        config_hash = self._identity.config_hash()
        return health_report(
            version=self._version,
            instance_id=self._instance_id,
            count=count,
            now_ns=self._clock.now_ns(),
            reading=self._machine.look(),
            modified_ns=self._received.modified_ns(),
            errors=self._received.errors(),
            notice=self.notice,
            config_hash=config_hash,
        )


async def watch_spot(
    source: SpotSource,
    reporter: InstanceReporter,
    *,
    interval_seconds: float,
    clock: Clock,
    log: structlog.typing.FilteringBoundLogger,
) -> None:
    """Ask the source for ever; every change of its answer is reported at once."""
    silent = False
    while True:
        try:
            notice = await source.notice()
        except Unavailable as error:
            if not silent:
                silent = True
                log.warning("spot_source_silent", error=error.message)
        else:
            silent = False
            if notice != reporter.notice:
                log.warning("spot_notice", notice=str(notice))
            reporter.set_notice(notice)
        await clock.sleep(interval_seconds)
