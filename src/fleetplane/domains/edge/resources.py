"""Edge daemons as objects of the resource API. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from fleetplane.domains.edge import access
from fleetplane.domains.edge.kinds import (
    EDGE_NODE,
    Desired,
    EdgeNode,
    NodeState,
    NodeStatus,
    daemon_scope,
    tenant_of,
)
from fleetplane.domains.edge.nodes.groups import EDGE_GROUP, EdgeGroup, GroupSpec
from fleetplane.domains.edge.nodes.registry import shown_name
from fleetplane.domains.edge.runs import selectors
from fleetplane.domains.edge.runs.channel import EDGE_RUN, EdgeRunSpec, ToolRequest, encoded_args
from fleetplane.domains.edge.runs.target_spellings import SpelledTarget, TargetKind
from fleetplane.domains.edge.streams.call_encoding import SECURITY_CONTEXT, decode_outcome
from fleetplane.fleet.figures import kept_figures, kept_history
from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.acting import freeze_actions
from fleetplane.fleet.resources.declaration import (
    READING,
    ActionCall,
    Begun,
    Column,
    ObjectState,
    PublicResource,
    ResourceAction,
    ResourceShape,
    ResourceVerb,
    ResourceView,
    ViewReader,
)
from fleetplane.fleet.resources.mirrors import Mirror
from fleetplane.fleet.runs.channel import RunOrder
from fleetplane.fleet.runs.policy import Mode, RunPolicy
from fleetplane.fleet.runs.resources import Printed, begin, run_resource
from fleetplane.kernel.commands import CommandTarget
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.values import durations
from fleetplane.kernel.values.times import spelled, spelled_or_null


class EdgeNodeSpecView(ResourceShape, frozen=True):
    display_name: str
    tags: Sequence[str]
    desired: str
    """`active`, `draining` or `shutdown`: what operators want."""


class EdgeNodeStatusView(ResourceShape, frozen=True):
    state: str
    """`connected`, `disconnected`, `draining`, `unhealthy` or `revoked`."""
    since: str
    last_heartbeat_at: str | None
    os: str
    arch: str
    tools: Sequence[str]
    labels: Mapping[str, str]
    """As the daemon reports them."""
    config_version: str
    enrolled_at: str
    key_version: int
    token_expires_at: str


def tenant_place(stored: AnyResource, _reading: ViewReader) -> str:
    """What belongs to a tenant lies there."""
    return scopes.tenant_path(tenant_of(stored.scope))


def node_view(node: EdgeNode, _reading: ViewReader) -> ResourceView[EdgeNodeSpecView, EdgeNodeStatusView]:
    """What is shown of a daemon: neither keys nor the ids of tokens."""
    spec = node.spec
    status = node.status or NodeStatus(state=NodeState.DISCONNECTED, since_ns=spec.enrolled_at_ns)
    return ResourceView(
        spec=EdgeNodeSpecView(display_name=shown_name(node), tags=spec.tags, desired=spec.desired),
        status=EdgeNodeStatusView(
            state=status.state,
            since=spelled(status.since_ns),
            last_heartbeat_at=spelled_or_null(status.last_heartbeat_at_ns),
            os=status.capabilities.os,
            arch=status.capabilities.arch,
            tools=status.capabilities.local_tools,
            labels=status.capabilities.labels,
            config_version=status.config_version,
            enrolled_at=spelled(spec.enrolled_at_ns),
            key_version=spec.key_version,
            token_expires_at=spelled(spec.token_expires_at_ns),
        ),
        labels=status.capabilities.labels,
    )


def live_node(domain: Any, node: EdgeNode) -> EdgeNode:
    """The record with the last heartbeat, which is stored with changes of state only."""
    heard_ns = domain.streams.heard_at_ns(node.name)
    if node.status is None or heard_ns is None:
        return node
    status = msgspec.structs.replace(node.status, last_heartbeat_at_ns=heard_ns)
    return msgspec.structs.replace(node, status=status)


class RevokeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    reason: str = "revoked by an operator"


class RunBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    tool: str
    args: dict[str, Any] = msgspec.field(default_factory=dict)
    deadline: str = "60s"
    security_context: str = SECURITY_CONTEXT


def _steered(desired: Desired) -> Callable[[ActionCall], Awaitable[Begun | None]]:
    async def steer(call: ActionCall) -> Begun | None:
        await call.domain.identity.nodes.set_desired(
            tenant_of(call.stored.scope), call.stored.name, desired, grace_seconds=0.0, actor=call.actor
        )
        return None

    return steer


async def _revoke(call: ActionCall) -> Begun | None:
    await call.domain.identity.nodes.revoke(
        tenant_of(call.stored.scope), call.stored.name, reason=call.body.reason, actor=call.actor
    )
    return None


async def _readmit(call: ActionCall) -> Begun | None:
    await call.domain.identity.nodes.readmit(tenant_of(call.stored.scope), call.stored.name, actor=call.actor)
    return None


async def _run_on_node(call: ActionCall) -> Begun | None:
    return await _run(call, SpelledTarget(kind=TargetKind.NODE, name=call.stored.name))


async def _run_on_group(call: ActionCall) -> Begun | None:
    return await _run(call, SpelledTarget(kind=TargetKind.GROUP, name=call.stored.name))


async def _run(call: ActionCall, target: SpelledTarget) -> Begun:
    body: RunBody = call.body
    order = RunOrder(
        scope=call.stored.scope,
        target=target,
        call=ToolRequest(
            tool=body.tool,
            args_json=encoded_args(body.args),
            security_context=body.security_context,
        ),
        policy=RunPolicy(mode=Mode.PARALLEL, deadline_seconds=durations.parse(body.deadline)),
        actor=call.actor,
    )
    return await begin(call, call.domain.runs, order, scope=scopes.tenant_path(tenant_of(order.scope)))


EDGE_NODES = PublicResource(
    name="edge-node",
    plural="edge-nodes",
    short=("edge", "en"),
    summary="A machine with an edge daemon",
    kind=EDGE_NODE,
    spec=EdgeNodeSpecView,
    status=EdgeNodeStatusView,
    view=node_view,
    live=live_node,
    state=lambda node: ObjectState(node.status.state if node.status is not None else NodeState.DISCONNECTED),
    place=tenant_place,
    permission=access.HOSTS_READ,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="DISPLAY-NAME", value=".spec.displayName"),
        Column(title="STATE", value=".status.state"),
        Column(title="SINCE", value=".status.since", type="age"),
        Column(title="TAGS", value=".spec.tags"),
        Column(title="OS", value=".status.os", wide=True),
        Column(title="ARCH", value=".status.arch", wide=True),
        Column(title="CONFIG", value=".status.configVersion", wide=True),
    ),
    verbs=READING | {ResourceVerb.EXPLAIN, ResourceVerb.FIGURES, ResourceVerb.HISTORY},
    figures=kept_figures,
    history=kept_history,
    actions=(
        ResourceAction(
            name="drain",
            summary="Let it finish what it has, and give it nothing new",
            permission=access.HOSTS_WRITE,
            run=_steered(Desired.DRAINING),
            anywhere=True,
        ),
        ResourceAction(
            name="activate",
            summary="Let it take work again",
            permission=access.HOSTS_WRITE,
            run=_steered(Desired.ACTIVE),
            anywhere=True,
        ),
        ResourceAction(
            name="revoke",
            summary="Refuse its token from now on, and close its stream",
            permission=access.HOSTS_WRITE,
            run=_revoke,
            anywhere=True,
            body=RevokeBody,
        ),
        ResourceAction(
            name="readmit",
            summary="Allow a revoked daemon to enrol again with a new token",
            permission=access.HOSTS_WRITE,
            run=_readmit,
            anywhere=True,
        ),
        ResourceAction(
            name="run",
            summary="Run a tool on it",
            permission=access.FLEET_MANAGE,
            run=_run_on_node,
            anywhere=True,
            body=RunBody,
            takes_time=True,
        ),
        *freeze_actions("edge", lambda node: daemon_scope(node.scope, node.name)),
    ),
    explain="daemon",
    search=(".metadata.name", ".spec.displayName", ".spec.tags"),
)


# Groups.


MIRROR = Mirror("Edge", without={GroupSpec: ("name", "created_by", "created_at_ns")})
EdgeGroupSpecView = MIRROR.shape(GroupSpec)


class EdgeGroupStatusView(ResourceShape, frozen=True):
    created_by: str


def group_view(group: EdgeGroup, _reading: ViewReader) -> ResourceView[Any, EdgeGroupStatusView]:
    """What is shown of a group; who belongs to it follows from the daemons."""
    return ResourceView(
        spec=MIRROR.shown(group.spec), status=EdgeGroupStatusView(created_by=group.spec.created_by)
    )


EDGE_GROUPS = PublicResource(
    name="edge-group",
    plural="edge-groups",
    short=("eg",),
    summary="Edge daemons that are meant together",
    kind=EDGE_GROUP,
    spec=EdgeGroupSpecView,
    status=EdgeGroupStatusView,
    view=group_view,
    place=tenant_place,
    permission=access.HOSTS_READ,
    named=lambda group, _reading: group.spec.name,
    actions=(
        ResourceAction(
            name="run",
            summary="Run a tool on every daemon of the group",
            permission=access.FLEET_MANAGE,
            run=_run_on_group,
            anywhere=True,
            body=RunBody,
            takes_time=True,
        ),
    ),
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="PINNED", value=lambda shown: len(shown["spec"]["pinnedMembers"]), type="number"),
        Column(title="BY", value=".status.createdBy"),
        Column(title="AGE", value=".metadata.createdAt", type="age"),
    ),
)


# Runs.


def _target(spec: EdgeRunSpec) -> str:
    match spec.target.kind:
        case TargetKind.NODE:
            return f"@{spec.target.name}"
        case TargetKind.GROUP:
            return f"group:{spec.target.name}"
        case TargetKind.ALL:
            return "all"
        case TargetKind.SELECTOR:
            return msgspec.json.encode(selectors.to_json(spec.target.selector)).decode()


def _printed(_domain: Any, target: CommandTarget) -> Printed:
    assert target.status is not None
    kept = decode_outcome(target.status.result)
    return Printed(
        stdout=kept.stdout_tail.decode("utf-8", "replace"),
        stderr=kept.stderr_tail.decode("utf-8", "replace"),
        message=target.status.detail,
    )


EDGE_RUNS = run_resource(
    EDGE_RUN,
    domain="edge",
    place=tenant_place,
    read=access.FLEET_READ,
    operate=access.FLEET_MANAGE,
    command=lambda spec: spec.tool,
    target=_target,
    runs=lambda domain: domain.runs,
    printed=_printed,
    anywhere=True,
)
RESOURCES = (EDGE_NODES, EDGE_GROUPS, EDGE_RUNS)
