"""Compose health reports and say when the next one is due.

A report is composed when it can be sent, never queued: a server that was away gets the present,
not the past. Between reports the reporter can be woken, because some news does not keep.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import structlog

from fleetplane.domains.instances.agent.files.folder import ReceiveFolder
from fleetplane.domains.instances.agent.identity.folder import IdentityFolder
from fleetplane.domains.instances.agent.machine import MachineSample, MachineSampler
from fleetplane.domains.instances.agent.spot import SpotNotice, SpotSource
from fleetplane.gen.nstance.v1 import agent_pb2
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Unavailable
from fleetplane.kernel.values import durations
from fleetplane.kernel.values.timestamps import timestamp


def health_report(
    *,
    version: str,
    instance_id: str,
    count: int,
    now_ns: int,
    reading: MachineSample,
    modified_ns: Mapping[str, int],
    errors: Mapping[str, str],
    notice: SpotNotice | None,
    config_hash: str,
) -> agent_pb2.HealthReportRequest:
    files = {name: agent_pb2.FileStatus(last_modified=timestamp(at)) for name, at in modified_ns.items()}
    files |= {name: agent_pb2.FileStatus(error=words or "refused") for name, words in errors.items()}
    return agent_pb2.HealthReportRequest(
        version=version,
        instance_id=instance_id,
        timestamp=timestamp(now_ns),
        count=count,
        uptime=durations.format(int(reading.uptime_seconds)),
        metrics=_metrics(reading),
        files=files,
        termination_notice=None if notice is None else _termination(notice),
        config_hash=config_hash,
    )


def _metrics(reading: MachineSample) -> agent_pb2.Metrics:
    metrics = agent_pb2.Metrics(
        cpu_usage=reading.cpu_percent,
        cpu_core_usage=reading.core_percents,
        memory_usage=reading.memory_percent,
        network_interface_error=reading.interface_error or None,
        conntrack_count=reading.conntrack_count,
        conntrack_max=reading.conntrack_max,
        conntrack_error=reading.conntrack_error or None,
        ebpf_error=reading.ebpf_error or None,
    )
    if counters := reading.interface_counters:
        metrics.network_interface.CopyFrom(
            agent_pb2.InterfaceMetrics(
                interface_name=reading.interface,
                rx_bytes=counters["rx_bytes"],
                tx_bytes=counters["tx_bytes"],
                rx_packets=counters["rx_packets"],
                tx_packets=counters["tx_packets"],
                rx_drops=counters["rx_dropped"],
                tx_drops=counters["tx_dropped"],
            )
        )
    return metrics


def _termination(notice: SpotNotice) -> agent_pb2.TerminationNotice:
    deadline = None if notice.deadline_ns is None else timestamp(notice.deadline_ns)
    return agent_pb2.TerminationNotice(action=notice.action, deadline=deadline)


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
