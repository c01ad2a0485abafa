"""The places where a tenant's groups are reached from outside, and when each was last used.

A listener is a port of a load balancer that is configured for groups of the tenant. Whether it is
used is told by agents, who count the connections to each port of their machine: a count that
changes is activity. Kept in memory; a new server counts everyone as active when it starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fleetplane.domains.instances.configuration import InstancesDocument
from fleetplane.domains.instances.configuration.merge import EffectiveGroup
from fleetplane.domains.instances.configuration.schema import LoadBalancerSection
from fleetplane.kernel.clock import Clock

PORTS_LIMIT = 256
"""Ports of one group whose use is remembered; agents may count any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerListener:
    name: str
    """The load balancer's key and the port at which it listens."""
    target_port: int
    """On the instances."""
    groups: frozenset[str]


def listeners(configuration: InstancesDocument, groups: Iterable[EffectiveGroup]) -> list[BalancerListener]:
    """Those that lead to any of the groups, by name. Pure."""
    members: dict[str, set[str]] = {}
    for group in groups:
        for key in group.load_balancers:
            members.setdefault(key, set()).add(group.key)
    return [
        BalancerListener(name=f"{key}:{port}", target_port=target, groups=frozenset(members[key]))
        for key in sorted(members)
        if key in configuration.load_balancers
        for port, target in _ports(configuration.load_balancers[key])
    ]


def _ports(balancer: LoadBalancerSection) -> Iterator[tuple[int, int]]:
    """Where it listens, and to which port of an instance that leads."""
    for group in balancer.target_groups:
        yield group.listener_port, group.target_port
    for frontend in balancer.frontends:
        yield frontend.port, frontend.port
    for listener in balancer.listeners:
        yield listener.target_port, listener.target_port


class Activity:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_at_ns = clock.now_ns()
        self._used: dict[tuple[str, str], dict[int, int]] = {}

    def __repr__(self) -> str:
        return f"<Activity groups={len(self._used)}>"

    def compare(self, tenant: str, group: str, before: Mapping[int, int], after: Mapping[int, int]) -> None:
        """Learn from two reports of one instance, one after the other."""
        if before == after:
            return
        used = self._used.setdefault((tenant, group), {})
        for port, count in after.items():
            if before.get(port, 0) != count and (port in used or len(used) < PORTS_LIMIT):
                used[port] = self._clock.now_ns()

    def idle_since_ns(self, tenant: str, listener: BalancerListener) -> int:
        """When a connection through the listener was last seen, or we began to look."""
        seen = (self._used.get((tenant, group), {}).get(listener.target_port, 0) for group in listener.groups)
        return max(self._started_at_ns, *seen)

    def keep(self, groups: set[tuple[str, str]]) -> None:
        """Forget groups that are not among these."""
        for key in self._used.keys() - groups:
            del self._used[key]
