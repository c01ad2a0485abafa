"""What surrounds EC2 instances: target groups, routes, the leader's interface, images.

Routes are changed only in route tables that carry our cluster's tag, and only where they lead through
an instance that we were told is ours: an administrator's own way out is never taken over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TypeVar

from fleetplane.domains.instances.providers.aws import wire
from fleetplane.domains.instances.providers.contract import (
    BalancerTargetState,
    ImageQuery,
    InstanceGone,
    LeaderNetwork,
    LoadBalancer,
    NatRoute,
    ProviderError,
    ProviderRefused,
    TargetGroup,
)
from fleetplane.kernel.clock import Clock

T = TypeVar("T")
INTERFACE_POLLS = 60
INTERFACE_POLL_SECONDS = 2.0
"""Two minutes for EC2 to let go of an interface; force makes it seconds."""
SECOND_INTERFACE = 1
"""Where the leader's interface goes: 0 is the machine's own."""


class AwsNetwork(ABC):
    """What of a provider concerns the network; the rest of the provider says how EC2 is asked."""

    @property
    @abstractmethod
    def _clock(self) -> Clock: ...

    @property
    @abstractmethod
    def _cluster_tag(self) -> str: ...

    @abstractmethod
    async def _ec2(self, operation: str, shape: type[T], **parameters: object) -> T: ...

    @abstractmethod
    async def _elb(self, operation: str, shape: type[T], **parameters: object) -> T: ...

    # Load balancers.

    async def register_with_lb(
        self,
        provider_id: str,
        balancer: LoadBalancer,
        *,
        zone: str = "",  # noqa: ARG002  # here and below: a target group knows its zones
        wake_proxy: bool = False,
    ) -> None:
        for group in balancer.target_groups:
            targets = [_target(provider_id, group, wake_proxy)]
            await self._elb("register_targets", wire.AwsNothing, TargetGroupArn=group.id, Targets=targets)

    async def deregister_from_lb(
        self,
        provider_id: str,
        balancer: LoadBalancer,
        *,
        zone: str = "",  # noqa: ARG002
        wake_proxy: bool = False,
    ) -> None:
        for group in balancer.target_groups:
            targets = [_target(provider_id, group, wake_proxy)]
            try:
                await self._elb(
                    "deregister_targets", wire.AwsNothing, TargetGroupArn=group.id, Targets=targets
                )
            except ProviderRefused as error:
                if (
                    error.details.get("code") not in wire.NO_TARGET
                ):  # it is not there: that is what was wanted
                    raise

    async def get_lb_target_state(
        self,
        provider_id: str,
        balancer: LoadBalancer,
        *,
        zone: str = "",  # noqa: ARG002
        wake_proxy: bool = False,
    ) -> BalancerTargetState:
        states = []
        for group in balancer.target_groups:
            port = _target(provider_id, group, wake_proxy).get("Port")
            states += [
                wire.TARGET_STATES.get(each.target_health.state, BalancerTargetState.REGISTERED)
                for each in await self._targets(group)
                if each.target.id == provider_id and port in (None, each.target.port)
            ] or [BalancerTargetState.DEREGISTERED]
        return wire.combined(states)

    async def list_lb_instances(
        self,
        balancer: LoadBalancer,
        *,
        zone: str = "",  # noqa: ARG002
    ) -> tuple[str, ...]:
        found = {each.target.id for group in balancer.target_groups for each in await self._targets(group)}
        return tuple(sorted(found))

    async def _targets(self, group: TargetGroup) -> tuple[wire.TargetHealthDescription, ...]:
        answer = await self._elb("describe_target_health", wire.TargetHealths, TargetGroupArn=group.id)
        return answer.target_health_descriptions

    # Images.

    async def find_image(self, query: ImageQuery) -> str:
        owners = {"Owners": list(query.owners)} if query.owners else {}
        available = {"state": ("available",), **query.filters}
        answer = await self._ec2("describe_images", wire.AwsImages, Filters=wire.filters(available), **owners)
        found = sorted(
            answer.images, key=lambda each: each.name if query.sort == "name" else each.creation_date
        )
        return found[-1 if query.newest_first else 0].image_id if found else ""

    def is_spot(self, args: Mapping[str, object]) -> bool:
        market = args.get("InstanceMarketOptions")
        return isinstance(market, Mapping) and market.get("MarketType") == "spot"

    # The way out.

    async def ensure_nat_route(self, route: NatRoute) -> None:
        interface = await self._interface_of(route.provider_id)
        await self._ec2(
            "modify_network_interface_attribute",
            wire.AwsNothing,
            NetworkInterfaceId=interface,
            SourceDestCheck={"Value": False},
        )
        if route.allocation_id:
            await self._ec2(
                "associate_address",
                wire.AwsNothing,
                AllocationId=route.allocation_id,
                InstanceId=route.provider_id,
                AllowReassociation=True,
            )
        table, present = await self._route(route)
        if present is not None and present.network_interface_id == interface:
            return
        if present is not None and not await self._is_ours(present, route):
            raise ProviderRefused(
                f"subnet {route.subnet} has a route to {route.destination} that is not through our instances"
            )
        await self._ec2(
            "create_route" if present is None else "replace_route",
            wire.AwsNothing,
            RouteTableId=table,
            NetworkInterfaceId=interface,
            **wire.destination(route.destination),
        )

    async def remove_nat_route(self, route: NatRoute) -> None:
        table, present = await self._route(route)
        if present is None or not await self._leads_through(present, route.provider_id):
            return
        await self._ec2(
            "delete_route", wire.AwsNothing, RouteTableId=table, **wire.destination(route.destination)
        )

    async def _is_ours(self, present: wire.AwsRoute, route: NatRoute) -> bool:
        """It leads through the instance before this one, or nowhere, because that is gone."""
        if present.state == "blackhole":
            return True
        before = route.previous_provider_id
        return bool(before) and await self._leads_through(present, before)

    async def _leads_through(self, present: wire.AwsRoute, provider_id: str) -> bool:
        if present.instance_id == provider_id:
            return True
        if not present.network_interface_id:
            return False
        try:
            return present.network_interface_id == await self._interface_of(provider_id)
        except InstanceGone:
            return False

    async def _route(self, route: NatRoute) -> tuple[str, wire.AwsRoute | None]:
        answer = await self._ec2(
            "describe_route_tables",
            wire.RouteTables,
            Filters=wire.filters({"association.subnet-id": route.subnet}),
        )
        if len(answer.route_tables) != 1:
            raise ProviderRefused(f"subnet {route.subnet} has no route table of its own")
        table = answer.route_tables[0]
        if not any(tag.key == self._cluster_tag and tag.value == route.cluster for tag in table.tags):
            raise ProviderRefused(
                f"route table {table.route_table_id} of subnet {route.subnet} is not ours: it lacks the tag "
                f"{self._cluster_tag}={route.cluster}"
            )
        found = (each for each in table.routes if each.destination == route.destination)
        return table.route_table_id, next(found, None)

    async def _interface_of(self, provider_id: str) -> str:
        answer = await self._ec2("describe_instances", wire.Reservations, InstanceIds=[provider_id])
        for instance in answer.instances:
            for interface in instance.network_interfaces:
                if interface.attachment.device_index == 0:
                    return interface.network_interface_id
        raise ProviderError(f"EC2 shows no network interface of {provider_id}")

    # The leader's address.

    async def assign_leader_network(self, provider_id: str, network: LeaderNetwork) -> None:
        interface = await self._leader_interface(network)
        holder = interface.attachment
        if holder is not None and holder.instance_id == provider_id:
            return
        if holder is not None:
            await self._ec2(
                "detach_network_interface", wire.AwsNothing, AttachmentId=holder.attachment_id, Force=True
            )
            await self._free(network)
        await self._ec2(
            "attach_network_interface",
            wire.AwsNothing,
            NetworkInterfaceId=network.interface_id,
            InstanceId=provider_id,
            DeviceIndex=SECOND_INTERFACE,
        )

    async def release_leader_network(self, provider_id: str, network: LeaderNetwork) -> None:
        holder = (await self._leader_interface(network)).attachment
        if holder is not None and holder.instance_id == provider_id:
            await self._ec2("detach_network_interface", wire.AwsNothing, AttachmentId=holder.attachment_id)

    async def _free(self, network: LeaderNetwork) -> None:
        for _ in range(INTERFACE_POLLS):
            if (await self._leader_interface(network)).attachment is None:
                return
            await self._clock.sleep(INTERFACE_POLL_SECONDS)
        raise ProviderError(f"EC2 does not let go of {network.interface_id}")

    async def _leader_interface(self, network: LeaderNetwork) -> wire.AwsInterface:
        answer = await self._ec2(
            "describe_network_interfaces", wire.Interfaces, NetworkInterfaceIds=[network.interface_id]
        )
        if not answer.network_interfaces:
            raise ProviderRefused(f"EC2 has no interface {network.interface_id}")
        interface = answer.network_interfaces[0]
        if interface.private_ip_address and interface.private_ip_address != network.ip:
            raise ProviderRefused(
                f"{network.interface_id} has the address {interface.private_ip_address}, not {network.ip}"
            )
        return interface


def _target(provider_id: str, group: TargetGroup, wake_proxy: bool) -> dict[str, object]:
    port = group.proxy_port if wake_proxy else group.target_port
    return {"Id": provider_id, "Port": port} if port else {"Id": provider_id}
