"""The shapes of boards, clusters, tokens with which boards join, and requests to replace a key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import UNSET, UnsetType, field

from fleetplane.domains.boards.kinds import (
    ApprovalState,
    BoardRole,
    BoardState,
    ClusterState,
    TokenPurpose,
)
from fleetplane.domains.boards.rest.shapes.base import BoardShape, Data, Rows
from fleetplane.domains.boards.rest.shapes.pins import ShownPin


class ShownAgent(BoardShape, frozen=True, kw_only=True):
    version: str
    address: str
    port: int
    capabilities: Sequence[str]
    plaintext: bool
    registered_at: str | None
    certificate_expires_at: str | None


class ShownCondition(BoardShape, frozen=True, kw_only=True):
    type: str
    status: str
    reason: str
    message: str
    since: str | None


class ShownNode(BoardShape, frozen=True, kw_only=True):
    id: int
    name: str
    ip_address: str
    mac_address: str
    status: BoardState
    role: BoardRole
    created_at: str
    updated_at: str
    deleted_at: None
    architecture: str
    model: str
    serial_number: str
    cpu_cores: int
    memory: int
    cluster_id: int | None
    kube_version: str
    node_name: str
    os_version: str
    kernel_version: str
    last_seen: str | None
    agent: ShownAgent
    declared_status: BoardState
    labels: Mapping[str, str]
    conditions: Sequence[ShownCondition]
    gpio_devices: Sequence[ShownPin] | UnsetType = UNSET


class NodeRows(Rows[ShownNode], frozen=True, kw_only=True):
    """Boards."""


class NodeData(Data[ShownNode], frozen=True, kw_only=True):
    """One board."""


class AdoptedNode(Data[ShownNode], frozen=True, kw_only=True):
    message: str


class ShownCluster(BoardShape, frozen=True, kw_only=True):
    id: int
    name: str
    description: str
    status: ClusterState
    version: str
    created_at: str
    updated_at: str
    deleted_at: None
    master_endpoint: str
    nodes: Sequence[ShownNode] | UnsetType = UNSET


class ClusterRows(BoardShape, frozen=True, kw_only=True):
    """Clusters."""

    data: Sequence[ShownCluster] = field(name="clusters")
    count: int
    total: int
    limit: int
    offset: int


class ClusterNodes(BoardShape, frozen=True, kw_only=True):
    nodes: Sequence[ShownNode]
    count: int
    cluster_id: int


class ShownJoinToken(BoardShape, frozen=True, kw_only=True):
    id: str
    state: str
    """`good`, `used` or `expired`."""
    purpose: TokenPurpose
    name: str | None
    role: BoardRole | None
    cluster_id: int | None
    replaces: int | None
    created_by: str
    created_at: str
    expires_at: str
    used_at: str | None
    used_by: str | None


class IssuedJoinToken(BoardShape, frozen=True, kw_only=True):
    """With its text, which is shown once."""

    token: str
    id: str
    state: str
    purpose: TokenPurpose
    name: str | None
    role: BoardRole | None
    cluster_id: int | None
    replaces: int | None
    created_by: str
    created_at: str
    expires_at: str
    used_at: str | None
    used_by: str | None


class JoinTokenRows(Rows[ShownJoinToken], frozen=True, kw_only=True):
    """Tokens with which boards join, newest first."""


class ShownApproval(BoardShape, frozen=True, kw_only=True):
    id: str
    node_id: int
    name: str
    state: ApprovalState
    key: str
    serial_number: str
    mac_address: str
    address: str
    requested_at: str
    decided_by: str | None


class ApprovalRows(Rows[ShownApproval], frozen=True, kw_only=True):
    """Keys that ask to take a known board's place."""


class ApprovalData(Data[ShownApproval], frozen=True, kw_only=True):
    """One such key."""
