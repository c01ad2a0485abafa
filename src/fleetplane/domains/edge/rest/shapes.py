"""The shapes of answers about daemons, groups, runs and workers. Field order is the order on the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.edge.kinds import Desired, WorkerRole, WorkerState
from fleetplane.fleet.runs.records import RunState, TargetOutcome
from fleetplane.fleet.runs.targets import Skipped
from fleetplane.web.rest.bodies import JsonObjectOrNull
from fleetplane.web.rest.pages import CursorPage


class EdgeShape(msgspec.Struct, frozen=True, kw_only=True):
    """Part of an answer."""


# Enrollment tokens.


class IssuedToken(EdgeShape, frozen=True, kw_only=True):
    token: str
    token_id: str
    expires_at: str
    controller_endpoint: str
    qr_payload: str
    command_hint: str


class ShownToken(EdgeShape, frozen=True, kw_only=True):
    token_id: str
    tenant_id: str
    issued_to: str
    issued_by: str
    issued_at: str
    expires_at: str
    state: str
    """`open`, `redeemed`, `revoked` or `expired`."""
    redeemed_by: str | None
    node_id: str | None
    replace: bool


class TokenPage(CursorPage[ShownToken], frozen=True, kw_only=True):
    """Enrollment tokens, oldest first."""


# Daemons.


class ShownCapabilities(EdgeShape, frozen=True, kw_only=True):
    os: str
    arch: str
    local_tools: Sequence[str]
    mount_points: Sequence[str]
    labels: Mapping[str, str]


class ShownHost(EdgeShape, frozen=True, kw_only=True):
    node_id: str
    id: str
    name: str
    tenant_id: str
    status: str
    connected: bool
    since: str
    last_heartbeat_at: str | None
    last_seen_at: str | None
    enrolled_at: str
    tags: Sequence[str]
    os: str
    arch: str
    capabilities: ShownCapabilities
    desired: Desired
    config_version: str | None
    key_version: int


class RecentCommand(EdgeShape, frozen=True, kw_only=True):
    command_id: str
    tool: str
    dispatched_at: str
    outcome: TargetOutcome
    duration_ms: int | None


class HostDetail(ShownHost, frozen=True, kw_only=True):
    recent_commands: Sequence[RecentCommand]


class HostPage(CursorPage[ShownHost], frozen=True, kw_only=True):
    """Daemons, oldest first."""


class ShownMember(EdgeShape, frozen=True, kw_only=True):
    """A daemon as a member of something."""

    node_id: str
    name: str
    status: str


# Selectors, targets and groups.


class LabelTerm(EdgeShape, frozen=True, kw_only=True):
    """One condition on a label; exactly one of the fields is there."""

    Equals: Sequence[str] | UnsetType = UNSET
    """The label and its value."""
    Exists: str | UnsetType = UNSET
    In: Sequence[str | Sequence[str]] | UnsetType = UNSET
    """The label and its possible values."""


class TagTerm(EdgeShape, frozen=True, kw_only=True):
    """One condition on tags; exactly one of the fields is there."""

    Has: str | UnsetType = UNSET
    AnyOf: Sequence[str] | UnsetType = UNSET
    AllOf: Sequence[str] | UnsetType = UNSET
    NoneOf: Sequence[str] | UnsetType = UNSET


class ShownSelector(EdgeShape, frozen=True, kw_only=True):
    os: str | None
    arch: str | None
    tools: Sequence[str]
    labels: Sequence[LabelTerm]
    tags: Sequence[TagTerm]
    where: str | UnsetType = UNSET


class ShownTarget(EdgeShape, frozen=True, kw_only=True):
    """Who is meant; exactly one of the fields is there."""

    Node: str | UnsetType = UNSET
    Group: str | UnsetType = UNSET
    Selector: ShownSelector | UnsetType = UNSET
    All: UnsetType | None = UNSET


class ShownGroup(EdgeShape, frozen=True, kw_only=True):
    id: str
    name: str
    tenant_id: str
    selector: ShownSelector | None
    pinned_members: Sequence[str]
    created_by: str
    created_at: str
    resolved_member_count: int


class GroupDetail(ShownGroup, frozen=True, kw_only=True):
    resolved_members: Sequence[ShownMember]


class GroupList(EdgeShape, frozen=True, kw_only=True):
    items: Sequence[ShownGroup]


# Runs.


class ShownPolicy(EdgeShape, frozen=True, kw_only=True):
    mode: str
    max_concurrency: int | None
    failure_policy: str
    require_min_targets: int
    per_target_deadline_secs: float
    durable: bool
    deliver_by_secs: float | None


class ShownSummary(EdgeShape, frozen=True, kw_only=True):
    """How many targets ended how; those that have not ended are counted while there are any."""

    ok: int
    err: int
    timed_out: int
    cancelled: int
    not_started: int
    running: int | UnsetType = UNSET
    pending: int | UnsetType = UNSET


class ShownRun(EdgeShape, frozen=True, kw_only=True):
    fleet_command_id: str
    tool: str
    target: ShownTarget
    policy: ShownPolicy
    started_by: str
    started_at: str
    ended_at: str | None
    outcome: RunState
    targets_resolved: int
    targets_skipped: int
    summary: ShownSummary


class RunPage(CursorPage[ShownRun], frozen=True, kw_only=True):
    """Runs, newest first; `runs` is `items` under its other name."""

    runs: Sequence[ShownRun]


class NodeOfRun(EdgeShape, frozen=True, kw_only=True):
    """What became of one target."""

    node_id: str
    command_id: str
    outcome: TargetOutcome
    code: str | None
    message: str | None
    told_to_stop: bool
    exit_code: int | None
    duration_ms: int | None
    stdout_tail: str
    stderr_tail: str


class RunDetail(ShownRun, frozen=True, kw_only=True):
    per_node: Sequence[NodeOfRun]
    skipped: Sequence[Skipped]


class Preview(EdgeShape, frozen=True, kw_only=True):
    resolved: Sequence[ShownMember | str]
    """In the shipped shapes, ids only."""
    skipped: Sequence[Skipped]


class Cancelled(EdgeShape, frozen=True, kw_only=True):
    fleet_command_id: str
    cancelled: int
    told_to_stop: int
    already_terminal: bool


# Configuration.


class ShownLayer(EdgeShape, frozen=True, kw_only=True):
    """The layer of everyone."""

    layer: JsonObjectOrNull
    set_by: str | None
    version: str | None


class ShownConfig(EdgeShape, frozen=True, kw_only=True):
    """A layer, and what comes of all of them."""

    layer: JsonObjectOrNull
    set_by: str | None
    merged: JsonObjectOrNull
    version: str | None
    applied_version: str | None
    acknowledged: bool


# What concerns all tenants.


class IssuedWorkerToken(EdgeShape, frozen=True, kw_only=True):
    token: str
    node_id: str
    role: WorkerRole
    tenants: Sequence[str]
    expires_at: str


class ShownWorker(EdgeShape, frozen=True, kw_only=True):
    node_id: str
    role: WorkerRole
    tenants: Sequence[str]
    status: WorkerState
    draining: bool
    grpc_address: str
    tags: Sequence[str]
    last_heartbeat_at: str | None


class WorkerPage(CursorPage[ShownWorker], frozen=True, kw_only=True):
    """Workers, oldest first."""


class RevokedTenant(EdgeShape, frozen=True, kw_only=True):
    tenant_id: str
    revoked: int
    """How many daemons."""
