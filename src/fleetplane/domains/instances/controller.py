"""Keeping every group as its configuration says: the hands of `rules`.

Each pass reads what is, asks `rules.decide` what should be done, does it step by step, and
leaves behind why nothing more was done. Every step is recorded before anyone outside is asked
to act on it, and asking again is harmless, so a crash at any point is finished by the next pass.
A plan is carried out only for as long as what it was made from still holds: a freeze, or a
change of the group, ends the pass between two steps.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog

from fleetplane.domains.instances import rules
from fleetplane.domains.instances.groups import Groups, GroupView
from fleetplane.domains.instances.guarded import GuardedProvider
from fleetplane.domains.instances.kinds import GROUP, INSTANCE, TENANT, Instance, InstanceStatus
from fleetplane.domains.instances.kinds import Drain as DrainRecord
from fleetplane.domains.instances.launcher import Launcher
from fleetplane.domains.instances.observations import Observations
from fleetplane.domains.instances.providers.contract import InstanceGone
from fleetplane.domains.instances.registry import Instances, tenant_of
from fleetplane.domains.instances.reports import Reports
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.freeze import FREEZE, frozen
from fleetplane.kernel.reconcile import Reason, Reconciler, Result
from fleetplane.kernel.store import Store

log = structlog.get_logger(__name__)

NS = 1_000_000_000
GROUPS_AT_ONCE = 8
"""A provider that takes its time over one group does not keep the others waiting."""
STEPS_AT_ONCE = 16
"""Of those steps of one pass that do not depend on each other: drains, deletions, purges."""
GROWTH_SECONDS = 10.0
"""After which a pass that is still creating looks again at what it is doing that for."""
CALM_SECONDS = 0.05
"""Changes of instances are gathered for this long before their group is looked at."""
CALM_FACTOR = 20
"""And for this many times as long as deciding took: a busy, large group takes a twentieth of a core."""
DELETE_POLL_SECONDS = 2.0
"""Between looks at an instance that the provider is deleting."""
RETRY_SECONDS = 5.0
"""Until the next try at what failed; what else the pass did stands."""
SPOT_NOTICE_SECONDS = 120.0
"""What a termination notice without a deadline is taken to mean: the shortest notice clouds give."""
RECHECKS_SECONDS = (3.0, 6.0, 12.0, 24.0, 30.0, 30.0, 30.0, 30.0)
"""When to ask the provider about an instance whose agent went away, after that happened."""
REASONS_LIMIT = 32
"""Of one group; a thousand draining instances are one story."""

ErrorSink = Callable[[str, str, str, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the controller works with."""

    store: Store
    instances: Instances
    groups: Groups
    reports: Reports
    provider: GuardedProvider
    observations: Observations
    launcher: Launcher
    clock: Clock
    complain: ErrorSink
    gone: Callable[[Instance], None]
    """Called once nothing of an instance is left."""


class GroupController:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.reconciler = Reconciler(
            "instances/groups", self._pass, clock=parts.clock, store=parts.store, concurrency=GROUPS_AT_ONCE
        )
        self._decided_seconds: dict[str, float] = {}
        """What the last decision about each group took."""
        self._orphans: dict[tuple[str, str], list[str]] = {}
        parts.groups.on_change(self._look_at_many)

    def __repr__(self) -> str:
        return f"<GroupController {self.reconciler!r}>"

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
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.reconciler.run())
            tasks.create_task(self._parts.observations.watch_over(self._owner, self._looked))
            tasks.create_task(self._follow_instances())
            for kind in (GROUP, TENANT, FREEZE):
                tasks.create_task(self._follow(kind))

    def _owner(self) -> tuple[str, str, float]:
        configuration = self._parts.groups.required()
        shard = configuration.shard
        return configuration.cluster.id, shard.id, shard.health_check_interval_seconds

    def _looked(self) -> None:
        self._find_orphans()
        self.look_at_everything()

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
            self.reconciler.forget(key)
            return Result(explanation=tuple(self._strays(tenant, name)))
        facts = self._facts(tenant, name, now_ns)
        plan = rules.decide(facts, members, parts.groups.policy(), now_ns=now_ns)
        self._decided_seconds[key] = parts.clock.monotonic() - began
        code = "FROZEN" if facts.frozen else "WAITING"
        reasons = [Reason(code=code, message=text) for text in plan.waiting]
        due_seconds = [] if plan.due_ns is None else [max(0.0, (plan.due_ns - now_ns) / NS)]
        due_seconds += await _Work(parts, tenant, name, view, facts, reasons).carry_out(plan.actions)
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

    def _facts(self, tenant: str, name: str, now_ns: int) -> rules.GroupFacts:
        return group_facts(self._parts, tenant, name, now_ns)

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


def group_facts(parts: Parts, tenant: str, name: str, now_ns: int) -> rules.GroupFacts:
    view = parts.groups.view(tenant, name)
    freeze = frozen(parts.store.list(FREEZE), f"tenant/{tenant}/group/{name}", now_ns)
    asleep = parts.instances.sleep(tenant).asleep
    return rules.GroupFacts(
        key=name,
        desired=0 if view is None or asleep else view.group.size,
        exists=view is not None,
        infra_hash=view.infra_hash if view is not None else None,
        drain_timeout_seconds=view.group.drain_timeout_seconds if view is not None else None,
        frozen=f"by {freeze.spec.actor}: {freeze.spec.reason}" if freeze is not None else "",
        frozen_until_ns=freeze.spec.expires_at_ns if freeze is not None else None,
    )


class _Work:
    """Carrying out one plan for one group."""

    def __init__(
        self,
        parts: Parts,
        tenant: str,
        group: str,
        view: GroupView | None,
        facts: rules.GroupFacts,
        reasons: list[Reason],
    ) -> None:
        self._parts = parts
        self._tenant = tenant
        self._group = group
        self._view = view
        self._facts = facts
        self._reasons = reasons
        self._again: list[float] = []
        self._growing = True

    async def carry_out(self, actions: list[rules.Action]) -> list[float]:
        """Do what was planned; returns when to come back for what could not be finished."""
        growth = [action for action in actions if isinstance(action, rules.Create | rules.Provision)]
        turns = asyncio.Semaphore(STEPS_AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            for action in actions:
                if not isinstance(action, rules.Create | rules.Provision):
                    tasks.create_task(self._in_turn(action, turns))
        clock = self._parts.clock
        end = clock.monotonic() + GROWTH_SECONDS
        for action in growth:
            if self._growing and clock.monotonic() >= end:
                self._again.append(0.0)
                break
            if self._growing and self._holds():
                await self._try(action)
        return self._again

    async def _in_turn(self, action: rules.Action, turns: asyncio.Semaphore) -> None:
        async with turns:
            if self._holds():
                await self._try(action)

    def _holds(self) -> bool:
        """Whether what the plan was made from is still so; if not, another pass has to see to it."""
        now_ns = self._parts.clock.now_ns()
        if group_facts(self._parts, self._tenant, self._group, now_ns) == self._facts:
            return True
        self._again.append(0.0)
        return False

    async def _try(self, action: rules.Action) -> None:
        try:
            await self._do(action)
        except FleetplaneError as error:
            if isinstance(action, rules.Create | rules.Provision):
                self._growing = False  # the next would fail in the same way
            subject = "" if isinstance(action, rules.Create) else action.name
            self._reasons.append(Reason(code=error.reason, message=error.message, subject=subject))
            self._parts.complain(self._tenant, self._group, subject, error.message)
            self._again.append(RETRY_SECONDS)

    async def _do(self, action: rules.Action) -> None:
        match action:
            case rules.Create():
                await self._create()
            case rules.Provision(name=instance):
                await self._parts.launcher.provision(self._tenant, instance)
            case rules.Drain():
                await self._drain(action)
            case rules.Delete():
                await self._delete(action)
            case rules.Purge(name=instance):
                await self._parts.instances.purge(self._tenant, instance)
                self._parts.observations.forget(instance)
                self._parts.reports.forget(instance)

    async def _create(self) -> None:
        wait = self._parts.launcher.wait_seconds()
        if wait > 0:
            self._reasons.append(Reason(code="RATE_LIMITED", message=f"next creation in {wait:.1f} s"))
            self._again.append(wait)
            self._growing = False
            return
        assert self._view is not None
        await self._parts.launcher.create(self._view)

    # The steps that go.

    async def _drain(self, action: rules.Drain) -> None:
        record = DrainRecord(
            reason=action.cause,
            started_at_ns=self._parts.clock.now_ns(),
            delete_at_ns=action.delete_at_ns,
            replace=action.replace,
        )
        seen = self._parts.instances.find(self._tenant, action.name)

        def begin(status: InstanceStatus, _now_ns: int) -> InstanceStatus:
            came = seen is None or seen.status is None or seen.status.registered_at_ns is None
            if status.drain is not None or (came and status.registered_at_ns is not None):
                return status  # its agent has come since this was decided: it is to be asked first
            return msgspec.structs.replace(status, drain=record)

        await self._parts.instances.step(self._tenant, action.name, begin, action="drain")
        log.info("instances.drain", tenant=self._tenant, instance=action.name, reason=action.cause)

    async def _delete(self, action: rules.Delete) -> None:
        parts = self._parts
        before = parts.instances.find(self._tenant, action.name)
        asked = before is not None and rules.state(before) is rules.State.DELETING
        instance = await parts.instances.step(
            self._tenant, action.name, _deleting(action.cause), action="deleting"
        )
        if instance is None or instance.status is None or instance.status.deleting_at_ns is None:
            # Gone meanwhile, or not to go any more: what else was planned counted on it.
            self._growing = False
            self._again.append(0.0)
            return
        if not await self._removed(instance, asked=asked):
            self._again.append(DELETE_POLL_SECONDS)
            return
        await parts.instances.step(self._tenant, action.name, _deleted, action="deleted")
        parts.gone(instance)
        log.info("instances.deleted", tenant=self._tenant, instance=action.name, reason=action.cause)

    async def _removed(self, instance: Instance, *, asked: bool) -> bool:
        """Have the provider remove it; whether it is gone. One that is on its way out is not asked again."""
        parts = self._parts
        assert instance.status is not None
        if asked and (word := await parts.observations.look_at(instance)) in ("deleted", "deleting"):
            return word == "deleted"
        try:
            await parts.provider.delete_instance(instance.name, instance.status.provider_id)
            return await parts.observations.look_at(instance) == "deleted"
        except InstanceGone:
            return True


def _shortened(reasons: list[Reason]) -> tuple[Reason, ...]:
    if len(reasons) <= REASONS_LIMIT:
        return tuple(reasons)
    rest = Counter(reason.code for reason in reasons[REASONS_LIMIT:])
    more = ", ".join(f"{count} {code}" for code, count in sorted(rest.items()))
    return (*reasons[:REASONS_LIMIT], Reason(code="MORE", message=f"and as many more: {more}"))


def _deleting(cause: rules.Cause) -> Callable[[InstanceStatus, int], InstanceStatus]:
    def step(status: InstanceStatus, now_ns: int) -> InstanceStatus:
        if status.deleting_at_ns is not None:
            return status
        if cause is rules.Cause.NEVER_REGISTERED and status.registered_at_ns is not None:
            return status  # it came in the last moment
        drain = status.drain or DrainRecord(
            reason=cause, started_at_ns=now_ns, delete_at_ns=now_ns, replace=False
        )
        return msgspec.structs.replace(status, deleting_at_ns=now_ns, drain=drain)

    return step


def _deleted(status: InstanceStatus, now_ns: int) -> InstanceStatus:
    return (
        status if status.deleted_at_ns is not None else msgspec.structs.replace(status, deleted_at_ns=now_ns)
    )
