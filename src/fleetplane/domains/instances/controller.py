"""Keeping every group as its configuration says.

Each pass reads what is, asks `rules.decide` what should be done, has `work` do it step by step, and
leaves behind why nothing more was done.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import structlog

from fleetplane.domains.instances import balancing, rules, silence
from fleetplane.domains.instances.groups import GroupView
from fleetplane.domains.instances.kinds import GROUP, INSTANCE, TENANT, Instance
from fleetplane.domains.instances.registry import tenant_of
from fleetplane.domains.instances.work import Parts, Work, group_facts
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.freeze import FREEZE
from fleetplane.kernel.reconcile import Reason, Reconciler, Result

log = structlog.get_logger(__name__)

NS = 1_000_000_000
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
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.reconciler = Reconciler(
            "instances/groups", self._pass, clock=parts.clock, store=parts.store, concurrency=GROUPS_AT_ONCE
        )
        self._decided_seconds: dict[str, float] = {}
        """What the last decision about each group took."""
        self._orphans: dict[tuple[str, str], list[str]] = {}
        self._held: dict[str, int] = {}
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
        self._look_at_many(self._parts.groups.views().keys() | self._parts.instances.groups())

    def _look_at_many(self, groups: set[tuple[str, str]]) -> None:
        for tenant, group in groups:
            self.look_at(tenant, group)

    async def run(self) -> None:
        """Until cancelled."""
        self.look_at_everything()
        unsubscribe = self._parts.groups.on_change(self._look_at_many)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.reconciler.run())
                tasks.create_task(self._parts.observations.watch_over(self._owner, self._looked))
                tasks.create_task(self._follow_instances())
                for kind in (GROUP, TENANT, FREEZE):
                    tasks.create_task(self._follow(kind))
        finally:
            unsubscribe()

    def _owner(self) -> tuple[str, str, float]:
        configuration = self._parts.groups.required()
        shard = configuration.shard
        return configuration.cluster.id, shard.id, shard.health_check_interval_seconds

    async def _looked(self) -> None:
        self._find_orphans()
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
        async for batch in self._parts.store.watch(INSTANCE):
            for event in batch.events:
                key = f"{tenant_of(event.resource)}/{event.resource.spec.group}"
                calm = max(CALM_SECONDS, CALM_FACTOR * self._decided_seconds.get(key, 0.0))
                self.reconciler.enqueue(key, after_seconds=calm)
                nat = self._parts.nat.of(tenant_of(event.resource))
                if nat is not None and nat.group != event.resource.spec.group:
                    # Who needs a way out has changed.
                    self.reconciler.enqueue(
                        f"{tenant_of(event.resource)}/{nat.group}", after_seconds=max(calm, NAT_CALM_SECONDS)
                    )

    async def _follow(self, kind: object) -> None:
        async for _batch in self._parts.store.watch(kind):  # type: ignore[arg-type]
            self.look_at_everything()

    # A pass.

    async def _pass(self, key: str) -> Result:
        tenant, _, name = key.partition("/")
        parts = self._parts
        now_ns, began = parts.clock.now_ns(), parts.clock.monotonic()
        await parts.instances.wake_if_due(tenant, now_ns)
        if unresolved := parts.groups.unresolved(tenant, name):
            return Result(explanation=(Reason(code="UNRESOLVED", message=unresolved),))
        view = parts.groups.view(tenant, name)
        members = [self._member(instance, now_ns) for instance in parts.instances.of_group(tenant, name)]
        if view is None and not members:
            self._decided_seconds.pop(key, None)
            self._held.pop(key, None)
            self.reconciler.forget(key)
            return Result(explanation=tuple(self._strays(tenant, name)))
        facts = group_facts(parts, tenant, name, now_ns)
        plan = self._decide(view, members, facts, tenant, now_ns)
        code = "FROZEN" if facts.frozen else "WAITING"
        reasons = [Reason(code=code, message=text) for text in plan.waiting]
        if not facts.frozen:
            self._balance(view, members, plan, reasons)
        self._decided_seconds[key] = parts.clock.monotonic() - began
        self._note_held(tenant, name, plan)
        due_seconds = [] if plan.due_ns is None else [max(0.0, (plan.due_ns - now_ns) / NS)]
        due_seconds += await Work(parts, tenant, name, view, facts, reasons).carry_out(plan.actions)
        sleep = parts.instances.sleep(tenant)
        if sleep.asleep:
            reasons.append(Reason(code="ASLEEP", message=f"tenant {tenant} sleeps: no instance is wanted"))
            if sleep.wake_at_ns is not None:
                due_seconds.append(max(0.0, (sleep.wake_at_ns - now_ns) / NS))
        reasons += self._strays(tenant, name)
        return Result(explanation=_shortened(reasons), requeue_after_seconds=min(due_seconds, default=None))

    def _strays(self, tenant: str, name: str) -> list[Reason]:
        return [
            Reason(code="ORPHAN", message="exists at the provider and in no record", subject=orphan)
            for orphan in self._orphans.get((tenant, name), ())
        ]

    def _balance(
        self, view: GroupView | None, members: Sequence[rules.Member], plan: rules.Plan, reasons: list[Reason]
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
        members: Sequence[rules.Member],
        facts: rules.GroupFacts,
        tenant: str,
        now_ns: int,
    ) -> rules.Plan:
        def quiet() -> silence.Silence:
            return self._quiet(tenant, now_ns)

        if view is not None and view.group.is_nat:
            return self._parts.nat.plan(view, members, facts, now_ns, quiet)
        return rules.decide(facts, members, self._parts.groups.policy(), now_ns=now_ns, tenant=quiet)

    def _quiet(self, tenant: str, now_ns: int) -> silence.Silence:
        members = (self._member(instance, now_ns) for instance in self._parts.instances.all(tenant))
        return silence.among(members, self._parts.groups.policy(), now_ns)

    def _note_held(self, tenant: str, name: str, plan: rules.Plan) -> None:
        """Whoever is in charge learns of the brake once, when it is pulled."""
        key = f"{tenant}/{name}"
        if plan.held and key not in self._held:
            text = next(text for text in plan.waiting if "fell silent" in text)
            log.warning("instances.silence_held", tenant=tenant, group=name, held=len(plan.held), why=text)
            self._parts.complain(tenant, name, "", text)
        if plan.held:
            self._held[key] = len(plan.held)
        else:
            self._held.pop(key, None)

    def _member(self, instance: Instance, now_ns: int) -> rules.Member:
        parts = self._parts
        registered = instance.status.registered_at_ns if instance.status is not None else None
        heard = parts.reports.last(instance.name)
        deadline: int | None = None
        if heard is not None and heard.report.termination_action:
            deadline = heard.report.termination_deadline_ns or now_ns + round(SPOT_NOTICE_SECONDS * NS)
        return rules.Member(
            instance=instance,
            heard_at_ns=parts.reports.heard_at_ns(instance.name, registered),
            reported=heard is not None,
            lost=parts.observations.lost(instance),
            alive=parts.observations.alive(instance),
            spot_deadline_ns=deadline,
        )

    # Suspicion.

    async def recheck(self, instance: Instance) -> None:
        """An agent went away: ask the provider about its instance until it is back or all is told."""
        name, tenant = instance.name, tenant_of(instance)
        heard = self._parts.reports.last(name)
        for seconds in RECHECKS_SECONDS:
            jitter = 0.75 + self._parts.clock.random() / 2
            await self._parts.clock.sleep(seconds * jitter)
            current = self._parts.instances.find(tenant, name)
            if current is None or self._parts.reports.last(name) is not heard:
                return
            try:
                await self._parts.observations.look_at(current)
            except FleetplaneError:
                continue  # the provider does not answer either; ask again
            if self._parts.observations.lost(current):
                self.look_at(tenant, current.spec.group)
                return


def _shortened(reasons: list[Reason]) -> tuple[Reason, ...]:
    if len(reasons) <= REASONS_LIMIT:
        return tuple(reasons)
    rest = Counter(reason.code for reason in reasons[REASONS_LIMIT:])
    more = ", ".join(f"{count} {code}" for code, count in sorted(rest.items()))
    return (*reasons[:REASONS_LIMIT], Reason(code="MORE", message=f"and as many more: {more}"))
