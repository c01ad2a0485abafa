"""Asks upstream servers whether they live, and has NGINX leave out those that do not.

The asking and the waiting are here; what an answer means is decided in `health`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn

import structlog

from fleetplane.domains.proxies.agent.nginx.applier import ApplyOutcome, VersionApplier
from fleetplane.domains.proxies.agent.nginx.change_journal import VersionState
from fleetplane.domains.proxies.agent.nginx.http_get import get_tcp
from fleetplane.domains.proxies.agent.nginx.releases import StagedVersion
from fleetplane.domains.proxies.agent.reports.upstream_health import Probe, UpstreamChange, Verdicts, probes
from fleetplane.kernel.clock import Clock

PROBES_AT_ONCE: Final = 64
PASSING: Final = range(200, 400)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProberPolicy:
    gather_seconds: float = 0.5
    """Servers die together; those found dead within this go in one reload."""
    least_gap_seconds: float = 5.0
    """Between two reloads for the sake of dead servers."""
    interval_scale: float = 1.0
    """Intervals on the wire are whole seconds; tests are in more of a hurry."""


class UpstreamProber:
    def __init__(
        self,
        *,
        applier: VersionApplier,
        clock: Clock,
        log: structlog.typing.FilteringBoundLogger,
        told: Callable[[UpstreamChange], None],
        policy: ProberPolicy | None = None,
    ) -> None:
        self._applier = applier
        self._clock = clock
        self._log = log
        self._told = told
        self._policy = policy or ProberPolicy()
        self._slots = asyncio.Semaphore(PROBES_AT_ONCE)
        self._renewed = asyncio.Event()
        self._changed = asyncio.Event()
        self.verdicts = Verdicts()

    def __repr__(self) -> str:
        return f"<Prober servers={len(self.verdicts.states())} down={self.verdicts.down()}>"

    def renew(self) -> None:
        """There is another configuration."""
        self._renewed.set()

    async def run(self) -> NoReturn:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._enforce())
            while True:
                self._renewed.clear()
                watched = self._watched(self._applier.live)
                asking = [tasks.create_task(self._ask_for_ever(probe)) for probe in watched]
                await self._renewed.wait()
                for task in asking:
                    task.cancel()

    def _watched(self, live: StagedVersion | None) -> list[Probe]:
        if live is None:
            return []
        watched = probes(live.served)
        self.verdicts.watch(watched, live.down)
        if self.verdicts.down() != live.down:
            self._changed.set()
        return watched

    async def _ask_for_ever(self, probe: Probe) -> NoReturn:
        interval = probe.interval_seconds * self._policy.interval_scale
        await self._clock.sleep(interval * self._clock.random() * 0.1)
        while True:
            async with self._slots:
                answer = await get_tcp(
                    probe.address, probe.target, host=probe.host, timeout=probe.timeout_seconds
                )
            passed = answer is not None and answer.status in PASSING
            if (change := self.verdicts.record(probe, passed=passed)) is not None:
                self._log.warning("upstream_server", address=change.address, up=change.up)
                self._told(change)
                self._changed.set()
            await self._clock.sleep(interval * (0.95 + 0.1 * self._clock.random()))

    async def _enforce(self) -> NoReturn:
        """Bring what NGINX leaves out in line with what is dead; again, later, if it cannot be done."""
        while True:
            await self._changed.wait()
            await self._clock.sleep(self._policy.gather_seconds)
            self._changed.clear()
            try:
                outcome = await self._applier.mark_down(self.verdicts.down())
            except OSError as error:
                outcome = ApplyOutcome(state=VersionState.FAILED, error=str(error))
                await self._applier.open()
            if outcome.state is not VersionState.SUCCESS:
                self._log.error("dead_servers_not_left_out", error=outcome.error)
                self._changed.set()
            await self._clock.sleep(self._policy.least_gap_seconds)
