"""What calls of operators need of the provider and of the controllers, at any server.

The active server asks the provider. Another one writes down what shall be, and has the active one do it or
tell it (`fleet/errands.py`); the answer is the same, and so is the error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from fleetplane.domains.instances.controllers.assembly import Machinery
from fleetplane.domains.instances.kinds import Instance, tenant_of
from fleetplane.domains.instances.records.groups import GroupBasis, Groups, GroupView
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.records.intents import GroupChanged, Intents
from fleetplane.fleet.errands import Errands
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError, NotFound
from fleetplane.kernel.reconcile import Explanation, Explanations
from fleetplane.kernel.reconcile.explanation import Finding
from fleetplane.kernel.store import Store

STATUS, PROVISION, EXPLAIN = "status", "provision", "explain"
STATUS_SECONDS = 8.0
"""The provider has five; the rest is the way there and back."""
EXPLAIN_SECONDS = 10.0
EXTRA_SECONDS = 15.0
"""Beyond the time that the provider has for a change: an active server may have to be replaced first."""
ATTEMPTS = 3
"""To make an instance of a group that is being changed."""


class _NamedGroup(msgspec.Struct, frozen=True, array_like=True):
    tenant: str
    name: str


class _FoundReasons(msgspec.Struct, frozen=True, array_like=True):
    controller: str
    explanation: Explanation


class OnBehalf:
    def __init__(
        self,
        store: Store,
        errands: Errands,
        groups: Groups,
        instances: Instances,
        intents: Intents,
        explanations: Explanations,
        *,
        machinery: Callable[[], Machinery | None],
    ) -> None:
        self._store = store
        self._errands = errands
        self._groups = groups
        self._instances = instances
        self._intents = intents
        self._explanations = explanations
        self._machinery = machinery
        errands.does(STATUS, self._do_status)
        errands.does(PROVISION, self._do_provision)
        errands.does(EXPLAIN, self._do_explain)

    def __repr__(self) -> str:
        return f"<OnBehalf {self._errands!r}>"

    def _required(self) -> Machinery:
        machinery = self._machinery()
        if machinery is None:
            raise FailedPrecondition("no configuration is in force, so no provider can make instances")
        return machinery

    # How an instance is.

    async def status(self, instance: Instance) -> str:
        """The word that the provider has for it."""
        tenant = tenant_of(instance)
        about = _text(_NamedGroup(tenant, instance.name))
        return await self._errands.ask(STATUS, about, seconds=STATUS_SECONDS, tenant=tenant)

    async def _do_status(self, about: str) -> str:
        named = msgspec.json.decode(about, type=_NamedGroup)
        instance = self._instances.get(named.tenant, named.name)
        return await self._required().observations.look_at(instance)

    # Making one for a caller.

    async def create(
        self,
        tenant: str,
        group: str,
        *,
        name: str,
        template: str,
        instance_type: str,
        subnet_pool: str,
        vars: Mapping[str, str],  # noqa: A002  (the wire's own name)
        actor: str,
    ) -> Instance:
        """One instance of a group, beside those that its size asks for."""
        for attempt in range(1, ATTEMPTS + 1):
            basis = self._groups.basis(self._store, tenant, group)
            view = self._groups.view(tenant, group)
            if view is None:
                raise NotFound(f"group {group!r} is not known", field="config.group")
            chosen = self._groups.chosen(
                view, template=template, instance_type=instance_type, subnet_pool=subnet_pool, variables=vars
            )
            try:
                return await self._made(chosen, name, vars, actor, basis)
            except GroupChanged:
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    async def _made(
        self, chosen: GroupView, name: str, variables: Mapping[str, str], actor: str, basis: GroupBasis
    ) -> Instance:
        if not self._groups.stands_by:
            return await self._required().launcher.create(
                chosen, name=name, on_demand=True, actor=actor, variables=variables, basis=basis
            )
        instance = await self._intents.record(
            chosen, name=name, on_demand=True, actor=actor, variables=variables, basis=basis
        )
        tenant = tenant_of(instance)
        seconds = self._groups.required().shard.request_timeout_seconds + EXTRA_SECONDS
        try:
            about = _text(_NamedGroup(tenant, instance.name))
            await self._errands.ask(PROVISION, about, seconds=seconds, tenant=tenant)
        except FleetplaneError:
            if not name:
                # Its caller does not know it and will ask for another: this one must not come as well.
                await self._intents.give_up(instance)
            raise
        return self._instances.get(tenant, instance.name)

    async def _do_provision(self, about: str) -> str:
        named = msgspec.json.decode(about, type=_NamedGroup)
        instance = self._instances.get(named.tenant, named.name)
        status = instance.status
        if status is None or (not status.provider_id and status.deleting_at_ns is None):
            await self._required().launcher.provision(named.tenant, named.name)
        return ""

    # Why.

    async def findings(self, key: str) -> Sequence[Finding]:
        """What controllers found in their last passes over a key; over all keys if it is empty."""
        told = await self._errands.ask(EXPLAIN, key, seconds=EXPLAIN_SECONDS)
        found = msgspec.json.decode(told, type=list[_FoundReasons])
        return [Finding(controller=one.controller, explanation=one.explanation) for one in found]

    async def _do_explain(self, key: str) -> str:
        found = self._explanations.about(key) if key else self._explanations.all()
        return _text([_FoundReasons(one.controller, one.explanation) for one in found])


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
