"""Tenants that sleep: all their groups are kept empty until they wake.

A tenant with an instance that someone made on demand is busy and stays awake: that instance is
in use, and nobody would make it again. Who looks at whether it is time to wake is the controller.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fleetplane.domains.instances.kinds import INSTANCE, TENANT, TenantSleep, tenant_scope
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.store import Draft, Store


class SleepResult(StrEnum):
    SLEPT = "slept"
    ALREADY_ASLEEP = "already-asleep"
    BUSY = "busy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slept:
    result: SleepResult
    wake_at_ns: int | None


def asleep(sleep: TenantSleep, now_ns: int) -> bool:
    """Whether it still sleeps; once its time has come it is awake, even before that was written."""
    return sleep.asleep and (sleep.wake_at_ns is None or now_ns < sleep.wake_at_ns)


class Tenants:
    def __init__(self, store: Store) -> None:
        self._store = store

    def get(self, tenant: str) -> TenantSleep:
        found = self._store.get(TENANT, tenant_scope(tenant), tenant)
        return found.spec if found is not None else TenantSleep()

    async def sleep(self, tenant: str, wake_at_ns: int | None, *, actor: str) -> Slept:
        """Let a tenant sleep, unless it is busy. One that sleeps already gets the new time to wake."""
        scope = tenant_scope(tenant)

        def change(draft: Draft) -> Slept:
            if wake_at_ns is not None and wake_at_ns <= draft.now_ns:
                raise InvalidArgument("wake_at is not in the future", field="wake_at")
            found = draft.get(TENANT, scope, tenant)
            before = found.spec if found is not None else TenantSleep()
            if asleep(before, draft.now_ns):
                until_ns = before.wake_at_ns if wake_at_ns is None else wake_at_ns
                draft.put(TENANT, scope, tenant, spec=TenantSleep(asleep=True, wake_at_ns=until_ns))
                return Slept(result=SleepResult.ALREADY_ASLEEP, wake_at_ns=until_ns)
            if _busy(draft, scope):
                return Slept(result=SleepResult.BUSY, wake_at_ns=None)
            draft.put(TENANT, scope, tenant, spec=TenantSleep(asleep=True, wake_at_ns=wake_at_ns))
            return Slept(result=SleepResult.SLEPT, wake_at_ns=wake_at_ns)

        done = await self._store.transact(
            change, actor=actor, action="instances.sleep", touches=[TENANT.key(scope, tenant)]
        )
        return done.value

    async def wake(self, tenant: str, *, actor: str) -> bool:
        """Wake a tenant; whether it slept."""
        scope = tenant_scope(tenant)

        def change(draft: Draft) -> bool:
            found = draft.get(TENANT, scope, tenant)
            if found is None or not found.spec.asleep:
                return False
            draft.put(TENANT, scope, tenant, spec=TenantSleep())
            return asleep(found.spec, draft.now_ns)

        done = await self._store.transact(
            change, actor=actor, action="instances.wake", touches=[TENANT.key(scope, tenant)]
        )
        return done.value


def _busy(draft: Draft, scope: str) -> bool:
    gone = (rules.State.DELETING, rules.State.DELETED)
    return any(
        instance.spec.on_demand and rules.state(instance) not in gone
        for instance in draft.list(INSTANCE, scope)
    )
