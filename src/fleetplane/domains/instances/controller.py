"""Keeping every group as its configuration says: the hands of `rules`.

Each pass reads what is, asks `rules.decide` what should be done, does it step by step, and
leaves behind why nothing more was done. Every step is recorded before anyone outside is asked
to act on it, and asking again is harmless, so a crash at any point is finished by the next pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog

from fleetplane.domains.instances import rules
from fleetplane.domains.instances.groups import Groups, GroupView
from fleetplane.domains.instances.kinds import (
    GROUP,
    INSTANCE,
    TENANT,
    Instance,
    InstanceStatus,
    TenantSleep,
)
from fleetplane.domains.instances.kinds import Drain as DrainRecord
from fleetplane.domains.instances.launcher import Launcher
from fleetplane.domains.instances.observations import Observations
from fleetplane.domains.instances.providers.contract import InstanceGone, Provider
from fleetplane.domains.instances.registry import SERVER, Instances, tenant_of
from fleetplane.domains.instances.reports import Reports
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.freeze import FREEZE, frozen
from fleetplane.kernel.reconcile import Reason, Reconciler, Result
from fleetplane.kernel.store import Store

log = structlog.get_logger(__name__)

NS = 1_000_000_000
DELETE_POLL_SECONDS = 2.0
"""Between looks at an instance that the provider is deleting."""
RETRY_SECONDS = 5.0
"""Until the next try at what failed; what else the pass did stands."""
SPOT_NOTICE_SECONDS = 120.0
"""What a termination notice without a deadline is taken to mean: the shortest notice clouds give."""
RECHECKS_SECONDS = (3.0, 6.0, 12.0, 24.0, 30.0, 30.0, 30.0, 30.0)
"""When to ask the provider about an instance whose agent went away, after that happened."""

ErrorSink = Callable[[str, str, str, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the controller works with."""

    store: Store
    instances: Instances
    groups: Groups
    reports: Reports
    provider: Provider
    observations: Observations
    launcher: Launcher
    clock: Clock
    complain: ErrorSink
    gone: Callable[[Instance], None]
    """Called once nothing of an instance is left."""


class GroupController:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.reconciler = Reconciler("instances/groups", self._pass, clock=parts.clock, store=parts.store)
        self._rechecks: dict[str, int] = {}
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
            tasks.create_task(self._parts.observations.watch_over(self._owner, self.look_at_everything))
            tasks.create_task(self._follow_instances())
            for kind in (GROUP, TENANT, FREEZE):
                tasks.create_task(self._follow(kind))

    def _owner(self) -> tuple[str, str, float]:
        configuration = self._parts.groups.required()
        shard = configuration.shard
        return configuration.cluster.id, shard.id, shard.health_check_interval_seconds

    async def _follow_instances(self) -> None:
        async for batch in self._parts.store.watch(INSTANCE):
            for event in batch.events:
                self.look_at(tenant_of(event.resource), event.resource.spec.group)

    async def _follow(self, kind: object) -> None:
        async for _batch in self._parts.store.watch(kind):  # type: ignore[arg-type]
            self.look_at_everything()

    # A pass.

    async def _pass(self, key: str) -> Result:
        tenant, _, name = key.partition("/")
        parts = self._parts
        now_ns = parts.clock.now_ns()
        await self._wake_if_due(tenant, now_ns)
        if unresolved := parts.groups.unresolved(tenant, name):
            return Result(explanation=(Reason(code="UNRESOLVED", message=unresolved),))
        view = parts.groups.view(tenant, name)
        members = [self._member(instance, now_ns) for instance in parts.instances.of_group(tenant, name)]
        if view is None and not members:
            self.reconciler.forget(key)
            return Result()
        plan = rules.decide(
            self._facts(tenant, name, view, now_ns), members, parts.groups.policy(), now_ns=now_ns
        )
        reasons = [Reason(code="WAITING", message=text) for text in plan.waiting]
        due_seconds = [] if plan.due_ns is None else [max(0.0, (plan.due_ns - now_ns) / NS)]
        due_seconds += await self._carry_out(tenant, name, view, plan, reasons)
        sleep = parts.instances.sleep(tenant)
        if sleep.asleep:
            reasons.append(Reason(code="ASLEEP", message=f"tenant {tenant} sleeps: no instance is wanted"))
            if sleep.wake_at_ns is not None:
                due_seconds.append(max(0.0, (sleep.wake_at_ns - now_ns) / NS))
        return Result(explanation=tuple(reasons), requeue_after_seconds=min(due_seconds, default=None))

    async def _wake_if_due(self, tenant: str, now_ns: int) -> None:
        sleep = self._parts.instances.sleep(tenant)
        if sleep.asleep and sleep.wake_at_ns is not None and now_ns >= sleep.wake_at_ns:
            await self._parts.instances.set_sleep(tenant, TenantSleep(), actor=SERVER)

    def _facts(self, tenant: str, name: str, view: GroupView | None, now_ns: int) -> rules.GroupFacts:
        scope = f"tenant/{tenant}/group/{name}"
        freeze = frozen(self._parts.store.list(FREEZE), scope, now_ns)
        asleep = self._parts.instances.sleep(tenant).asleep
        return rules.GroupFacts(
            key=name,
            desired=0 if view is None or asleep else view.group.size,
            exists=view is not None,
            infra_hash=view.infra_hash if view is not None else None,
            drain_timeout_seconds=view.group.drain_timeout_seconds if view is not None else None,
            frozen=f"by {freeze.spec.actor}: {freeze.spec.reason}" if freeze is not None else "",
        )

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
            spot_deadline_ns=deadline,
        )

    async def _carry_out(
        self, tenant: str, name: str, view: GroupView | None, plan: rules.Plan, reasons: list[Reason]
    ) -> list[float]:
        """Do what was planned; returns when to come back for what could not be finished."""
        again: list[float] = []
        growing = True
        for action in plan.actions:
            try:
                match action:
                    case rules.Create() | rules.Provision() if not growing:
                        continue
                    case rules.Create():
                        wait = self._parts.launcher.wait_seconds()
                        if wait > 0:
                            reasons.append(
                                Reason(code="RATE_LIMITED", message=f"next creation in {wait:.1f} s")
                            )
                            again.append(wait)
                            growing = False
                            continue
                        assert view is not None
                        await self._parts.launcher.create(view)
                    case rules.Provision(name=instance):
                        await self._parts.launcher.provision(tenant, instance)
                    case rules.Drain():
                        await self._drain(tenant, action)
                    case rules.Delete():
                        again += await self._delete(tenant, action)
                    case rules.Purge(name=instance):
                        await self._purge(tenant, instance)
            except FleetplaneError as error:
                growing = False
                subject = "" if isinstance(action, rules.Create) else action.name
                reasons.append(Reason(code=error.reason, message=error.message, subject=subject))
                self._parts.complain(tenant, name, subject, error.message)
                again.append(RETRY_SECONDS)
        return again

    # The steps that go.

    async def _drain(self, tenant: str, action: rules.Drain) -> None:
        record = DrainRecord(
            reason=action.cause,
            started_at_ns=self._parts.clock.now_ns(),
            delete_at_ns=action.delete_at_ns,
            replace=action.replace,
        )
        await self._parts.instances.drain(tenant, action.name, record)
        log.info("instances.drain", tenant=tenant, instance=action.name, reason=action.cause)

    async def _delete(self, tenant: str, action: rules.Delete) -> list[float]:
        parts = self._parts
        instance = await parts.instances.step(tenant, action.name, _deleting(action.cause), action="deleting")
        if instance is None:
            return []
        assert instance.status is not None
        try:
            await parts.provider.delete_instance(instance.name, instance.status.provider_id)
            gone = await parts.observations.look_at(instance) == "deleted"
        except InstanceGone:
            gone = True
        if not gone:
            return [DELETE_POLL_SECONDS]
        await parts.instances.step(tenant, action.name, _deleted, action="deleted")
        parts.gone(instance)
        log.info("instances.deleted", tenant=tenant, instance=action.name, reason=action.cause)
        return []

    async def _purge(self, tenant: str, name: str) -> None:
        await self._parts.instances.purge(tenant, name)
        self._parts.observations.forget(name)
        self._parts.reports.forget(name)

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


def _deleting(cause: rules.Cause) -> Callable[[InstanceStatus, int], InstanceStatus]:
    def step(status: InstanceStatus, now_ns: int) -> InstanceStatus:
        if status.deleting_at_ns is not None:
            return status
        drain = status.drain or DrainRecord(
            reason=cause, started_at_ns=now_ns, delete_at_ns=now_ns, replace=False
        )
        return msgspec.structs.replace(status, deleting_at_ns=now_ns, drain=drain)

    return step


def _deleted(status: InstanceStatus, now_ns: int) -> InstanceStatus:
    return (
        status if status.deleted_at_ns is not None else msgspec.structs.replace(status, deleted_at_ns=now_ns)
    )
