"""Which instances belong behind which load balancers. Pure: facts in, steps out.

An instance goes in once its agent is registered and has reported, and comes out as soon as it drains:
new connections stop before its work is moved elsewhere. Silence alone takes nobody out; load balancers
look after that themselves, and better. What is deleted must be out, which whoever deletes sees to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fleetplane.domains.instances.configuration import schema
from fleetplane.domains.instances.kinds import Attachment, BalancerTarget
from fleetplane.domains.instances.providers.contract import LoadBalancer, TargetGroup
from fleetplane.domains.instances.rules.plans import Attach, Detach, GroupMember, State, state

CLOUDS = ("aws", "google")
"""Providers that have load balancers of their own shape, and no others."""


def steps(
    member: GroupMember, wanted: Mapping[str, LoadBalancer], missing: Sequence[str] = ()
) -> Iterator[Attach | Detach]:
    """What one instance needs. `missing` are those of its load balancers that do not list it any more."""
    instance, status = member.instance, member.instance.status
    if status is None:
        return
    at = state(instance)
    serves = at is State.REGISTERED and bool(status.provider_id) and not member.lost
    if at not in (State.REGISTERED, State.DRAINING):
        return
    for key, attachment in status.balancers.items():
        balancer = wanted.get(key) if serves else None
        if (
            balancer is None
            or attachment.targets != targets(balancer)
            or attachment.detached_at_ns is not None
        ):
            yield Detach(name=instance.name, balancer=key)
    if not serves or not member.reported:
        return
    for key, balancer in wanted.items():
        there = status.balancers.get(key)
        if there is None or (targets(balancer) == there.targets and _incomplete(there, key, missing)):
            yield Attach(name=instance.name, balancer=balancer)


def _incomplete(attachment: Attachment, key: str, missing: Sequence[str]) -> bool:
    if attachment.detached_at_ns is not None:
        return False
    return attachment.attached_at_ns is None or key in missing


def targets(balancer: LoadBalancer) -> tuple[BalancerTarget, ...]:
    return tuple(
        BalancerTarget(id=group.id, target_port=group.target_port, proxy_port=group.proxy_port)
        for group in balancer.target_groups
    )


def recorded(key: str, attachment: Attachment) -> LoadBalancer:
    """The load balancer as it was when the instance was put behind it."""
    groups = (
        TargetGroup(id=one.id, target_port=one.target_port, proxy_port=one.proxy_port)
        for one in attachment.targets
    )
    return LoadBalancer(key=key, target_groups=tuple(groups))


def configured(
    keys: Sequence[str], balancers: Mapping[str, schema.LoadBalancerSection], infra: str
) -> tuple[dict[str, LoadBalancer], list[str]]:
    """The load balancers of a group as providers know them, and what stands in the way of others."""
    found: dict[str, LoadBalancer] = {}
    problems: list[str] = []
    for key in keys:
        given = balancers.get(key)
        if given is None:
            continue
        if given.provider == "tunnel":
            problems.append(f"load balancer {key} is a tunnel, and this server runs none")
        elif infra in CLOUDS and given.provider != infra:
            problems.append(f"load balancer {key} is of {given.provider}, and the instances are of {infra}")
        else:
            found[key] = LoadBalancer(key=key, target_groups=_groups(given))
    return found, problems


def _groups(balancer: schema.LoadBalancerSection) -> tuple[TargetGroup, ...]:
    own = (
        TargetGroup(id=group.arn, target_port=group.target_port, proxy_port=group.proxy_port)
        for group in balancer.target_groups
    )
    return (*own, *(TargetGroup(id=name) for name in balancer.network_endpoint_groups))
