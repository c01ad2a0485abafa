"""Keeping every group as its configuration says.

Each pass reads what is, asks `rules.decide` what should be done, has `work` do it step by step, and
leaves behind why nothing more was done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import structlog

from fleetplane.domains.instances.controllers.plan_steps import GroupParts, PlanExecution, group_facts
from fleetplane.domains.instances.kinds import GROUP, INSTANCE, TENANT, Instance, group_scope, tenant_of
from fleetplane.domains.instances.records.groups import GroupView
from fleetplane.domains.instances.rules import balancing, names, quotas, silence
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.fleet.rollouts.records import HOLD
from fleetplane.kernel.access import covers
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.freeze import FREEZE
from fleetplane.kernel.reconcile import PassResult, Reason, Reconciler
from fleetplane.kernel.resources import Kind
from fleetplane.kernel.store import follow
from fleetplane.kernel.values.times import NS
from fleetplane.kernel.watch import Watch

log = structlog.get_logger(__name__)

GROUPS_AT_ONCE = 8
"""A provider that takes its time over one group does not keep the others waiting."""
CALM_SECONDS = 0.05
"""Changes of instances are gathered for this long before their group is looked at."""
CALM_FACTOR = 20
"""And for this many times as long as deciding took: a busy, large group takes a twentieth of a core."""
SPOT_NOTICE_SECONDS = 120.0
"""What a termination notice without a deadline is taken to mean: the shortest notice clouds give."""
RECHECKS_SECONDS = (3.0, 6.0, 12.0, 24.0, 30.0, 30.0, 30.0, 30.0)
"""When to ask the provider about an instance whose agent went away, after that happened."""
NAT_CALM_SECONDS = 1.0
"""Until a NAT group is looked at because an instance of another group came or went."""
CONFIRMATIONS_LIMIT = 64
"""Instances asked about by name after one look because a list lacks them; the next look asks about more."""
REASONS_LIMIT = 32
"""Of one group; a thousand draining instances are one story."""


class GroupController:
    def __init__(self, parts: GroupParts) -> None:
        self._parts = parts
        self.reconciler = Reconciler(
            "instances/groups", self._pass, clock=parts.clock, store=parts.store, concurrency=GROUPS_AT_ONCE
        )
        self._decided_seconds: dict[str, float] = {}
        """What the last decision about each group took."""
        self._orphans: dict[tuple[str, str], list[str]] = {}
        self._held: dict[str, int] = {}
        self._near: set[str] = set()
        """Tenants for which reaching the quota was reported."""
        parts.nat.wake = self.look_at

    def __repr__(self) -> str:
        return f"<GroupController {self.reconciler!r}>"

    @property
    def held(self) -> int:
        """Silent instances that are left alone because too many fell silent at once."""
        return sum(self._held.values())

    # Being told.

    def look_at(self, tenant: str, group: str) -> None:
        self.reconciler.enqueue(f"{tenant}/{group}")

    def look_at_everything(self) -> None:
        self._look_at_many(self._all())

    def _all(self) -> set[tuple[str, str]]:
        return self._parts.groups.views().keys() | self._parts.instances.groups()

    def _look_at_many(self, groups: set[tuple[str, str]]) -> None:
        for tenant, group in groups:
            self.look_at(tenant, group)

    async def run(self) -> None:
        """Until cancelled."""
        self.look_at_everything()
        unsubscribe = self._parts.groups.on_change(self._look_at_many)
        try:
            async with Boundary() as tasks:
                tasks.keep("instances/groups", self.reconciler.run)
                looking = partial(self._parts.observations.watch_over, self._owner, self._looked)
                tasks.keep("instances/observations", looking)
                tasks.keep("instances/follow", self._follow_instances)
                tasks.keep("instances/follow-groups", self._follow_groups)
                for kind in (TENANT, FREEZE, HOLD):
                    tasks.keep(f"instances/{kind.name}", partial(self._follow_scopes, kind))
        finally:
            unsubscribe()

    def _owner(self) -> tuple[str, str, float]:
        configuration = self._parts.groups.required()
        shard = configuration.shard
        return configuration.cluster.id, shard.id, shard.health_check_interval_seconds

    async def _looked(self) -> None:
        self._find_orphans()
        await self._note_names()
        await self._confirm_missing()
        self.look_at_everything()
        await self._parts.balancers.look()

    async def _confirm_missing(self) -> None:
        """Ask by name about instances that were there and that a list lacks.

        A list may lag behind what was made a moment ago, so what is young is not given up for its sake.
        But an instance whose agent has registered was there, and the provider's answer about
        it alone decides: a server that comes back to machines that are gone need not wait.
        """
        parts = self._parts
        doubtful = [
            instance
            for instance in parts.instances.all()
            if rules.state(instance) in (rules.State.REGISTERED, rules.State.DRAINING)
            and parts.observations.doubtful(instance)
        ]
        for instance in doubtful[:CONFIRMATIONS_LIMIT]:
            try:
                await parts.observations.look_at(instance)
            except FleetplaneError as error:
                log.warning("instances.provider_silent", reason=error.reason, error=error.message)
                return

    async def _note_names(self) -> None:
        """Write down host names and addresses that the provider has only told by now."""
        parts = self._parts
        for instance in parts.instances.all():
            seen = parts.observations.seen(instance.name)
            if seen is not None and instance.status is not None and names.lacks(instance.status, seen):
                step = names.step_by_provider(seen)
                await parts.instances.step(tenant_of(instance), instance.name, step, action="named")

    def _find_orphans(self) -> None:
        """Machines under our name that no record knows are somebody's loss: told, never deleted."""
        self._orphans = {}
        for seen in self._parts.observations.all():
            tenant, group = seen.tags.get("tenant", ""), seen.tags.get("group", "")
            if seen.status.unhealthy or self._parts.instances.find(tenant, seen.instance_id) is not None:
                continue
            self._orphans.setdefault((tenant, group), []).append(seen.instance_id)
            text = f"the provider has {seen.provider_id} ({seen.instance_id}), which is in no record"
            log.warning("instances.orphan", tenant=tenant, group=group, provider_id=seen.provider_id)
            self._parts.complain(tenant, group, seen.instance_id, text)

    async def _follow_instances(self) -> None:
        async for batch in follow(self._parts.store, INSTANCE, begin=self._begin):
            for event in batch.events:
                key = f"{tenant_of(event.resource)}/{event.resource.spec.group}"
                calm = max(CALM_SECONDS, CALM_FACTOR * self._decided_seconds.get(key, 0.0))
                self.reconciler.enqueue(key, after_seconds=calm)
                nat = self._parts.nat.of(tenant_of(event.resource))
                if nat is not None and nat.group != event.resource.spec.group:
                    # Who needs a way out has changed.
                    self.reconciler.enqueue(
                        f"{tenant_of(event.resource)}/{nat.group}",
                        after_seconds=max(calm, NAT_CALM_SECONDS),
                    )

    def _begin(self, _watch: Watch) -> None:
        self.look_at_everything()  # whatever happened before we listened

    async def _follow_groups(self) -> None:
        """What an operator set for one group concerns that group, and who leads its tenant out."""
        async for batch in follow(self._parts.store, GROUP, begin=self._begin):
            for event in batch.events:
                tenant, group = tenant_of(event.resource), event.resource.name
                self.look_at(tenant, group)
                nat = self._parts.nat.of(tenant) if self._parts.groups.loaded is not None else None
                if nat is not None and nat.group != group:
                    self.look_at(tenant, nat.group)

    async def _follow_scopes(self, kind: Kind[Any, Any]) -> None:
        """What holds for a scope concerns the groups at and below it."""
        async for batch in follow(self._parts.store, kind, begin=self._begin):
            scopes = {event.resource.scope for event in batch.events}
            self._look_at_many(
                {at for at in self._all() if any(covers(scope, group_scope(*at)) for scope in scopes)}
            )

    # A pass.

    async def _pass(self, key: str) -> PassResult:
        tenant, _, name = key.partition("/")
        parts = self._parts
        now_ns, began = parts.clock.now_ns(), parts.clock.monotonic()
        await parts.instances.wake_if_due(tenant, now_ns)
        if unresolved := parts.groups.unresolved(tenant, name):
            return PassResult(explanation=(Reason(code="UNRESOLVED", message=unresolved),))
        view = parts.groups.view(tenant, name)
        members = [self._member(instance, now_ns) for instance in parts.instances.of_group(tenant, name)]
        if view is None and not members:
            self._decided_seconds.pop(key, None)
            self._held.pop(key, None)
            self.reconciler.forget(key)
            return PassResult(explanation=tuple(self._strays(tenant, name)))
        facts = group_facts(parts, tenant, name, now_ns)
        plan = self._decide(view, members, facts, tenant, now_ns)
        code = "FROZEN" if facts.frozen else "WAITING"
        reasons = [Reason(code=code, message=text) for text in plan.waiting]
        if not facts.frozen:
            self._balance(view, members, plan, reasons)
        self._decided_seconds[key] = parts.clock.monotonic() - began
        self._note_held(tenant, name, plan)
        due_seconds = [] if plan.due_ns is None else [max(0.0, (plan.due_ns - now_ns) / NS)]
        due_seconds += await PlanExecution(parts, tenant, name, view, facts, reasons).carry_out(plan.actions)
        sleep = parts.instances.sleep(tenant)
        if sleep.asleep:
            reasons.append(Reason(code="ASLEEP", message=f"tenant {tenant} sleeps: no instance is wanted"))
            if sleep.wake_at_ns is not None:
                due_seconds.append(max(0.0, (sleep.wake_at_ns - now_ns) / NS))
        if view is not None and facts.rolling is not None and facts.rolling.held != view.infra_hash:
            message = "a newer template waits for its rollout, or is being rolled out"
            reasons.append(Reason(code="TEMPLATE_HELD", message=message))
        reasons += self._strays(tenant, name)
        reasons += self._near_quota(tenant, name)
        reasons += _troubles(members, reasons)
        return PassResult(
            explanation=_shortened(reasons), requeue_after_seconds=min(due_seconds, default=None)
        )

    def _near_quota(self, tenant: str, name: str) -> list[Reason]:
        """Report once that a tenant comes close to its quota."""
        parts = self._parts
        text = quotas.near(tenant, parts.launcher.usage(tenant), parts.groups.quota(tenant))
        if not text:
            self._near.discard(tenant)
            return []
        if tenant not in self._near:
            self._near.add(tenant)
            log.warning("instances.quota_near", tenant=tenant, why=text)
            parts.complain(tenant, name, "", f"{text}; {quotas.WHO_DECIDES}")
        return [Reason(code="QUOTA_NEAR", message=text)]

    def _strays(self, tenant: str, name: str) -> list[Reason]:
        return [
            Reason(code="ORPHAN", message="exists at the provider and in no record", subject=orphan)
            for orphan in self._orphans.get((tenant, name), ())
        ]

    def _balance(
        self,
        view: GroupView | None,
        members: Sequence[rules.GroupMember],
        plan: rules.GroupPlan,
        reasons: list[Reason],
    ) -> None:
        """Add to the plan who goes behind a load balancer and who comes out."""
        balancers = self._parts.balancers
        wanted, problems = balancers.wanted(view)
        reasons += [Reason(code="LOAD_BALANCER", message=text) for text in problems]
        if problem := self._parts.nat.problem(view):
            reasons.append(Reason(code="NAT", message=problem))
        for member in members:
            status = member.instance.status
            if wanted or (status is not None and status.balancers):
                plan.actions += balancing.steps(member, wanted, balancers.missing(member.instance))

    def _decide(
        self,
        view: GroupView | None,
        members: Sequence[rules.GroupMember],
        facts: rules.GroupFacts,
        tenant: str,
        now_ns: int,
    ) -> rules.GroupPlan:
        def quiet() -> silence.CrowdSilence:
            return self._quiet(tenant, now_ns)

        if view is not None and view.group.is_nat:
            return self._parts.nat.plan(view, members, facts, now_ns, quiet)
        return rules.decide(facts, members, self._parts.groups.policy(), now_ns=now_ns, tenant=quiet)

    def _quiet(self, tenant: str, now_ns: int) -> silence.CrowdSilence:
        members = (self._member(instance, now_ns) for instance in self._parts.instances.all(tenant))
        return silence.among(members, self._parts.groups.policy(), now_ns)

    def _note_held(self, tenant: str, name: str, plan: rules.GroupPlan) -> None:
        """Report once that the brake holds replacements back."""
        key = f"{tenant}/{name}"
        if plan.held and key not in self._held:
            text = plan.held_because
            log.warning("instances.silence_held", tenant=tenant, group=name, held=len(plan.held), why=text)
            self._parts.complain(tenant, name, "", text)
        if plan.held:
            self._held[key] = len(plan.held)
        else:
            self._held.pop(key, None)

    def _member(self, instance: Instance, now_ns: int) -> rules.GroupMember:
        parts = self._parts
        registered = instance.status.registered_at_ns if instance.status is not None else None
        heard = parts.reports.last(instance.name)
        deadline: int | None = None
        if heard is not None and heard.report.termination_action:
            deadline = heard.report.termination_deadline_ns or now_ns + round(SPOT_NOTICE_SECONDS * NS)
        return rules.GroupMember(
            instance=instance,
            heard_at_ns=parts.reports.heard_at_ns(instance.name, registered),
            reported=heard is not None,
            lost=parts.observations.lost(instance),
            alive=parts.observations.alive(instance),
            spot_deadline_ns=deadline,
        )

    # Suspicion.

    async def recheck(self, instance: Instance) -> None:
        """Ask the provider a few times about the instance of an agent that disconnected, until it is back."""
        name, tenant = instance.name, tenant_of(instance)
        heard_at_ns = self._heard_at_ns(name)
        for seconds in RECHECKS_SECONDS:
            jitter = 0.75 + self._parts.clock.random() / 2
            await self._parts.clock.sleep(seconds * jitter)
            current = self._parts.instances.find(tenant, name)
            if current is None or self._heard_at_ns(name) != heard_at_ns:
                return
            try:
                await self._parts.observations.look_at(current)
            except FleetplaneError:
                continue  # the provider does not answer either; ask again
            if self._parts.observations.lost(current):
                self.look_at(tenant, current.spec.group)
                return

    def _heard_at_ns(self, name: str) -> int | None:
        heard = self._parts.reports.last(name)
        return heard.at_ns if heard is not None else None


def _troubles(members: Sequence[rules.GroupMember], told: Sequence[Reason]) -> list[Reason]:
    """What stands in the records of instances as gone wrong, unless this pass has said it already."""
    known = {(reason.subject, reason.message) for reason in told}
    found = [
        Reason(code="INSTANCE_ERROR", message=status.last_error, subject=member.instance.name)
        for member in members
        if (status := member.instance.status) is not None
        and status.last_error
        and rules.state(member.instance) is not rules.State.DELETED
    ]
    return [reason for reason in found if (reason.subject, reason.message) not in known]


def _shortened(reasons: list[Reason]) -> tuple[Reason, ...]:
    if len(reasons) <= REASONS_LIMIT:
        return tuple(reasons)
    rest = Counter(reason.code for reason in reasons[REASONS_LIMIT:])
    more = ", ".join(f"{count} {code}" for code, count in sorted(rest.items()))
    return (*reasons[:REASONS_LIMIT], Reason(code="MORE", message=f"and as many more: {more}"))
