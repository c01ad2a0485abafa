"""What surrounds the mock provider's machines: load balancers, routes, addresses, images.

All of it is in plain attributes, for tests to look at and to change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from fnmatch import fnmatchcase

from fleetplane.domains.instances.providers.contract import (
    BalancerTargetState,
    ImageQuery,
    LeaderNetwork,
    LoadBalancer,
    NatRoute,
    ProviderRefused,
)


class MockNetwork(ABC):
    def __init__(self) -> None:
        self.targets: dict[str, set[str]] = defaultdict(set)
        """Provider ids behind each load balancer, by its key."""
        self.ending: set[str] = set()
        """Provider ids whose connections have not ended yet: taken out, they are seen draining."""
        self.routes: dict[tuple[str, str], NatRoute] = {}
        """By subnet and destination."""
        self.leaders: dict[str, str] = {}
        """Who has which leader address: provider ids by address."""
        self.images: dict[str, str] = {}
        """Ids by name, oldest first."""

    @abstractmethod
    def _call(self, operation: str) -> AbstractAsyncContextManager[None]: ...

    def lose(self, provider_id: str) -> None:
        """A machine is gone, and with it its place behind every load balancer."""
        self.ending.discard(provider_id)
        for targets in self.targets.values():
            targets.discard(provider_id)

    async def register_with_lb(
        self,
        provider_id: str,
        balancer: LoadBalancer,
        *,
        zone: str = "",  # noqa: ARG002  # here and below: the contract's names
        wake_proxy: bool = False,  # noqa: ARG002
    ) -> None:
        async with self._call("register_with_lb"):
            self.targets[balancer.key].add(provider_id)

    async def deregister_from_lb(
        self,
        provider_id: str,
        balancer: LoadBalancer,
        *,
        zone: str = "",  # noqa: ARG002
        wake_proxy: bool = False,  # noqa: ARG002
    ) -> None:
        async with self._call("deregister_from_lb"):
            self.targets[balancer.key].discard(provider_id)

    async def get_lb_target_state(
        self,
        provider_id: str,
        balancer: LoadBalancer,
        *,
        zone: str = "",  # noqa: ARG002
        wake_proxy: bool = False,  # noqa: ARG002
    ) -> BalancerTargetState:
        async with self._call("get_lb_target_state"):
            if provider_id in self.targets[balancer.key]:
                return BalancerTargetState.HEALTHY
            return (
                BalancerTargetState.DRAINING
                if provider_id in self.ending
                else BalancerTargetState.DEREGISTERED
            )

    async def list_lb_instances(
        self,
        balancer: LoadBalancer,
        *,
        zone: str = "",  # noqa: ARG002
    ) -> tuple[str, ...]:
        async with self._call("list_lb_instances"):
            return tuple(sorted(self.targets[balancer.key]))

    async def assign_leader_network(self, provider_id: str, network: LeaderNetwork) -> None:
        async with self._call("assign_leader_network"):
            self.leaders[network.ip] = provider_id

    async def release_leader_network(self, provider_id: str, network: LeaderNetwork) -> None:
        async with self._call("release_leader_network"):
            if self.leaders.get(network.ip) == provider_id:
                del self.leaders[network.ip]

    async def ensure_nat_route(self, route: NatRoute) -> None:
        async with self._call("ensure_nat_route"):
            there = self.routes.get((route.subnet, route.destination))
            known = ("", route.provider_id, route.previous_provider_id)
            if there is not None and there.provider_id not in known:
                raise ProviderRefused(f"mock: the route of {route.subnet} leads through {there.provider_id}")
            self.routes[route.subnet, route.destination] = route

    async def remove_nat_route(self, route: NatRoute) -> None:
        async with self._call("remove_nat_route"):
            there = self.routes.get((route.subnet, route.destination))
            if there is not None and there.provider_id == route.provider_id:
                del self.routes[route.subnet, route.destination]

    async def find_image(self, query: ImageQuery) -> str:
        async with self._call("find_image"):
            wanted = query.filters.get("name", ())
            found = [name for name in self.images if any(fnmatchcase(name, one) for one in wanted)]
            if query.sort == "name":
                found.sort()
            return self.images[found[-1 if query.newest_first else 0]] if found else ""

    def is_spot(self, args: Mapping[str, object]) -> bool:
        return bool(args.get("spot"))
