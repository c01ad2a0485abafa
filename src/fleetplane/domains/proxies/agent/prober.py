"""Health checks of upstream servers: probes them, and has NGINX leave out those that fail.

A server goes down after so many failures in a row and comes up after so many successes. It starts
in the last known state. If every server of a group fails, none is marked: a group without servers answers
nobody, and it is likelier that the check is wrong than that all have died.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NoReturn
from urllib.parse import quote

import structlog

from fleetplane.domains.proxies.agent.nginx.applier import ApplyOutcome, VersionApplier
from fleetplane.domains.proxies.agent.nginx.confirmation import VersionState
from fleetplane.domains.proxies.agent.nginx.http_get import get_tcp
from fleetplane.domains.proxies.agent.nginx.releases import StagedVersion
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import Clock

HEALTHY_THRESHOLD: Final = 2
UNHEALTHY_THRESHOLD: Final = 3
INTERVAL_SECONDS: Final = 10.0
TIMEOUT_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One server to be asked again and again."""

    upstream: str
    address: str
    target: str
    host: str
    interval_seconds: float
    timeout_seconds: float
    healthy_threshold: int
    unhealthy_threshold: int

    @property
    def key(self) -> tuple[str, str]:
        return self.upstream, self.address


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamChange:
    upstream: str
    address: str
    up: bool


@dataclass(slots=True)
class _UpstreamServer:
    up: bool = True
    streak: int = 0
    """Answers in a row that contradict `up`."""


@dataclass(slots=True)
class Verdicts:
    _servers: dict[tuple[str, str], _UpstreamServer] = field(default_factory=dict)

    def watch(self, probes: list[Probe], down: dict[str, frozenset[str]]) -> None:
        """Keep what is known of servers that are still probed; others begin as `down` says."""
        self._servers = {
            probe.key: self._servers.get(probe.key)
            or _UpstreamServer(up=probe.address not in down.get(probe.upstream, frozenset()))
            for probe in probes
        }

    def record(self, probe: Probe, *, passed: bool) -> UpstreamChange | None:
        server = self._servers.get(probe.key)
        if server is None:
            return None  # of a configuration that has just gone
        if passed == server.up:
            server.streak = 0
            return None
        server.streak += 1
        if server.streak < (probe.healthy_threshold if passed else probe.unhealthy_threshold):
            return None
        server.up, server.streak = passed, 0
        return UpstreamChange(upstream=probe.upstream, address=probe.address, up=passed)

    def states(self) -> dict[tuple[str, str], bool]:
        return {key: server.up for key, server in self._servers.items()}

    def all_dead(self) -> frozenset[str]:
        """Groups of which no server answers."""
        groups = frozenset(upstream for upstream, _ in self._servers)
        return groups - {upstream for (upstream, _), server in self._servers.items() if server.up}

    def down(self) -> dict[str, frozenset[str]]:
        """What is to be taken out of service."""
        spared = self.all_dead()
        found: dict[str, set[str]] = {}
        for (upstream, address), server in self._servers.items():
            if not server.up and upstream not in spared:
                found.setdefault(upstream, set()).add(address)
        return {upstream: frozenset(addresses) for upstream, addresses in found.items()}


def probes(update: pb.ConfigUpdate) -> list[Probe]:
    """Every server that active checks are asked for. Those an operator took out are left alone."""
    hosts = {
        location.upstream_id: virtual.server_name.split()[0]
        for virtual in update.virtual_hosts
        for location in virtual.locations
        if virtual.server_name.split() and virtual.server_name.split()[0][0] not in "_*."
    }
    return [
        Probe(
            upstream=upstream.id,
            address=server.address,
            target=quote(upstream.health_check.path or "/", safe="/?&=%:@!$'()*+,;~-._"),
            host=hosts.get(upstream.id, server.address),
            interval_seconds=float(upstream.health_check.interval_seconds or INTERVAL_SECONDS),
            timeout_seconds=float(upstream.health_check.timeout_seconds or TIMEOUT_SECONDS),
            healthy_threshold=upstream.health_check.healthy_threshold or HEALTHY_THRESHOLD,
            unhealthy_threshold=upstream.health_check.unhealthy_threshold or UNHEALTHY_THRESHOLD,
        )
        for upstream in update.upstreams
        if upstream.health_check.enabled
        for server in upstream.servers
        if not server.down
    ]


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
