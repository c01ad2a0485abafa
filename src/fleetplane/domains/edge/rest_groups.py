"""REST: named sets of daemons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.edge import selectors, targets, views
from fleetplane.domains.edge.access import GROUPS_WRITE, HOSTS_READ
from fleetplane.domains.edge.groups import EdgeGroup, Groups
from fleetplane.domains.edge.kinds import EdgeNode, tenant_of
from fleetplane.domains.edge.nodes import Nodes
from fleetplane.domains.edge.rest import CREATED, NO_CONTENT, EdgeCall, Manner, actor, tenant
from fleetplane.domains.edge.selectors import Selector
from fleetplane.web.routes import Answer, Route

_ONE = "/groups/{group_id}"
_TAG = "Groups"


class GroupBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    selector: Any = None
    pinned_members: list[str] = []
    created_by: str = ""
    """Some clients send it; who created a group is known from who asks."""


class GroupPatch(msgspec.Struct, forbid_unknown_fields=True):
    name: str | UnsetType = UNSET
    selector: Any = UNSET
    pinned_members: list[str] | UnsetType = UNSET
    add_members: list[str] = []
    remove_members: list[str] = []


class GroupRoutes:
    def __init__(self, *, groups: Groups, nodes: Nodes, manner: Manner) -> None:
        self._groups = groups
        self._nodes = nodes
        self._manner = manner

    def routes(self) -> Sequence[Route]:
        return (
            Route(
                method="GET", path="/groups", handler=self.list, tag=_TAG, summary="Groups",
                permission=HOSTS_READ, answer=Any,
            ),
            Route(
                method="POST", path="/groups", handler=self.create, tag=_TAG, summary="Make a group",
                permission=GROUPS_WRITE, body=GroupBody, answer=dict[str, Any], status=CREATED,
            ),
            Route(
                method="GET", path=_ONE, handler=self.show, tag=_TAG, permission=HOSTS_READ,
                summary="One group, with who belongs to it now", answer=dict[str, Any],
            ),
            Route(
                method="PATCH", path=_ONE, handler=self.change, tag=_TAG, summary="Change a group",
                permission=GROUPS_WRITE, body=GroupPatch, answer=dict[str, Any],
            ),
            Route(
                method="DELETE", path=_ONE, handler=self.delete, tag=_TAG, permission=GROUPS_WRITE,
                summary="Remove a group; its daemons stay", status=NO_CONTENT,
            ),
        )  # fmt: skip

    async def list(self, call: EdgeCall) -> Answer[Any]:
        found = [self._shown(group) for group in self._groups.list(tenant(call))]
        return Answer(content=found if self._manner.is_shipped(call.headers) else {"items": found})

    async def create(self, call: EdgeCall) -> Answer[Any]:
        body: GroupBody = call.body
        made = await self._groups.create(
            tenant(call), name=body.name, selector=_selector(body.selector),
            pinned=tuple(body.pinned_members), actor=actor(call),
        )  # fmt: skip
        return Answer(content=self._shown(made))

    async def show(self, call: EdgeCall) -> Answer[Any]:
        group = self._groups.get(tenant(call), call.path["group_id"])
        members = [views.brief(node) for node in self._members(group)]
        return Answer(content={**self._shown(group), "resolved_members": members})

    async def change(self, call: EdgeCall) -> Answer[Any]:
        body: GroupPatch = call.body
        changed = await self._groups.change(
            tenant(call),
            call.path["group_id"],
            actor=actor(call),
            new_name=None if body.name is UNSET else body.name,
            selector=UNSET if body.selector is UNSET else _selector(body.selector),
            pinned=None if body.pinned_members is UNSET else tuple(body.pinned_members),
            add=tuple(body.add_members),
            remove=tuple(body.remove_members),
        )
        return Answer(content=self._shown(changed))

    async def delete(self, call: EdgeCall) -> Answer[None]:
        await self._groups.delete(tenant(call), call.path["group_id"], actor=actor(call))
        return Answer(content=None)

    def _members(self, group: EdgeGroup) -> Sequence[EdgeNode]:
        everyone = self._nodes.list(tenant_of(group.scope))
        return targets.choose(everyone, group.spec.selector, group.spec.pinned_members)[0]

    def _shown(self, group: EdgeGroup) -> dict[str, Any]:
        return views.group(group, members=self._members(group))


def _selector(value: object) -> Selector | None:
    return None if value is None else selectors.from_json(value)
