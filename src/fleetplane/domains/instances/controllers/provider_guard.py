"""A provider that always comes back, with an answer or with an error of ours.

Providers are plug-ins that talk to clouds: they hang, and they have defects. Neither may stop the
controller that serves everyone else, so every call has its time, and whatever else a provider
raises is a `ProviderError`: nothing is known, the same call may succeed later. Calls are
idempotent by contract, which is what makes giving up on one safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import structlog

from fleetplane.domains.instances.providers.contract import (
    BalancerTargetState,
    Created,
    CreateRequest,
    Description,
    ImageQuery,
    LeaderNetwork,
    LoadBalancer,
    NatRoute,
    ObservedMachine,
    Provider,
    ProviderError,
    ProviderPage,
)
from fleetplane.kernel.errors import FleetplaneError

log = structlog.get_logger(__name__)

R = TypeVar("R")

CHECK_SECONDS = 5.0
"""Within which it must say how one instance is, or whether a subnet has room."""
LIST_SECONDS = 30.0
"""For one page, or the members of one load balancer, or the images that match."""
CHANGE_SECONDS = 60.0
"""To accept that a machine be made or removed; not until it is. Also for routes and load balancers."""
MOVE_SECONDS = 150.0
"""To take a network interface from one machine to another: clouds are slow to let go of one."""


class GuardedProvider:
    """The operations that keeping groups takes, each within its time."""

    def __init__(
        self,
        provider: Provider,
        *,
        check_seconds: float = CHECK_SECONDS,
        list_seconds: float = LIST_SECONDS,
        change_seconds: float | Callable[[], float] = CHANGE_SECONDS,
    ) -> None:
        """`change_seconds` may follow a document that is replaced."""
        self._provider = provider
        self._check_seconds = check_seconds
        self._list_seconds = list_seconds
        self._wanted_seconds = change_seconds

    def __repr__(self) -> str:
        return f"<GuardedProvider {self._provider!r}>"

    @property
    def _change_seconds(self) -> float:
        return self._wanted_seconds() if callable(self._wanted_seconds) else self._wanted_seconds

    @property
    def kind(self) -> str:
        return self._provider.kind

    def describe(self) -> Description:
        return self._provider.describe()

    def is_spot(self, args: Mapping[str, object]) -> bool:
        return self._provider.is_spot(args)

    async def create_instance(self, request: CreateRequest) -> Created:
        return await self._within(self._change_seconds, self._provider.create_instance(request), "create")

    async def delete_instance(self, instance_id: str, provider_id: str) -> None:
        call = self._provider.delete_instance(instance_id, provider_id)
        await self._within(self._change_seconds, call, "delete")

    async def get_instance_status(self, instance_id: str, provider_id: str) -> ObservedMachine:
        call = self._provider.get_instance_status(instance_id, provider_id)
        return await self._within(self._check_seconds, call, "status")

    async def list_instances(
        self, cluster: str, shard: str, *, limit: int, next_token: str = ""
    ) -> ProviderPage:
        call = self._provider.list_instances(cluster, shard, limit=limit, next_token=next_token)
        return await self._within(self._list_seconds, call, "list")

    async def check_subnet_capacity(self, subnet: str) -> bool:
        return await self._within(
            self._check_seconds, self._provider.check_subnet_capacity(subnet), "check_subnet"
        )

    # What not every infrastructure has.

    async def register_with_lb(self, provider_id: str, balancer: LoadBalancer, *, zone: str) -> None:
        call = self._provider.register_with_lb(provider_id, balancer, zone=zone)
        await self._within(self._change_seconds, call, "register_with_lb")

    async def deregister_from_lb(self, provider_id: str, balancer: LoadBalancer, *, zone: str) -> None:
        call = self._provider.deregister_from_lb(provider_id, balancer, zone=zone)
        await self._within(self._change_seconds, call, "deregister_from_lb")

    async def get_lb_target_state(
        self, provider_id: str, balancer: LoadBalancer, *, zone: str
    ) -> BalancerTargetState:
        call = self._provider.get_lb_target_state(provider_id, balancer, zone=zone)
        return await self._within(self._check_seconds, call, "lb_target_state")

    async def list_lb_instances(self, balancer: LoadBalancer, *, zone: str) -> tuple[str, ...]:
        call = self._provider.list_lb_instances(balancer, zone=zone)
        return await self._within(self._list_seconds, call, "list_lb_instances")

    async def ensure_nat_route(self, route: NatRoute) -> None:
        await self._within(self._change_seconds, self._provider.ensure_nat_route(route), "ensure_nat_route")

    async def remove_nat_route(self, route: NatRoute) -> None:
        await self._within(self._change_seconds, self._provider.remove_nat_route(route), "remove_nat_route")

    async def assign_leader_network(self, provider_id: str, network: LeaderNetwork) -> None:
        call = self._provider.assign_leader_network(provider_id, network)
        await self._within(MOVE_SECONDS, call, "assign_leader_network")

    async def release_leader_network(self, provider_id: str, network: LeaderNetwork) -> None:
        call = self._provider.release_leader_network(provider_id, network)
        await self._within(self._change_seconds, call, "release_leader_network")

    async def find_image(self, query: ImageQuery) -> str:
        return await self._within(self._list_seconds, self._provider.find_image(query), "find_image")

    async def _within(self, seconds: float, call: Awaitable[R], operation: str) -> R:
        kind = self._provider.kind
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await call
        except FleetplaneError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                raise ProviderError(f"{kind}: {operation} took longer than {seconds:g} s") from error
            # A defect of the provider: its place is wanted, and the controller goes on.
            log.error("instances.provider_crashed", provider=kind, operation=operation, exc_info=error)
            raise ProviderError(f"{kind}: {operation} failed: {type(error).__name__}: {error}") from error
