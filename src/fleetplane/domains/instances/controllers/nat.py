"""Keeping the way out of every subnet: the hands, and the short memory, of `nat`.

Which NAT instance serves which subnet, since when, and with which address, stands in the instances'
records. What is remembered here is who has asked lately, how long a subnet has been empty, and how loaded a
NAT instance is: a restart forgets that, and nothing goes sooner for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import structlog

from fleetplane.domains.instances.configuration.schema import Nat
from fleetplane.domains.instances.controllers.provider_guard import GuardedProvider
from fleetplane.domains.instances.kinds import Instance, InstanceStatus, tenant_of
from fleetplane.domains.instances.providers.contract import NatRoute, ProviderCapability
from fleetplane.domains.instances.records.groups import Groups, GroupView
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.records.reports import InstanceReports
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.domains.instances.rules import nat
from fleetplane.domains.instances.rules.plans import GroupFacts, GroupMember, GroupPlan
from fleetplane.domains.instances.rules.silence import CrowdSilence
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Unavailable
from fleetplane.kernel.values.times import NS

log = structlog.get_logger(__name__)

SAMPLE_SECONDS = 15.0
"""Between looks at how loaded NAT instances are; their windows are minutes."""
ASKED_SECONDS = 60.0
"""How long a subnet counts as wanted after somebody wanted to make an instance there; they ask every few
seconds."""


class NatNotReady(Unavailable):
    """The instance can be made once its subnet has a way out."""

    reason = "NAT_NOT_READY"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trend:
    last: nat.NatLoad
    pressure: nat.Pressure
    since_ns: int


class NatKeeper:
    def __init__(
        self,
        provider: GuardedProvider,
        instances: Instances,
        groups: Groups,
        reports: InstanceReports,
        clock: Clock,
    ) -> None:
        self._provider = provider
        self._instances = instances
        self._groups = groups
        self._reports = reports
        self._clock = clock
        self._asked: dict[tuple[str, str], int] = {}
        """When somebody last wanted each subnet; as many as the configuration has, as are the following."""
        self._empty_since: dict[tuple[str, str], int] = {}
        self._types: dict[tuple[str, str], str] = {}
        """What a subnet's NAT instance is to become."""
        self._trends: dict[str, _Trend] = {}
        self._confirmed: set[str] = set()
        """Instances whose routes this server has made sure of."""
        self.wake: Callable[[str, str], None] = lambda _tenant, _group: None
        """Called with the NAT group that is wanted."""

    def __repr__(self) -> str:
        return f"<NatKeeper wanted={len(self._asked)} confirmed={len(self._confirmed)}>"

    def of(self, tenant: str) -> Nat | None:
        """The tenant's NAT, if it has one and the provider can do it."""
        found = self._groups.required().nat.get(tenant)
        return found if found is not None and self._can_route() else None

    def _can_route(self) -> bool:
        return ProviderCapability.NAT_ROUTES in self._provider.describe().capabilities

    def problem(self, view: GroupView | None) -> str:
        if view is None or not view.group.is_nat or self.of(view.group.tenant) is not None:
            return ""
        return f"the provider {self._provider.kind!r} has no routes of subnets: nobody needs this group"

    def forget(self, name: str) -> None:
        self._confirmed.discard(name)
        self._trends.pop(name, None)

    # Before an instance is made.

    def require(self, tenant: str, group: str, subnet: str) -> None:
        """Raises unless a new instance in the subnet would have a way out; asks for one to be made."""
        found = self.of(tenant)
        if found is None or not subnet or group == found.group:
            return
        serving = (
            one
            for one in self._instances.of_group(tenant, found.group)
            if one.spec.serves == subnet and one.status is not None
        )
        if any(one.status.routed_at_ns is not None for one in serving if one.status is not None):
            self._asked.pop((tenant, subnet), None)
            return
        self._asked[tenant, subnet] = self._clock.now_ns()
        self.wake(tenant, found.group)
        raise NatNotReady(f"{subnet} has no way out yet: its NAT instance is being made")

    # What a NAT group needs.

    def plan(
        self,
        view: GroupView,
        members: Sequence[GroupMember],
        facts: GroupFacts,
        now_ns: int,
        quiet: Callable[[], CrowdSilence],
    ) -> GroupPlan:
        tenant, found = view.group.tenant, self.of(view.group.tenant)
        if found is None:
            return rules.decide(facts, members, self._groups.policy(), now_ns=now_ns, tenant=quiet)
        dependents = self._dependents(tenant, found.group)
        served = {member.instance.spec.serves for member in members}
        asked = {subnet for owner, subnet in self._asked if owner == tenant}
        plans = {
            subnet: self._subnet(view, found, subnet, members, facts, dependents[subnet], now_ns, quiet)
            for subnet in sorted(served | asked | set(dependents))
        }
        return nat.merged(plans)

    def _dependents(self, tenant: str, group: str) -> Counter[str]:
        gone = rules.State.DELETED
        return Counter(
            one.spec.subnet
            for one in self._instances.all(tenant)
            if one.spec.subnet and one.spec.group != group and rules.state(one) is not gone
        )

    def _subnet(
        self,
        view: GroupView,
        found: Nat,
        subnet: str,
        everyone: Sequence[GroupMember],
        facts: GroupFacts,
        dependents: int,
        now_ns: int,
        quiet: Callable[[], CrowdSilence],
    ) -> GroupPlan:
        members = [member for member in everyone if member.instance.spec.serves == subnet]
        present = [
            member
            for member in members
            if rules.state(member.instance) not in (rules.State.DELETING, rules.State.DELETED)
        ]
        plan = GroupPlan()
        wanted = bool(subnet) and self._wanted(
            view.group.tenant, subnet, dependents, found, present, plan, now_ns
        )
        wanted_type = self._type(view, found, subnet, present, plan, now_ns)
        chosen = self._groups.chosen(view, instance_type=wanted_type)
        own = replace(
            facts, desired=int(wanted), exists=True, infra_hash=chosen.infra_hash, drain_timeout_seconds=0.0
        )
        decided = rules.decide(
            own,
            nat.needed(members, subnet, wanted=wanted),
            nat.patience(self._groups.policy(), found),
            now_ns=now_ns,
            tenant=quiet,
        )
        taken = frozenset(
            member.instance.spec.public_ipv4
            for member in everyone
            if member.instance.spec.serves != subnet
            and rules.state(member.instance) is not rules.State.DELETED
        )
        nat.serving(decided, subnet, wanted_type, nat.address(found, present, taken))
        if (
            wanted
            and not facts.frozen
            and (step := nat.route(present, frozenset(self._confirmed))) is not None
        ):
            decided.actions.append(step)
        return nat.merged({"": plan, subnet: decided})

    def _wanted(
        self,
        tenant: str,
        subnet: str,
        dependents: int,
        found: Nat,
        present: Sequence[GroupMember],
        plan: GroupPlan,
        now_ns: int,
    ) -> bool:
        key = (tenant, subnet)
        asked_ns = self._asked.get(key)
        if asked_ns is not None and now_ns >= asked_ns + round(ASKED_SECONDS * NS):
            del self._asked[key]
            asked_ns = None
        if dependents or asked_ns is not None:
            self._empty_since.pop(key, None)
            if asked_ns is not None:
                plan.look_again(asked_ns + round(ASKED_SECONDS * NS))
            return True
        if not present:
            self._empty_since.pop(key, None)
            return False
        end_ns = self._empty_since.setdefault(key, now_ns) + round(
            found.last_instance_grace_period_seconds * NS
        )
        if now_ns >= end_ns:
            return False
        plan.look_again(end_ns)
        plan.waiting.append(
            f"nobody is left in {subnet}: its NAT instance goes in {(end_ns - now_ns) / NS:.0f} s"
        )
        return True

    # How large it should be.

    def _type(
        self,
        view: GroupView,
        found: Nat,
        subnet: str,
        present: Sequence[GroupMember],
        plan: GroupPlan,
        now_ns: int,
    ) -> str:
        key = (view.group.tenant, subnet)
        current = nat.current_type(found, present, view.group.instance_type)
        if not present or self._types.get(key) == current:
            self._types.pop(key, None)
        if key in self._types:
            return self._types[key]
        if (
            len(found.instance_type_ladder) > 1
            and len(present) == 1
            and rules.state(present[0].instance) is (rules.State.REGISTERED)
        ):
            plan.look_again(now_ns + round(SAMPLE_SECONDS * NS))
            direction = self._pressed(found, present[0], now_ns)
            following = nat.rung(found, current, direction)
            if following != current:
                log.info("instances.nat_resized", subnet=subnet, before=current, after=following)
                self._types[key] = following
                return following
        return current

    def _pressed(self, found: Nat, member: GroupMember, now_ns: int) -> nat.Pressure:
        """In which direction it has been pressed for the whole of the window, and not too soon again."""
        name = member.instance.name
        heard = self._reports.last(name)
        seen = nat.load(heard.report, heard.at_ns) if heard is not None else None
        before = self._trends.get(name)
        if seen is None:
            self._trends.pop(name, None)
            return nat.Pressure.NONE
        if before is None:
            self._trends[name] = _Trend(last=seen, pressure=nat.Pressure.NONE, since_ns=seen.at_ns)
            return nat.Pressure.NONE
        if seen.at_ns > before.last.at_ns:
            now = nat.pressure(before.last, seen, found)
            since_ns = before.since_ns if now is before.pressure else seen.at_ns
            before = self._trends[name] = _Trend(last=seen, pressure=now, since_ns=since_ns)
        windows = {
            nat.Pressure.UP: found.scale_up_window_seconds,
            nat.Pressure.DOWN: found.scale_down_window_seconds,
            nat.Pressure.NONE: float("inf"),
        }
        rested = now_ns >= member.instance.created_at_ns + round(found.cooldown_seconds * NS)
        lasted = (before.last.at_ns - before.since_ns) / NS >= windows[before.pressure]
        return before.pressure if rested and lasted else nat.Pressure.NONE

    # Routes.

    async def route(self, tenant: str, name: str, previous: str) -> None:
        instance = self._instances.get(tenant, name)
        found = self._groups.required().nat[tenant]
        before = self._instances.find(tenant, previous) if previous else None
        await self._provider.ensure_nat_route(self._request(instance, found, before))

        def carries(status: InstanceStatus, now_ns: int) -> InstanceStatus:
            return msgspec.structs.replace(status, routed_at_ns=now_ns, last_error="")

        await self._instances.step(tenant, name, carries, action="routed")
        self._confirmed.add(name)
        if before is not None:
            await self._released(before)
        log.info("instances.nat_routed", tenant=tenant, subnet=instance.spec.serves, instance=name)

    async def unroute(self, instance: Instance) -> None:
        """Nothing leads through an instance that goes; if its route is another's by now, it stays."""
        status = instance.status
        if status is None or status.routed_at_ns is None or not self._can_route():
            return
        configured = self._groups.required().nat.get(tenant_of(instance))
        group = instance.spec.group
        # When the document no longer says which, both ways out are looked for.
        both = (Nat(group=group, mode="nat44"), Nat(group=group, mode="nat64"))
        for found in (configured,) if configured is not None else both:
            await self._provider.remove_nat_route(self._request(instance, found, None))
        await self._released(instance)

    async def _released(self, instance: Instance) -> None:
        def free(status: InstanceStatus, _now_ns: int) -> InstanceStatus:
            return msgspec.structs.replace(status, routed_at_ns=None)

        await self._instances.step(tenant_of(instance), instance.name, free, action="unrouted")
        self._confirmed.discard(instance.name)

    def _request(self, instance: Instance, found: Nat, before: Instance | None) -> NatRoute:
        status, spec = instance.status or InstanceStatus(), instance.spec
        fixed = next((one for one in found.public_addresses if one.ipv4 == spec.public_ipv4), None)
        return NatRoute(
            cluster=spec.cluster,
            tenant=tenant_of(instance),
            subnet=spec.serves,
            provider_id=status.provider_id,
            previous_provider_id=before.status.provider_id if before is not None and before.status else "",
            destination=nat.destination(found),
            public_ipv4=spec.public_ipv4,
            allocation_id=fixed.allocation_id if fixed is not None else "",
        )
