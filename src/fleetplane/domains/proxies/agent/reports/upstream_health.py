"""Which upstream servers are dead, from the answers to our probes. Pure.

A server goes down after so many failures in a row and comes up after so many successes. It starts
as what it was last known to be. If every server of a group fails, none is marked: a group
without servers answers nobody, and it is likelier that the check is wrong than that all have died.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

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
