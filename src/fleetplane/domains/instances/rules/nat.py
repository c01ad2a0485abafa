"""Which NAT instances a tenant needs, and through which of them each subnet leads. Pure.

Every subnet in which a tenant has instances gets a NAT instance of its own: made before the first of
them, kept until the subnet has been empty for a while. One that is to be replaced, for whatever reason,
stays until another has reported and the way out leads through that one. It grows and shrinks along a
ladder of instance types, by being replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from fleetplane.domains.instances.configuration.schema import Nat, Thresholds
from fleetplane.domains.instances.kinds import HealthReport
from fleetplane.domains.instances.rules.plans import (
    Action,
    Create,
    GroupMember,
    GroupPlan,
    GroupPolicy,
    State,
    SubnetRoute,
    state,
)
from fleetplane.kernel.values.times import NS

NAT64 = "64:ff9b::/96"
NAT44 = "0.0.0.0/0"


class Pressure(StrEnum):
    UP = "up"
    DOWN = "down"
    NONE = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NatLoad:
    """What a NAT instance reported of itself, once."""

    at_ns: int
    cpu: float
    conntrack: float
    dropped: int


def load(report: HealthReport, at_ns: int) -> NatLoad | None:
    """None if the report does not tell everything: half of it decides nothing."""
    if report.cpu_usage is None or report.conntrack_percent is None or report.dropped_packets is None:
        return None
    return NatLoad(
        at_ns=at_ns,
        cpu=report.cpu_usage,
        conntrack=report.conntrack_percent,
        dropped=report.dropped_packets,
    )


def pressure(before: NatLoad, now: NatLoad, nat: Nat) -> Pressure:
    """One measure is enough to grow; all of them together to shrink."""
    seconds = (now.at_ns - before.at_ns) / NS
    if seconds <= 0 or now.dropped < before.dropped:  # the machine was started anew in between
        return Pressure.NONE
    measured = (now.cpu, now.conntrack, (now.dropped - before.dropped) / seconds)
    if any(value > limit for value, limit in zip(measured, _limits(nat.scale_up_thresholds), strict=True)):
        return Pressure.UP
    low = _limits(nat.scale_down_thresholds)
    if all(value <= limit for value, limit in zip(measured, low, strict=True)):
        return Pressure.DOWN
    return Pressure.NONE


def _limits(thresholds: Thresholds) -> tuple[float, float, float]:
    return thresholds.cpu_percent, thresholds.conntrack_percent, thresholds.packet_drops_per_second


def rung(nat: Nat, current: str, direction: Pressure) -> str:
    """The next instance type in that direction; the same at the end of the ladder."""
    ladder = nat.instance_type_ladder
    if current not in ladder:
        return current
    step = {Pressure.UP: 1, Pressure.DOWN: -1, Pressure.NONE: 0}[direction]
    return ladder[min(len(ladder) - 1, max(0, ladder.index(current) + step))]


def current_type(nat: Nat, members: Sequence[GroupMember], configured: str) -> str:
    """The type of a subnet's NAT instance when nothing presses: the one it has, if that is allowed."""
    staying = [member for member in members if state(member.instance) is not State.DRAINING]
    newest = max(staying or members, key=lambda member: member.instance.created_at_ns, default=None)
    found = newest.instance.spec.instance_type if newest is not None else ""
    return found if found in nat.instance_type_ladder else configured


def destination(nat: Nat) -> str:
    return NAT64 if nat.mode == "nat64" else NAT44


# One subnet.


def routed(members: Sequence[GroupMember]) -> GroupMember | None:
    """The one that the way out leads through, as far as is written."""
    having = [member for member in members if _routed_at_ns(member) is not None]
    return max(having, key=lambda member: _routed_at_ns(member) or 0, default=None)


def _routed_at_ns(member: GroupMember) -> int | None:
    status = member.instance.status
    if status is None or status.deleting_at_ns is not None:
        return None
    return status.routed_at_ns


def needed(members: Sequence[GroupMember], subnet: str, *, wanted: bool) -> list[GroupMember]:
    """The members, with the one that carries the way out marked as not to go yet."""
    through = routed(members)
    if through is None or not wanted:
        return list(members)
    why = f"the way out of {subnet} leads through it"
    return [replace(member, needed=why) if member is through else member for member in members]


def route(members: Sequence[GroupMember], confirmed: frozenset[str]) -> SubnetRoute | None:
    """Whether the way out has to be moved, or made sure of by a server that has not yet."""
    ready = [member for member in members if _carries(member)]
    through = routed(members)
    staying = [member for member in ready if state(member.instance) is State.REGISTERED]
    if through is not None and through in (staying or ready):
        name = through.instance.name
        return None if name in confirmed else SubnetRoute(name=name)
    choice = max(staying or ready, key=lambda member: member.instance.created_at_ns, default=None)
    if choice is None:
        return None
    before = through.instance.name if through is not None else ""
    return SubnetRoute(name=choice.instance.name, previous=before)


def _carries(member: GroupMember) -> bool:
    status = member.instance.status
    alive = state(member.instance) in (State.REGISTERED, State.DRAINING) and not member.lost
    return alive and member.reported and status is not None and bool(status.provider_id)


def address(nat: Nat, members: Sequence[GroupMember], taken: frozenset[str]) -> str | None:
    """The fixed address of a subnet: the one it has, else a free one. Empty if none is configured, None if
    all are taken."""
    configured = [one.ipv4 for one in nat.public_addresses]
    if not configured:
        return ""
    own = [member.instance.spec.public_ipv4 for member in members]
    return next((one for one in (*own, *configured) if one in configured and one not in taken), None)


def patience(policy: GroupPolicy, nat: Nat) -> GroupPolicy:
    """A NAT instance that does not come is given up after its own time, if that is shorter."""
    seconds = min(policy.registration_timeout_seconds, nat.replacement_timeout_seconds)
    return replace(policy, registration_timeout_seconds=seconds)


def serving(plan: GroupPlan, subnet: str, instance_type: str, address: str | None) -> None:
    """What is created for the subnet gets what it needs to serve it, or is not created."""
    actions: list[Action] = []
    for action in plan.actions:
        if not isinstance(action, Create):
            actions.append(action)
        elif address is None:
            plan.waiting.append(f"no public address is left for {subnet}")
        else:
            actions.append(Create(serves=subnet, instance_type=instance_type, public_ipv4=address))
    plan.actions = actions


def merged(plans: Mapping[str, GroupPlan]) -> GroupPlan:
    whole = GroupPlan()
    for plan in plans.values():
        whole.actions += plan.actions
        whole.waiting += plan.waiting
        whole.held += plan.held
        whole.held_because = whole.held_because or plan.held_because
        if plan.due_ns is not None:
            whole.look_again(plan.due_ns)
    return whole
