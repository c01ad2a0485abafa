"""Boards, clusters, pins, join tokens and approvals in REST: each shape and how a record fills it. Pure.

The order of fields is the order on the wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import UNSET, UnsetType, field

from fleetplane.domains.boards.inventory.boards import status_of
from fleetplane.domains.boards.kinds import (
    Approval,
    ApprovalState,
    Board,
    BoardRole,
    BoardState,
    Cluster,
    ClusterState,
    JoinToken,
    TokenPurpose,
    number_of,
)
from fleetplane.domains.boards.pins import kinds as gpio_kinds
from fleetplane.domains.boards.pins.kinds import (
    Device,
    DeviceState,
    DeviceType,
    Direction,
    GpioConfig,
    Pull,
    device_number,
)
from fleetplane.domains.boards.rest.common import BoardShape, Data, Rows, projected
from fleetplane.domains.boards.wire.message_json import json_number
from fleetplane.kernel.values.times import spelled_or_null
from fleetplane.web.rest.bodies import Number


class ShownPin(BoardShape, frozen=True, kw_only=True):
    id: int
    name: str
    description: str
    node_id: int
    pin_number: int
    direction: Direction
    pull_mode: Pull
    value: Number | None
    device_type: DeviceType
    status: DeviceState
    config: GpioConfig
    created_at: str
    updated_at: str
    reserved_by: str | None
    reserved_at: str | None
    reservation_ttl: str | None
    """When the reservation ends."""
    wanted: int | None
    value_at: str | None
    reason: str
    message: str


class PinRows(Rows[ShownPin], frozen=True, kw_only=True):
    """Pins in use."""


class PinData(Data[ShownPin], frozen=True, kw_only=True):
    """One pin."""


class NodePins(BoardShape, frozen=True, kw_only=True):
    gpio_devices: Sequence[ShownPin]
    count: int
    node_id: int


class PinLevel(BoardShape, frozen=True, kw_only=True):
    device_id: int
    node_id: int
    pin: int
    value: int
    timestamp: str


class PinReading(BoardShape, frozen=True, kw_only=True):
    device_id: int
    value: Number
    timestamp: str


class PinReadings(BoardShape, frozen=True, kw_only=True):
    readings: Sequence[PinReading]
    count: int
    device_id: int


class PinReservation(BoardShape, frozen=True, kw_only=True):
    pin_id: int
    node_id: int
    pin_number: int
    reserved_by: str
    reserved_at: str
    expires_at: str | None


class PinReservations(BoardShape, frozen=True, kw_only=True):
    reservations: Sequence[PinReservation]
    count: int


class EndedReservations(BoardShape, frozen=True, kw_only=True):
    message: str
    cleaned_count: int


class ReservedPin(BoardShape, frozen=True, kw_only=True):
    message: str
    gpio_id: int
    client_id: str
    reserved_by: str
    expires_at: str | None


class ReleasedPin(BoardShape, frozen=True, kw_only=True):
    message: str
    gpio_id: int
    client_id: str


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


def node(board: Board, *, last_seen_ns: int | None, devices: Iterable[ShownPin] | None = None) -> ShownNode:
    """The documented fields under their names, then what we know beside them."""
    spec, status = board.spec, status_of(board)
    return projected(
        ShownNode,
        spec,
        board,
        id=number_of(board),
        status=status.state,
        deleted_at=None,
        memory=spec.memory_bytes,
        last_seen=spelled_or_null(last_seen_ns),
        agent=projected(ShownAgent, status, version=status.agent_version),
        declared_status=status.declared,
        conditions=[
            projected(ShownCondition, one, since=spelled_or_null(one.changed_at_ns))
            for one in board.conditions
        ],
        gpio_devices=UNSET if devices is None else list(devices),
    )


def cluster(found: Cluster, nodes: Iterable[ShownNode] | None = None) -> ShownCluster:
    return projected(
        ShownCluster,
        found.spec,
        found,
        id=number_of(found),
        status=cluster_state(found),
        deleted_at=None,
        nodes=UNSET if nodes is None else list(nodes),
    )


def cluster_state(found: Cluster) -> ClusterState:
    return found.status.state if found.status is not None else ClusterState.PENDING


def join_token(token: JoinToken, *, now_ns: int) -> ShownJoinToken:
    """All but the token, which nobody can show a second time."""
    spec, used = token.spec, token.status
    state = "used" if used is not None else "expired" if spec.expires_at_ns <= now_ns else "good"
    return projected(
        ShownJoinToken,
        spec,
        token,
        id=token.name,
        state=state,
        name=spec.board_name or None,
        used_at=spelled_or_null(used.used_at_ns if used is not None else None),
        used_by=used.used_by if used is not None else None,
    )


def approval(found: Approval) -> ShownApproval:
    spec, status = found.spec, found.status
    return projected(
        ShownApproval,
        spec,
        id=found.name,
        node_id=spec.board,
        name=spec.board_name,
        state=status.state if status is not None else ApprovalState.PENDING,
        key=spec.key_digest,
        decided_by=(status.decided_by or None) if status is not None else None,
    )


def gpio_device(device: Device) -> ShownPin:
    """The documented fields, then what was wanted of the pin and who holds it."""
    spec, status = device.spec, gpio_kinds.status_of(device)
    lease = status.lease
    return projected(
        ShownPin,
        spec,
        status,
        device,
        id=device_number(device),
        node_id=spec.board,
        pin_number=spec.pin,
        pull_mode=spec.pull,
        value=json_number(status.value) if status.value is not None else spec.level,
        status=status.state,
        reserved_by=lease.holder if lease is not None else None,
        reserved_at=spelled_or_null(lease.taken_at_ns if lease is not None else None),
        reservation_ttl=spelled_or_null(lease.expires_at_ns if lease is not None else None),
        wanted=spec.level,
    )
