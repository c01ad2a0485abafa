"""Draining an instance because somebody asked for it."""

from __future__ import annotations

from fleetplane.domains.instances.kinds import DrainState, Instance, tenant_of
from fleetplane.domains.instances.records.groups import Groups
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument

DRAIN_LIMIT_SECONDS = 7 * 86400.0


def check_not_leaving(instance: Instance) -> None:
    """Refuse what is on its way out already."""
    state = rules.state(instance)
    if state in (rules.State.DELETING, rules.State.DELETED):
        raise FailedPrecondition(f"instance {instance.name} is {state} already")


class RequestedDrains:
    """Begins drains that people ask for; one that is replaced has its successor first."""

    def __init__(self, instances: Instances, groups: Groups, clock: Clock) -> None:
        self._instances = instances
        self._groups = groups
        self._clock = clock

    async def drain(self, instance: Instance, *, seconds: float | None, actor: str) -> Instance:
        """Begin to drain an instance; without `seconds`, it has as long as its group says."""
        check_not_leaving(instance)
        if seconds is not None and not 0 <= seconds <= DRAIN_LIMIT_SECONDS:
            raise InvalidArgument(
                f"timeout_seconds must be between 0 and {DRAIN_LIMIT_SECONDS:g}", field="timeout_seconds"
            )
        given = self._usual_seconds(instance) if seconds is None else seconds
        now_ns = self._clock.now_ns()
        drain = DrainState(
            reason=rules.RemovalCause.REQUESTED,
            started_at_ns=now_ns,
            delete_at_ns=now_ns + round(given * 1e9),
            replace=not instance.spec.on_demand,
        )
        done = await self._instances.drain(
            tenant_of(instance), instance.name, drain, actor=actor, check=check_not_leaving
        )
        return done or instance

    def _usual_seconds(self, instance: Instance) -> float:
        view = self._groups.view(tenant_of(instance), instance.spec.group)
        own = view.group.drain_timeout_seconds if view is not None else None
        return self._groups.policy().drain_timeout_seconds if own is None else own
