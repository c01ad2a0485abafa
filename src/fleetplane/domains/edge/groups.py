"""Named sets of a tenant's daemons: whoever a selector means, and members that are pinned."""

from __future__ import annotations

import uuid

import msgspec

from fleetplane.domains.edge.kinds import Nothing, Spec, check_uuid, tenant_scope
from fleetplane.domains.edge.selectors import Selector
from fleetplane.kernel.actors import who
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted
from fleetplane.kernel.resources import Kind, Resource
from fleetplane.kernel.store import ABSENT, Draft, Store

NAME_LIMIT = 128
PINNED_LIMIT = 1000
GROUPS_LIMIT = 1000
"""Of one tenant."""
_NAME_CLAIM = "name"


class GroupSpec(Spec, frozen=True):
    name: str
    selector: Selector | None = None
    """None if only the pinned members belong."""
    pinned_members: tuple[str, ...] = ()
    created_by: str = ""
    created_at_ns: int = 0


EDGE_GROUP: Kind[GroupSpec, Nothing] = Kind("edge-group", GroupSpec, Nothing)
EdgeGroup = Resource[GroupSpec, Nothing]


class Groups:
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
            name=name, selector=selector, pinned_members=pinned, created_by=who(actor),
            created_at_ns=self._clock.now_ns(),
        )  # fmt: skip
        _check(spec)
        scope = tenant_scope(tenant)
        if len(self._store.list(EDGE_GROUP, scope)) >= GROUPS_LIMIT:
            raise ResourceExhausted(f"a tenant has at most {GROUPS_LIMIT} groups")
        group_id = str(uuid.UUID(bytes=self._clock.token_bytes(16), version=4))

        def change(draft: Draft) -> EdgeGroup:
            _claim(draft, scope, name, group_id)
            return draft.put(EDGE_GROUP, scope, group_id, spec=spec, expect=ABSENT)

        done = await self._store.transact(
            change, actor=actor, action="edge.group.create", touches=[EDGE_GROUP.key(scope, group_id)]
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
        scope, group_id = tenant_scope(tenant), self.get(tenant, name).name

        def change(draft: Draft) -> EdgeGroup:
            group = draft.get(EDGE_GROUP, scope, group_id)
            if group is None:
                raise NotFound(f"there is no group {name[:NAME_LIMIT]!r}")
            members = group.spec.pinned_members if pinned is None else pinned
            spec = msgspec.structs.replace(
                group.spec,
                name=group.spec.name if new_name is None else new_name,
                selector=group.spec.selector if selector is msgspec.UNSET else selector,
                pinned_members=tuple(
                    dict.fromkeys(member for member in (*members, *add) if member not in remove)
                ),
            )
            _check(spec)
            if spec.name != group.spec.name:
                draft.release(EDGE_GROUP, scope, _NAME_CLAIM, group.spec.name, owner=group_id)
                _claim(draft, scope, spec.name, group_id)
            return draft.put(EDGE_GROUP, scope, group_id, spec=spec)

        done = await self._store.transact(
            change, actor=actor, action="edge.group.update", touches=[EDGE_GROUP.key(scope, group_id)]
        )
        return done.value

    async def delete(self, tenant: str, name: str, *, actor: str) -> None:
        scope, group = tenant_scope(tenant), self.get(tenant, name)

        def change(draft: Draft) -> None:
            current = draft.get(EDGE_GROUP, scope, group.name)
            if current is None:
                raise NotFound(f"there is no group {name[:NAME_LIMIT]!r}")
            draft.release(EDGE_GROUP, scope, _NAME_CLAIM, current.spec.name, owner=group.name)
            draft.delete(EDGE_GROUP, scope, group.name)

        await self._store.transact(
            change, actor=actor, action="edge.group.delete", touches=[EDGE_GROUP.key(scope, group.name)]
        )


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
