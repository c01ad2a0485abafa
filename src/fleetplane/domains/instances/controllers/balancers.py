"""Putting instances behind load balancers and taking them out: the hands of `balancing`.

What is about to be done is written into the instance's record first. A server that dies in the middle
leaves a record that says more than is true, never less: the next one asks again, which is harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import structlog

from fleetplane.domains.instances.controllers.provider_guard import GuardedProvider
from fleetplane.domains.instances.kinds import Attachment, Instance, InstanceStatus
from fleetplane.domains.instances.providers.contract import (
    BalancerTargetState,
    InstanceGone,
    LoadBalancer,
    ProviderCapability,
)
from fleetplane.domains.instances.records.groups import Groups, GroupView
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.rules import balancing
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError

log = structlog.get_logger(__name__)


_NewAttachment = Callable[[int], Attachment | None]
"""From the time, what is noted; nothing if it is out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SeenMembers:
    began_ns: int
    members: frozenset[str]


class Balancers:
    def __init__(self, provider: GuardedProvider, instances: Instances, groups: Groups, clock: Clock) -> None:
        self._provider = provider
        self._instances = instances
        self._groups = groups
        self._clock = clock
        self._seen: dict[str, _SeenMembers] = {}
        """By load balancer, of which there are as many as the configuration has."""

    def __repr__(self) -> str:
        return f"<Balancers seen={len(self._seen)}>"

    @property
    def _zone(self) -> str:
        return self._groups.required().shard.infra.zone

    def wanted(self, view: GroupView | None) -> tuple[Mapping[str, LoadBalancer], list[str]]:
        """The load balancers of a group, and why some of them cannot be used."""
        if view is None or not view.group.load_balancers:
            return {}, []
        if not self._can_balance():
            return {}, [f"the provider {self._provider.kind!r} has no load balancers"]
        configuration = self._groups.required()
        return balancing.configured(
            view.group.load_balancers, configuration.load_balancers, configuration.shard.infra.provider
        )

    def _can_balance(self) -> bool:
        return ProviderCapability.LOAD_BALANCERS in self._provider.describe().capabilities

    def missing(self, instance: Instance) -> list[str]:
        """Those load balancers that no longer list it although it was put behind them."""
        status = instance.status
        if status is None or not status.balancers:
            return []
        return [
            key
            for key, attachment in status.balancers.items()
            if attachment.attached_at_ns is not None
            and (seen := self._seen.get(key)) is not None
            and seen.began_ns > attachment.attached_at_ns
            and status.provider_id not in seen.members
        ]

    async def look(self) -> None:
        """List who is behind each load balancer that a group has: someone may have taken them out."""
        used: dict[str, LoadBalancer] = {}
        for view in self._groups.views().values():
            used.update(self.wanted(view)[0])
        self._seen = {key: seen for key, seen in self._seen.items() if key in used}
        for key, balancer in used.items():
            began_ns = self._clock.now_ns()
            try:
                members = await self._provider.list_lb_instances(balancer, zone=self._zone)
            except FleetplaneError as error:
                # Nothing is known of this one, which is no reason to act.
                log.warning("instances.balancer_silent", balancer=key, error=error.message)
                continue
            self._seen[key] = _SeenMembers(began_ns=began_ns, members=frozenset(members))

    async def attach(self, tenant: str, name: str, balancer: LoadBalancer) -> None:
        targets = balancing.targets(balancer)
        instance = await self._note(
            tenant, name, balancer.key, lambda _now_ns: Attachment(targets=targets), action="attaching"
        )
        if instance is None or instance.status is None:
            return
        await self._provider.register_with_lb(instance.status.provider_id, balancer, zone=self._zone)
        await self._note(
            tenant,
            name,
            balancer.key,
            lambda now_ns: Attachment(targets=targets, attached_at_ns=now_ns),
            action="attached",
        )
        log.info("instances.attached", tenant=tenant, instance=name, balancer=balancer.key)

    async def detach(self, tenant: str, name: str, key: str) -> bool:
        """Take it out; whether it is out, connections included. Nobody waits beyond the end of its drain."""
        instance = self._instances.find(tenant, name)
        status = instance.status if instance is not None else None
        if status is None or key not in status.balancers:
            return True
        attachment = status.balancers[key]
        balancer = balancing.recorded(key, attachment)
        if attachment.detached_at_ns is None and self._can_balance():
            with suppress(InstanceGone):  # then it is out, too
                await self._provider.deregister_from_lb(status.provider_id, balancer, zone=self._zone)
            await self._note(
                tenant, name, key, lambda now_ns: _taken_out(attachment, now_ns), action="detached"
            )
            log.info("instances.detached", tenant=tenant, instance=name, balancer=key)
        if await self._still_ending(status, balancer):
            return False
        await self._note(tenant, name, key, lambda _now_ns: None, action="out")
        return True

    async def _still_ending(self, status: InstanceStatus, balancer: LoadBalancer) -> bool:
        drain = status.drain
        if drain is None or not self._can_balance() or self._clock.now_ns() >= drain.delete_at_ns:
            return False
        try:
            seen = await self._provider.get_lb_target_state(status.provider_id, balancer, zone=self._zone)
        except FleetplaneError as error:
            log.warning("instances.balancer_silent", balancer=balancer.key, error=error.message)
            return True
        return seen is BalancerTargetState.DRAINING

    async def _note(
        self, tenant: str, name: str, key: str, attachment: _NewAttachment, *, action: str
    ) -> Instance | None:
        def noted(status: InstanceStatus, now_ns: int) -> InstanceStatus:
            balancers = {other: entry for other, entry in status.balancers.items() if other != key}
            if (new := attachment(now_ns)) is not None:
                balancers[key] = new
            return msgspec.structs.replace(status, balancers=balancers, last_error="")

        return await self._instances.step(tenant, name, noted, action=action)


def _taken_out(attachment: Attachment, now_ns: int) -> Attachment:
    return msgspec.structs.replace(attachment, detached_at_ns=now_ns)
