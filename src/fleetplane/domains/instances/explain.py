"""Why a group does not have its instances, and why an instance is not there or not healthy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from fleetplane.domains.instances.grpc.admin import freeze_scope
from fleetplane.domains.instances.kinds import Instance, tenant_of
from fleetplane.domains.instances.records.groups import Groups
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.rest.views import Health
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.fleet.explain import from_pass, from_record, missing, placed
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.reconcile import Explanations, Reason
from fleetplane.kernel.reconcile.explanation import Finding


def _tenant(within: str) -> str:
    """The only tenant in which to look; empty for any."""
    parts = within.split("/")
    return parts[1] if parts[0] == "tenant" and len(parts) > 1 else ""


class GroupExplainer:
    """By its name in its tenant, or as `tenant/group`."""

    def __init__(self, groups: Groups, explanations: Explanations) -> None:
        self._groups = groups
        self._explanations = explanations

    def locate(self, within: str, name: str) -> str:
        prefix, _, group = name.rpartition("/")
        wanted = prefix or _tenant(within)
        found = sorted(
            tenant
            for (tenant, key), view in self._groups.views().items()
            if key == group and wanted in ("", tenant) and not view.group.is_nat
        )
        found = [tenant for tenant in found if not _tenant(within) or tenant == _tenant(within)]
        if not found:
            raise missing("group", name)
        if len(found) > 1:
            raise InvalidArgument(
                f"several tenants have a group {group[:64]!r}",
                field="scope",
                hint="name one, such as tenant/acme",
            )
        return placed("group", name, freeze_scope(found[0], group), within)

    def explain(self, scope: str, _name: str) -> Sequence[Finding]:
        _, tenant, _, group = scope.split("/")
        return _of_group(self._explanations, tenant, group)


class InstanceExplainer:
    """By its id. What its group's controller says of it, and what its record does."""

    def __init__(
        self,
        instances: Instances,
        explanations: Explanations,
        clock: Clock,
        *,
        health: Callable[[Instance], Health],
    ) -> None:
        self._instances = instances
        self._explanations = explanations
        self._clock = clock
        self._health = health

    def _find(self, within: str, name: str) -> Instance | None:
        tenant = _tenant(within)
        if tenant:
            return self._instances.find(tenant, name)
        return next((one for one in self._instances.all(None) if one.name == name), None)

    def locate(self, within: str, name: str) -> str:
        found = self._find(within, name)
        scope = None if found is None else freeze_scope(tenant_of(found), found.spec.group)
        return placed("instance", name, scope, within)

    def explain(self, scope: str, name: str) -> Sequence[Finding]:
        instance = self._find(scope, name)
        if instance is None:
            return ()
        of_group = _of_group(self._explanations, tenant_of(instance), instance.spec.group, about=name)
        return (*from_record(self._clock, name, tuple(_reasons(instance, self._health(instance)))), *of_group)


def _of_group(explanations: Explanations, tenant: str, group: str, *, about: str = "") -> Sequence[Finding]:
    """What controllers say of a group; `about` one instance, what is of it and of the group as a whole."""
    told: list[Finding] = []
    for found in explanations.about(f"{tenant}/{group}"):
        explanation = found.explanation
        if about:
            own = tuple(one for one in explanation.reasons if one.subject in ("", about))
            explanation = msgspec.structs.replace(explanation, reasons=own)
        told += from_pass(found.controller, explanation)
    return told


def _reasons(instance: Instance, health: Health) -> Iterator[Reason]:
    state, status = rules.state(instance), instance.status
    if state is not rules.State.REGISTERED:
        yield Reason(code=state.value.upper(), message=f"it is {state.value}")
    if health is not Health.HEALTHY:
        yield Reason(code=f"HEALTH_{health.value.upper()}", message=f"its health is {health.value}")
    if status is None:
        return
    if status.drain is not None:
        yield Reason(code="DRAIN", message=f"it is let go: {status.drain.reason}")
    if status.last_error:
        yield Reason(code="PROVIDER_ERROR", message=status.last_error)
