"""Groups of a tenant's daemons: members by selector, and pinned members."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fleetplane.domains.edge.kinds import EdgeSpec, tenant_scope
from fleetplane.domains.edge.runs.selectors import Selector
from fleetplane.kernel.access import who
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted
from fleetplane.kernel.resources import Kind, Nothing, Resource
from fleetplane.kernel.store import ABSENT, Draft, Store
from fleetplane.kernel.values.ids import check_uuid, new_uuid

NAME_LIMIT = 128
PINNED_LIMIT = 1000
GROUPS_LIMIT = 1000
"""Of one tenant."""
_NAME_CLAIM = "name"


class GroupSpec(EdgeSpec, frozen=True):
    name: str
    selector: Selector | None = None
    """None if only the pinned members belong."""
    pinned_members: tuple[str, ...] = ()
    created_by: str = ""
    created_at_ns: int = 0


EDGE_GROUP: Kind[GroupSpec, Nothing] = Kind("edge-group", GroupSpec, Nothing)
EdgeGroup = Resource[GroupSpec, Nothing]


class EdgeGroups:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def __repr__(self) -> str:
        return f"<Groups {len(self._store.list(EDGE_GROUP))}>"

    def list(self, tenant: str) -> list[EdgeGroup]:
        found = self._store.list(EDGE_GROUP, tenant_scope(tenant))
        return sorted(found, key=lambda group: group.spec.name)

    def get(self, tenant: str, name: str) -> EdgeGroup:
        """By id, or by what it is called."""
        scope = tenant_scope(tenant)
        found = self._store.get(EDGE_GROUP, scope, name.lower())
        if found is None:
            owner = self._store.claimed_by(EDGE_GROUP, scope, _NAME_CLAIM, name)
            found = self._store.get(EDGE_GROUP, scope, owner) if owner is not None else None
        if found is None:
            raise NotFound(f"there is no group {name[:NAME_LIMIT]!r}", details={"cause": "GroupNotFound"})
        return found

    async def create(
        self, tenant: str, *, name: str, selector: Selector | None, pinned: tuple[str, ...], actor: str
    ) -> EdgeGroup:
        spec = GroupSpec(
            name=name,
            selector=selector,
            pinned_members=pinned,
            created_by=who(actor),
            created_at_ns=self._clock.now_ns(),
        )
        scope, group_id = tenant_scope(tenant), new_uuid(self._clock)
        done = await self._store.transact(
            lambda draft: make_group(draft, scope, group_id, spec),
            actor=actor,
            action="edge.group.create",
            touches=[EDGE_GROUP.key(scope, group_id)],
        )
        return done.value

    async def change(
        self,
        tenant: str,
        name: str,
        *,
        actor: str,
        new_name: str | None = None,
        selector: Selector | msgspec.UnsetType | None = msgspec.UNSET,
        pinned: tuple[str, ...] | None = None,
        add: tuple[str, ...] = (),
        remove: tuple[str, ...] = (),
    ) -> EdgeGroup:
        for field, given in (
            ("pinned_members", pinned or ()),
            ("add_members", add),
            ("remove_members", remove),
        ):
            if len(given) > PINNED_LIMIT:
                raise InvalidArgument(f"has {len(given)} members, more than {PINNED_LIMIT}", field=field)
        removed = frozenset(remove)
        scope, group_id = tenant_scope(tenant), self.get(tenant, name).name

        def changed(before: GroupSpec) -> GroupSpec:
            members = before.pinned_members if pinned is None else pinned
            return msgspec.structs.replace(
                before,
                name=before.name if new_name is None else new_name,
                selector=before.selector if selector is msgspec.UNSET else selector,
                pinned_members=tuple(
                    dict.fromkeys(member for member in (*members, *add) if member not in removed)
                ),
            )

        done = await self._store.transact(
            lambda draft: change_group(draft, scope, group_id, changed),
            actor=actor,
            action="edge.group.update",
            touches=[EDGE_GROUP.key(scope, group_id)],
        )
        return done.value

    async def delete(self, tenant: str, name: str, *, actor: str) -> None:
        scope, group = tenant_scope(tenant), self.get(tenant, name)
        await self._store.transact(
            lambda draft: remove_group(draft, scope, group.name),
            actor=actor,
            action="edge.group.delete",
            touches=[EDGE_GROUP.key(scope, group.name)],
        )


# The changes themselves, as functions of a draft.


def make_group(draft: Draft, scope: str, group_id: str, spec: GroupSpec) -> EdgeGroup:
    """Create a group in a tenant's scope; its name must be free."""
    _check(spec)
    if draft.count(EDGE_GROUP, scope) >= GROUPS_LIMIT:
        raise ResourceExhausted(f"a tenant has at most {GROUPS_LIMIT} groups")
    _claim(draft, scope, spec.name, group_id)
    return draft.put(EDGE_GROUP, scope, group_id, spec=spec, expect=ABSENT)


def change_group(
    draft: Draft, scope: str, group_id: str, changed: Callable[[GroupSpec], GroupSpec]
) -> EdgeGroup:
    """Replace a group's spec by what `changed` makes of it."""
    group = _present(draft, scope, group_id)
    spec = changed(group.spec)
    _check(spec)
    if spec.name != group.spec.name:
        draft.release(EDGE_GROUP, scope, _NAME_CLAIM, group.spec.name, owner=group_id)
        _claim(draft, scope, spec.name, group_id)
    return draft.put(EDGE_GROUP, scope, group_id, spec=spec)


def remove_group(draft: Draft, scope: str, group_id: str) -> None:
    """Delete a group; its name is free again."""
    group = _present(draft, scope, group_id)
    draft.release(EDGE_GROUP, scope, _NAME_CLAIM, group.spec.name, owner=group_id)
    draft.delete(EDGE_GROUP, scope, group_id)


def _present(draft: Draft, scope: str, group_id: str) -> EdgeGroup:
    found = draft.get(EDGE_GROUP, scope, group_id)
    if found is None:
        raise NotFound(f"there is no group {group_id!r}")
    return found


def _check(spec: GroupSpec) -> None:
    if not 0 < len(spec.name) <= NAME_LIMIT or spec.name != spec.name.strip():
        raise InvalidArgument(f"needs 1 to {NAME_LIMIT} characters, and no blanks around them", field="name")
    if len(spec.pinned_members) > PINNED_LIMIT:
        raise InvalidArgument(f"at most {PINNED_LIMIT} members can be pinned", field="pinned_members")
    for member in spec.pinned_members:
        check_uuid(member, field="pinned_members")


def _claim(draft: Draft, scope: str, name: str, group_id: str) -> None:
    try:
        draft.claim(EDGE_GROUP, scope, _NAME_CLAIM, name, owner=group_id)
    except AlreadyExists:
        raise AlreadyExists(f"there is a group named {name!r} already", field="name") from None
