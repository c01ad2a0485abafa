"""The optional operations for an infrastructure that has none of them: each says so."""

from __future__ import annotations

from collections.abc import Mapping

from fleetplane.domains.instances.providers.contract import (
    BalancerTargetState,
    ImageQuery,
    LeaderNetwork,
    LoadBalancer,
    NatRoute,
    ProviderCapability,
)
from fleetplane.kernel.errors import Unimplemented


class WithoutExtras:
    """To be inherited; a provider overrides what its `Description.capabilities` names."""

    kind: str = ""

    def _lacking(self, capability: ProviderCapability) -> Unimplemented:
        return Unimplemented(f"the provider {self.kind!r} has no {capability.value.replace('-', ' ')}")

    async def register_with_lb(
        self,
        provider_id: str,  # noqa: ARG002  # here and below: the names are the contract's
        balancer: LoadBalancer,  # noqa: ARG002
        *,
        zone: str = "",  # noqa: ARG002
        wake_proxy: bool = False,  # noqa: ARG002
    ) -> None:
        raise self._lacking(ProviderCapability.LOAD_BALANCERS)

    async def deregister_from_lb(
        self,
        provider_id: str,  # noqa: ARG002
        balancer: LoadBalancer,  # noqa: ARG002
        *,
        zone: str = "",  # noqa: ARG002
        wake_proxy: bool = False,  # noqa: ARG002
    ) -> None:
        raise self._lacking(ProviderCapability.LOAD_BALANCERS)

    async def get_lb_target_state(
        self,
        provider_id: str,  # noqa: ARG002
        balancer: LoadBalancer,  # noqa: ARG002
        *,
        zone: str = "",  # noqa: ARG002
        wake_proxy: bool = False,  # noqa: ARG002
    ) -> BalancerTargetState:
        raise self._lacking(ProviderCapability.LOAD_BALANCERS)

    async def list_lb_instances(
        self,
        balancer: LoadBalancer,  # noqa: ARG002
        *,
        zone: str = "",  # noqa: ARG002
    ) -> tuple[str, ...]:
        raise self._lacking(ProviderCapability.LOAD_BALANCERS)

    async def assign_leader_network(self, provider_id: str, network: LeaderNetwork) -> None:  # noqa: ARG002
        raise self._lacking(ProviderCapability.LEADER_NETWORK)

    async def release_leader_network(self, provider_id: str, network: LeaderNetwork) -> None:  # noqa: ARG002
        raise self._lacking(ProviderCapability.LEADER_NETWORK)

    async def ensure_nat_route(self, route: NatRoute) -> None:  # noqa: ARG002
        raise self._lacking(ProviderCapability.NAT_ROUTES)

    async def remove_nat_route(self, route: NatRoute) -> None:  # noqa: ARG002
        raise self._lacking(ProviderCapability.NAT_ROUTES)

    async def find_image(self, query: ImageQuery) -> str:  # noqa: ARG002
        raise self._lacking(ProviderCapability.IMAGES)

    def is_spot(self, args: Mapping[str, object]) -> bool:  # noqa: ARG002
        return False
