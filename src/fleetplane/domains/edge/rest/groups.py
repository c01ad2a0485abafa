"""REST: named sets of daemons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import asdict

from fleetplane.domains.edge.access import GROUPS_WRITE, HOSTS_READ
from fleetplane.domains.edge.kinds import EdgeNode, tenant_of
from fleetplane.domains.edge.nodes.groups import EdgeGroup, EdgeGroups
from fleetplane.domains.edge.nodes.registry import Nodes
from fleetplane.domains.edge.rest import views
from fleetplane.domains.edge.rest.common import CREATED, NO_CONTENT, EdgeCall, Manner, actor, tenant
from fleetplane.domains.edge.rest.shapes import GroupDetail, GroupList, ShownGroup
from fleetplane.domains.edge.runs import selectors
from fleetplane.domains.edge.runs import target_spellings as targets
from fleetplane.domains.edge.runs.selectors import Selector
from fleetplane.web.rest.routes import Answer, Route, RouteGroup

_ONE = "/groups/{group_id}"
_ROUTES = RouteGroup("Groups")


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
    def __init__(self, *, groups: EdgeGroups, nodes: Nodes, manner: Manner) -> None:
        self._groups = groups
        self._nodes = nodes
        self._manner = manner

    def routes(self) -> Sequence[Route]:
        return (
            _ROUTES.get("/groups", self.list, HOSTS_READ, answer=GroupList | list[ShownGroup]),
            _ROUTES.post("/groups", self.create, GROUPS_WRITE, body=GroupBody, status=CREATED),
            _ROUTES.get(_ONE, self.show, HOSTS_READ),
            _ROUTES.patch(_ONE, self.change, GROUPS_WRITE, body=GroupPatch),
            _ROUTES.delete(_ONE, self.delete, GROUPS_WRITE, status=NO_CONTENT),
        )

    async def list(self, call: EdgeCall) -> Answer[GroupList | Sequence[ShownGroup]]:
        """List groups."""
        found = [self._shown(group) for group in self._groups.list(tenant(call))]
        return Answer(content=found if self._manner.is_shipped(call.headers) else GroupList(items=found))

    async def create(self, call: EdgeCall) -> Answer[ShownGroup]:
        """Create a group."""
        body: GroupBody = call.body
        made = await self._groups.create(
            tenant(call),
            name=body.name,
            selector=_selector(body.selector),
            pinned=tuple(body.pinned_members),
            actor=actor(call),
        )
        return Answer(content=self._shown(made))

    async def show(self, call: EdgeCall) -> Answer[GroupDetail]:
        """Get a group, with its present members."""
        group = self._groups.get(tenant(call), call.path["group_id"])
        members = [views.brief(node) for node in self._members(group)]
        return Answer(content=GroupDetail(**asdict(self._shown(group)), resolved_members=members))

    async def change(self, call: EdgeCall) -> Answer[ShownGroup]:
        """Change a group."""
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
        """Delete a group; its daemons stay."""
        await self._groups.delete(tenant(call), call.path["group_id"], actor=actor(call))
        return Answer(content=None)

    def _members(self, group: EdgeGroup) -> Sequence[EdgeNode]:
        everyone = self._nodes.list(tenant_of(group.scope))
        return targets.choose(everyone, group.spec.selector, group.spec.pinned_members)[0]

    def _shown(self, group: EdgeGroup) -> ShownGroup:
        return views.group(group, members=self._members(group))


def _selector(value: object) -> Selector | None:
    return None if value is None else selectors.from_json(value)
