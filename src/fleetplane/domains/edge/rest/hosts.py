"""REST: enrolment tokens, daemons, and groups of daemons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import asdict

from fleetplane.domains.edge.access import ENROLL, GROUPS_WRITE, HOSTS_READ, HOSTS_WRITE, forbidden_switch
from fleetplane.domains.edge.identity.enrolment_tokens import EnrolmentTokens
from fleetplane.domains.edge.kinds import Capabilities, Desired, EdgeNode, NodeState, tenant_of
from fleetplane.domains.edge.nodes.groups import EdgeGroup, EdgeGroups
from fleetplane.domains.edge.nodes.registry import Nodes
from fleetplane.domains.edge.rest import views
from fleetplane.domains.edge.rest.common import CREATED, NO_CONTENT, EdgeCall, Manner, actor, tenant, visible
from fleetplane.domains.edge.rest.shapes import (
    GroupDetail,
    GroupList,
    HostDetail,
    HostPage,
    IssuedToken,
    RecentCommand,
    ShownGroup,
    ShownHost,
    ShownToken,
    TokenPage,
)
from fleetplane.domains.edge.runs import selectors
from fleetplane.domains.edge.runs import target_spellings as targets
from fleetplane.domains.edge.runs.channel import EdgeRuns
from fleetplane.domains.edge.runs.selectors import Selector
from fleetplane.fleet.runs.records import outcome_of
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values.times import spelled
from fleetplane.web.rest.pages import BY_CURSOR, CursorPage, cursor_page, flag
from fleetplane.web.rest.routes import Answer, Query, Route, RouteGroup

_GROUPS_ONE = "/groups/{group_id}"
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
            _ROUTES.get(_GROUPS_ONE, self.show, HOSTS_READ),
            _ROUTES.patch(_GROUPS_ONE, self.change, GROUPS_WRITE, body=GroupPatch),
            _ROUTES.delete(_GROUPS_ONE, self.delete, GROUPS_WRITE, status=NO_CONTENT),
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


RECENT_RUNS = 50
"""Of a tenant, in which a daemon's latest commands are looked for."""
GRACE_LIMIT_SECONDS = 3600.0
_ONE = "/hosts/{node_id}"
_HOSTS = RouteGroup("Hosts")
_TOKENS = RouteGroup("Enrollment")


class TokenBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str = ""
    issued_to: str = ""
    ttl_seconds: float | None = None
    team_tenant_id: str = ""
    node_id: str = ""
    replace: bool = False


class HostPatch(msgspec.Struct, forbid_unknown_fields=True):
    name: str | UnsetType = UNSET
    tags: list[str] | UnsetType = UNSET
    add_tags: list[str] | UnsetType = UNSET
    remove_tags: list[str] | UnsetType = UNSET


class TagsBody(msgspec.Struct, forbid_unknown_fields=True):
    add: list[str] = []
    remove: list[str] = []


class StateBody(msgspec.Struct, forbid_unknown_fields=True):
    desired: Desired
    grace_secs: float = 30.0


class HostRoutes:
    def __init__(
        self,
        clock: Clock,
        *,
        nodes: Nodes,
        enrollments: EnrolmentTokens,
        runs: EdgeRuns,
        heard_at_ns: Callable[[str], int | None],
        manner: Manner,
    ) -> None:
        self._clock = clock
        self._nodes = nodes
        self._enrollments = enrollments
        self._runs = runs
        self._heard_at_ns = heard_at_ns
        self._manner = manner

    def routes(self) -> Sequence[Route]:
        return (*self._token_routes(), *self._host_routes())

    def _token_routes(self) -> Sequence[Route]:
        return (
            _TOKENS.post("/enrollment-tokens", self.issue, ENROLL, status=CREATED, body=TokenBody),
            _TOKENS.get("/enrollment-tokens", self.tokens, ENROLL, answer=TokenPage, query=BY_CURSOR),
            _TOKENS.delete("/enrollment-tokens/{token_id}", self.withdraw, ENROLL, status=NO_CONTENT),
        )

    def _host_routes(self) -> Sequence[Route]:
        return (
            _HOSTS.get(
                "/hosts",
                self.list,
                HOSTS_READ,
                answer=HostPage | list[ShownHost],
                query=(
                    Query(name="tag", summary="Only with this tag", many=True),
                    Query(name="label", summary="Only with this label, as key=value", many=True),
                    Query(name="connected", summary="Only with, or without, an open stream", kind="boolean"),
                    *BY_CURSOR,
                ),
            ),
            _HOSTS.get(_ONE, self.show, HOSTS_READ),
            _HOSTS.patch(_ONE, self.change, HOSTS_WRITE, body=HostPatch),
            _HOSTS.post(f"{_ONE}/tags", self.tag, HOSTS_WRITE, body=TagsBody),
            _HOSTS.post(f"{_ONE}/state", self.steer, HOSTS_WRITE, body=StateBody),
            _HOSTS.delete(_ONE, self.revoke, HOSTS_WRITE, status=NO_CONTENT),
            _HOSTS.post(f"{_ONE}/readmit", self.readmit, HOSTS_WRITE),
        )

    # Enrollment tokens.

    async def issue(self, call: EdgeCall) -> Answer[IssuedToken]:
        """Create a single-use enrolment token, for a new daemon or for `node_id`."""
        body: TokenBody = call.body
        wanted = body.team_tenant_id or tenant(call)
        if body.team_tenant_id and call.caller.tenant not in ("", body.team_tenant_id):
            raise forbidden_switch()
        made = await self._enrollments.issue(
            wanted,
            body.name or body.issued_to,
            life_seconds=body.ttl_seconds,
            node_id=body.node_id.lower(),
            replace=body.replace,
            actor=actor(call),
        )
        return Answer(content=views.invitation(made, shipped=self._manner.is_shipped(call.headers)))

    async def tokens(self, call: EdgeCall) -> Answer[CursorPage[ShownToken]]:
        """List enrolment tokens, without their text."""
        now_ns = self._clock.now_ns()
        return Answer(
            content=cursor_page(
                call, self._enrollments.list(tenant(call)), lambda found: views.enrollment(found, now_ns)
            )
        )

    async def withdraw(self, call: EdgeCall) -> Answer[None]:
        """Revoke an unused enrolment token."""
        await self._enrollments.revoke(tenant(call), call.path["token_id"], actor=actor(call))
        return Answer(content=None)

    # Daemons.

    async def list(self, call: EdgeCall) -> Answer[CursorPage[ShownHost] | Sequence[ShownHost]]:
        """List daemons."""
        wanted = selectors.Selector(
            tags=tuple(selectors.TagMatch(op=selectors.TagOp.HAS, tags=(tag,)) for tag in call.many["tag"]),
            labels=tuple(_label(text) for text in call.many["label"]),
        )
        connected = flag(call, "connected")
        found = [node for node in self._nodes.list(visible(call)) if _fits(node, wanted, connected)]
        if self._manner.is_shipped(call.headers):
            alive = [node for node in found if node.spec.revoked_at_ns is None]
            return Answer(content=[self._shown(node) for node in alive])
        return Answer(content=cursor_page(call, found, self._shown))

    async def show(self, call: EdgeCall) -> Answer[HostDetail]:
        """Get a daemon, with its latest commands."""
        node = self._node(call)
        return Answer(content=HostDetail(**asdict(self._shown(node)), recent_commands=self._recent(node)))

    async def change(self, call: EdgeCall) -> Answer[ShownHost]:
        """Rename a daemon or change its tags."""
        body: HostPatch = call.body
        node = self._node(call)
        of, name = tenant_of(node.scope), node.name
        node = await self._nodes.amend(
            of,
            name,
            rename=None if body.name is UNSET else body.name,
            tags=None if body.tags is UNSET else body.tags,
            add=body.add_tags or (),
            remove=body.remove_tags or (),
            actor=actor(call),
        )
        return Answer(content=self._shown(node))

    async def tag(self, call: EdgeCall) -> Answer[ShownHost]:
        """Add and remove tags."""
        body: TagsBody = call.body
        node = self._node(call)
        node = await self._nodes.change_tags(
            tenant_of(node.scope), node.name, add=body.add, remove=body.remove, actor=actor(call)
        )
        return Answer(content=self._shown(node))

    async def steer(self, call: EdgeCall) -> Answer[ShownHost]:
        """Change a daemon's state: drain it, shut it down or make it active."""
        body: StateBody = call.body
        if not 0 <= body.grace_secs <= GRACE_LIMIT_SECONDS:
            raise InvalidArgument(f"must be 0 to {GRACE_LIMIT_SECONDS:g}", field="grace_secs")
        node = self._node(call)
        node = await self._nodes.set_desired(
            tenant_of(node.scope), node.name, body.desired, grace_seconds=body.grace_secs, actor=actor(call)
        )
        return Answer(content=self._shown(node))

    async def revoke(self, call: EdgeCall) -> Answer[None]:
        """Revoke a daemon: its token is refused and its stream closed."""
        node = self._node(call)
        await self._nodes.revoke(
            tenant_of(node.scope), node.name, reason="revoked by an operator", actor=actor(call)
        )
        return Answer(content=None)

    async def readmit(self, call: EdgeCall) -> Answer[ShownHost]:
        """Allow a revoked daemon to enrol again with a new token."""
        node = self._node(call)
        node = await self._nodes.readmit(tenant_of(node.scope), node.name, actor=actor(call))
        return Answer(content=self._shown(node))

    def _node(self, call: EdgeCall) -> EdgeNode:
        """The daemon that the path names; another tenant's is not there."""
        of, name = visible(call), call.path["node_id"].lower()
        found = self._nodes.find(name) if of is None else None
        return found if found is not None else self._nodes.get(of or "", name)

    def _shown(self, node: EdgeNode) -> ShownHost:
        return views.host(node, heard_at_ns=self._heard_at_ns(node.name))

    def _recent(self, node: EdgeNode) -> Sequence[RecentCommand]:
        found = []
        for run in self._runs.list(node.scope)[:RECENT_RUNS]:
            target = self._runs.target(run, node.name)
            if target is not None:
                one = views.node_of_run(target)
                found.append(
                    RecentCommand(
                        command_id=one.command_id,
                        tool=run.spec.tool,
                        dispatched_at=spelled(run.spec.started_at_ns),
                        outcome=outcome_of(target),
                        duration_ms=one.duration_ms,
                    )
                )
        return found


def _label(text: str) -> selectors.LabelMatch:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise InvalidArgument("must be of the form key=value", field="label")
    return selectors.LabelMatch(op=selectors.LabelOp.EQUALS, key=key, values=(value,))


def _fits(node: EdgeNode, wanted: selectors.Selector, connected: bool | None) -> bool:
    status = node.status
    capabilities = status.capabilities if status is not None else Capabilities()
    here = status is not None and status.state not in (NodeState.DISCONNECTED, NodeState.REVOKED)
    return connected in (None, here) and wanted.matches(capabilities, node.spec.tags)
