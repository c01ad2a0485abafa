"""A tenant's groups as its operators see and change them.

What an operator sets is one resource beside the configuration, changed in one transaction, so that
two operators who change a group at once both have their way. What they see is computed for all
of them together, and again only when something it depends on has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from fleetplane.domains.instances import wire
from fleetplane.domains.instances.configuration import InstancesDocument
from fleetplane.domains.instances.configuration.merge import (
    MAX_VARS,
    check_override,
    effective,
    merge_override,
)
from fleetplane.domains.instances.configuration.validate import identifier_problem
from fleetplane.domains.instances.kinds import GROUP, INSTANCE, GroupOverride, Instance, tenant_scope
from fleetplane.domains.instances.records.groups import Groups, GroupView
from fleetplane.domains.instances.rules import quotas
from fleetplane.gen.nstance.v1 import operator_pb2
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from fleetplane.kernel.resources import Nothing, Resource
from fleetplane.kernel.store import Draft, Store

GROUPS_LIMIT = 1000
"""Groups that one tenant's operators may have made or changed at run time."""
TENANTS_KEPT = 1024
"""Tenants whose statuses are remembered between two questions."""

Statuses = Mapping[str, operator_pb2.GroupStatus]
"""By key, in the order of the keys. Shared by all readers: never change one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChange:
    """What shall be set of a group at run time, and what not any more; None leaves a value as it is."""

    vars: Mapping[str, str] = field(default_factory=dict)
    remove_vars: frozenset[str] = frozenset()
    args: Mapping[str, str] = field(default_factory=dict)
    remove_args: frozenset[str] = frozenset()
    size: int | None = None
    instance_type: str | None = None


def changed(before: GroupOverride, wanted: GroupChange) -> GroupOverride:
    """What is set once the change is made. Pure."""
    return msgspec.structs.replace(
        before,
        vars=_entries(before.vars, wanted.vars, wanted.remove_vars, "vars"),
        args=_entries(before.args, wanted.args, wanted.remove_args, "args"),
        size=before.size if wanted.size is None else wanted.size,
        instance_type=before.instance_type if wanted.instance_type is None else wanted.instance_type,
    )


def _entries(
    before: Mapping[str, str], wanted: Mapping[str, str], removed: frozenset[str], name: str
) -> dict[str, str]:
    if both := sorted(removed & wanted.keys()):
        raise InvalidArgument(f"{both[0]!r} cannot be set and removed at once", field=f"remove_{name}")
    if unknown := sorted(removed - before.keys()):
        raise NotFound(
            f"{name} has no {unknown[0][:64]!r} that was set at run time",
            hint="what is configured is removed in the configuration",
            field=f"remove_{name}",
        )
    return {key: value for key, value in {**before, **wanted}.items() if key not in removed}


class OperatorGroups:
    def __init__(self, store: Store, groups: Groups) -> None:
        self._store = store
        self._groups = groups
        self._kept: dict[str, tuple[tuple[object, ...], Statuses]] = {}

    def __repr__(self) -> str:
        return f"<OperatorGroups tenants={len(self._kept)}>"

    # Reading.

    def statuses(self, tenant: str) -> Statuses:
        """Every group of a tenant that its operators may know of."""
        loaded = self._groups.loaded
        etag = loaded.etag if loaded is not None else ""
        at = (etag, self._store.kind_revision(GROUP), self._store.kind_revision(INSTANCE))
        kept = self._kept.get(tenant)
        if kept is None or kept[0] != at:
            if len(self._kept) >= TENANTS_KEPT:
                self._kept.clear()
            kept = self._kept[tenant] = (at, self._compute(tenant))
        return kept[1]

    def _compute(self, tenant: str) -> Statuses:
        members: dict[str, list[Instance]] = {}
        for instance in self._store.list(INSTANCE, tenant_scope(tenant)):
            members.setdefault(instance.spec.group, []).append(instance)
        views = self._groups.views().values()
        mine = sorted(
            (view.group for view in views if view.group.tenant == tenant and not view.group.is_nat),
            key=lambda group: group.key,
        )
        return {group.key: wire.group_status(group, members.get(group.key, ())) for group in mine}

    def view(self, tenant: str, key: str) -> GroupView:
        """A group that instances may be made in; one that operators must not know of is not found."""
        found = self._groups.view(tenant, key)
        if found is not None and not found.group.is_nat:
            return found
        if found is None and (why := self._groups.unresolved(tenant, key)):
            raise FailedPrecondition(why, field="group")
        raise NotFound(f"group {key[:64]!r} is not known", details={"group": key[:64]})

    # Changing.

    async def upsert(
        self, tenant: str, key: str, wanted: GroupOverride, *, actor: str
    ) -> operator_pb2.GroupStatus:
        """Make a group, or change what may be changed of one."""
        await self._store.transact(
            lambda draft: self.put(
                draft, tenant, key, wanted, merged=lambda before: merge_override(before, wanted)
            ),
            actor=actor,
            action="instances.upsert_group",
            touches=[GROUP.key(tenant_scope(tenant), key)],
        )
        status = self.statuses(tenant).get(key)
        if status is None:  # the configuration was replaced in between
            raise FailedPrecondition(self._groups.unresolved(tenant, key) or f"group {key!r} is gone again")
        return status

    def put(
        self,
        draft: Draft,
        tenant: str,
        key: str,
        wanted: GroupOverride,
        *,
        merged: Callable[[GroupOverride | None], GroupOverride],
    ) -> Resource[GroupOverride, Nothing]:
        """The change that sets of a group what `merged` makes of what was set before; checked whole."""
        configuration = self._groups.required_in(draft)
        check_key(key)
        _check_ours(configuration, tenant, key)
        scope = tenant_scope(tenant)
        found = draft.get(GROUP, scope, key)
        if found is None and draft.count(GROUP, scope) >= GROUPS_LIMIT:
            raise ResourceExhausted(f"{GROUPS_LIMIT} groups were made or changed, the most there may be")
        check_override(configuration, tenant, key, wanted, found is not None)
        after = merged(found.spec if found is not None else None)
        if len(after.vars) > MAX_VARS:
            raise InvalidArgument(f"a group has at most {MAX_VARS} vars", field="config.vars")
        effective(configuration, tenant, key, after)  # refuses what could not be made into a group
        self._check_quota(draft, configuration, tenant, key, after)
        return draft.put(GROUP, scope, key, spec=after)

    async def change(self, tenant: str, key: str, wanted: GroupChange, *, actor: str) -> GroupOverride:
        """Change some of what was set at run time, and leave the rest of it; what is set then."""
        self._groups.required()
        check_key(key)
        scope = tenant_scope(tenant)

        def change(draft: Draft) -> GroupOverride:
            configuration = self._groups.required_in(draft)
            _check_ours(configuration, tenant, key)
            found = draft.get(GROUP, scope, key)
            group = effective(configuration, tenant, key, found.spec if found is not None else None)
            if group is None:
                raise NotFound(f"group {key!r} is not known", details={"group": key})
            before = found.spec if found is not None else GroupOverride(size=group.size)
            after = changed(before, wanted)
            if len(after.vars) > MAX_VARS or len(after.args) > MAX_VARS:
                raise InvalidArgument(f"a group has at most {MAX_VARS} vars, and as many args", field="vars")
            self._check_quota(draft, configuration, tenant, key, after)
            draft.put(GROUP, scope, key, spec=after)
            return after

        done = await self._store.transact(
            change, actor=actor, action="instances.change_group", touches=[GROUP.key(scope, key)]
        )
        return done.value

    def _check_quota(
        self, draft: Draft, configuration: InstancesDocument, tenant: str, key: str, wanted: GroupOverride
    ) -> None:
        """On what is written now, so that two changes at once do not both take the last room."""
        configured = configuration.groups.get(tenant, {})
        sizes = {name: group.size or 0 for name, group in configured.items()}
        sizes |= {found.name: found.spec.size for found in draft.list(GROUP, tenant_scope(tenant))}
        quotas.check_sizes(tenant, sizes, key, wanted.size, self._groups.quota(tenant, configuration))

    async def remove(self, tenant: str, key: str, *, actor: str) -> None:
        """Take back what was set at run time; a group that is configured stays, as configured."""
        await self._store.transact(
            lambda draft: self.take_back(draft, tenant, key),
            actor=actor,
            action="instances.delete_group",
            touches=[GROUP.key(tenant_scope(tenant), key)],
        )

    def take_back(self, draft: Draft, tenant: str, key: str) -> None:
        """The change that `remove` makes."""
        check_key(key)
        if (configuration := self._groups.configuration_in(draft)) is not None:
            _check_ours(configuration, tenant, key)
        scope = tenant_scope(tenant)
        if draft.get(GROUP, scope, key) is not None:
            draft.delete(GROUP, scope, key)


def check_key(key: str) -> None:
    if not key:
        raise InvalidArgument("key is required", field="key")
    if (problem := identifier_problem(key)) is not None:
        raise InvalidArgument(f"key {key[:64]!r} {problem}", field="key")


def _check_ours(configuration: InstancesDocument, tenant: str, key: str) -> None:
    nat = configuration.nat.get(tenant)
    if nat is not None and nat.group == key:
        raise FailedPrecondition(f"group {key!r} is kept by the server itself", field="key")
