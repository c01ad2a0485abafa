"""Carrying out a plan for one group, step by step: the hands of `rules`.

Every step is recorded before anyone outside is asked to act on it, and asking again is harmless, so a
crash at any point is finished by the next pass. A plan is carried out only for as long as what it was
made from still holds: a freeze, or a change of the group, ends the pass between two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog

from fleetplane.domains.instances.controllers.balancers import Balancers
from fleetplane.domains.instances.controllers.launcher import InstanceLauncher
from fleetplane.domains.instances.controllers.nat import NatKeeper, NatNotReady
from fleetplane.domains.instances.controllers.observations import MachineObservations
from fleetplane.domains.instances.controllers.provider_guard import GuardedProvider
from fleetplane.domains.instances.kinds import DrainState as DrainRecord
from fleetplane.domains.instances.kinds import Instance, InstanceStatus
from fleetplane.domains.instances.providers.contract import InstanceGone
from fleetplane.domains.instances.records.groups import Groups, GroupView
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.records.reports import InstanceReports
from fleetplane.domains.instances.rules import plans
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.freeze import FREEZE, frozen
from fleetplane.kernel.reconcile import Reason
from fleetplane.kernel.store import Store

log = structlog.get_logger(__name__)

STEPS_AT_ONCE = 16
"""Of those steps of one pass that do not depend on each other: drains, deletions, purges."""
GROWTH_SECONDS = 10.0
"""After which a pass that is still creating looks again at what it is doing that for."""
DELETE_POLL_SECONDS = 2.0
"""Between looks at an instance that the provider is deleting, or that a load balancer is letting go of."""
RETRY_SECONDS = 5.0
"""Until the next try at what failed; what else the pass did stands."""

ErrorSink = Callable[[str, str, str, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupParts:
    """What groups are kept with."""

    store: Store
    instances: Instances
    groups: Groups
    reports: InstanceReports
    provider: GuardedProvider
    observations: MachineObservations
    launcher: InstanceLauncher
    balancers: Balancers
    nat: NatKeeper
    clock: Clock
    complain: ErrorSink
    gone: Callable[[Instance], None]
    """Called once nothing of an instance is left."""


def group_facts(parts: GroupParts, tenant: str, name: str, now_ns: int) -> plans.GroupFacts:
    view = parts.groups.view(tenant, name)
    freeze = frozen(parts.store.list(FREEZE), f"tenant/{tenant}/group/{name}", now_ns)
    asleep = parts.instances.sleep(tenant).asleep
    rolling = parts.groups.rolling(view) if view is not None else None
    return plans.GroupFacts(
        key=name,
        desired=0 if view is None or asleep else view.group.size,
        exists=view is not None,
        infra_hash=view.infra_hash if view is not None and rolling is None else None,
        rolling=rolling,
        drain_timeout_seconds=view.group.drain_timeout_seconds if view is not None else None,
        frozen=f"by {freeze.spec.actor}: {freeze.spec.reason}" if freeze is not None else "",
        frozen_until_ns=freeze.spec.expires_at_ns if freeze is not None else None,
    )


class PlanExecution:
    """Carrying out one plan for one group."""

    def __init__(
        self,
        parts: GroupParts,
        tenant: str,
        group: str,
        view: GroupView | None,
        facts: plans.GroupFacts,
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

    async def carry_out(self, actions: list[plans.Action]) -> list[float]:
        """Do what was planned; returns when to come back for what could not be finished."""
        growth = [action for action in actions if isinstance(action, plans.Create | plans.Provision)]
        turns = asyncio.Semaphore(STEPS_AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            for action in actions:
                if not isinstance(action, plans.Create | plans.Provision):
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

    async def _in_turn(self, action: plans.Action, turns: asyncio.Semaphore) -> None:
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

    async def _try(self, action: plans.Action) -> None:
        try:
            await self._do(action)
        except FleetplaneError as error:
            if isinstance(action, plans.Create | plans.Provision):
                self._growing = False  # the next would fail in the same way
            subject = "" if isinstance(action, plans.Create) else action.name
            if subject:
                await self._parts.instances.note_error(self._tenant, subject, error.message)
            self._reasons.append(Reason(code=error.reason, message=error.message, subject=subject))
            if not isinstance(error, NatNotReady):  # that is on its way, and no trouble
                self._parts.complain(self._tenant, self._group, subject, error.message)
            self._again.append(RETRY_SECONDS)

    async def _do(self, action: plans.Action) -> None:
        match action:
            case plans.Create():
                await self._create(action)
            case plans.Provision(name=instance):
                await self._parts.launcher.provision(self._tenant, instance)
            case plans.DrainInstance():
                await self._drain(action)
            case plans.DeleteInstance():
                await self._delete(action)
            case plans.Purge(name=instance):
                await self._parts.instances.purge(self._tenant, instance)
                self._parts.observations.forget(instance)
                self._parts.reports.forget(instance)
                self._parts.nat.forget(instance)
            case plans.MarkUnhealthy():
                await self._mark(action)
            case plans.Attach(name=instance, balancer=balancer):
                await self._parts.balancers.attach(self._tenant, instance, balancer)
            case plans.SubnetRoute(name=instance, previous=previous):
                await self._parts.nat.route(self._tenant, instance, previous)
            case plans.Detach(name=instance, balancer=key):
                if not await self._parts.balancers.detach(self._tenant, instance, key):
                    self._let_go(instance, key)

    def _let_go(self, instance: str, balancer: str) -> None:
        text = f"load balancer {balancer} still ends its connections"
        self._reasons.append(Reason(code="WAITING", message=text, subject=instance))
        self._again.append(DELETE_POLL_SECONDS)

    async def _mark(self, action: plans.MarkUnhealthy) -> None:
        def marked(status: InstanceStatus, _now_ns: int) -> InstanceStatus:
            return msgspec.structs.replace(status, unhealthy_since_ns=action.unhealthy_since_ns)

        await self._parts.instances.step(self._tenant, action.name, marked, action="health")

    async def _create(self, action: plans.Create) -> None:
        wait = self._parts.launcher.wait_seconds()
        if wait > 0:
            self._reasons.append(Reason(code="RATE_LIMITED", message=f"next creation in {wait:.1f} s"))
            self._again.append(wait)
            self._growing = False
            return
        assert self._view is not None
        view = self._parts.groups.view_for(self._view, action.place)
        if action.instance_type:
            view = self._parts.groups.chosen(view, instance_type=action.instance_type)
        await self._parts.launcher.create(
            view,
            serves=action.serves,
            public_ipv4=action.public_ipv4,
            place=action.place,
            replaces=action.replaces,
        )

    # The steps that go.

    async def _drain(self, action: plans.DrainInstance) -> None:
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
            since_ns = status.unhealthy_since_ns or action.unhealthy_since_ns
            return msgspec.structs.replace(status, drain=record, unhealthy_since_ns=since_ns)

        await self._parts.instances.step(self._tenant, action.name, begin, action="drain")
        log.info("instances.drain", tenant=self._tenant, instance=action.name, reason=action.cause)

    async def _delete(self, action: plans.DeleteInstance) -> None:
        parts = self._parts
        before = parts.instances.find(self._tenant, action.name)
        asked = before is not None and plans.state(before) is plans.State.DELETING
        instance = await parts.instances.step(
            self._tenant, action.name, _deleting(action.cause), action="deleting"
        )
        if instance is None or instance.status is None or instance.status.deleting_at_ns is None:
            # Gone meanwhile, or not to go any more: what else was planned counted on it.
            self._growing = False
            self._again.append(0.0)
            return
        if not await self._out_of_balancers(instance):
            return
        await parts.nat.unroute(instance)
        if not await self._removed(instance, asked=asked):
            self._again.append(DELETE_POLL_SECONDS)
            return
        await parts.instances.step(self._tenant, action.name, _deleted, action="deleted")
        parts.gone(instance)
        log.info("instances.deleted", tenant=self._tenant, instance=action.name, reason=action.cause)

    async def _out_of_balancers(self, instance: Instance) -> bool:
        """Nothing is deleted that a load balancer may still send traffic to: a failure here is one there."""
        assert instance.status is not None
        held = False
        for key in instance.status.balancers:
            if not await self._parts.balancers.detach(self._tenant, instance.name, key):
                self._let_go(instance.name, key)
                held = True
        return not held

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


def _deleting(cause: plans.RemovalCause) -> Callable[[InstanceStatus, int], InstanceStatus]:
    def step(status: InstanceStatus, now_ns: int) -> InstanceStatus:
        if status.deleting_at_ns is not None:
            return status
        if cause is plans.RemovalCause.NEVER_REGISTERED and status.registered_at_ns is not None:
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
