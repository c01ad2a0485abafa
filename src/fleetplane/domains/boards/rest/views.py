"""Boards and what belongs to them as REST shows them: one function a shape. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET

from fleetplane.domains.boards.inventory.boards import status_of
from fleetplane.domains.boards.kinds import (
    Approval,
    ApprovalState,
    Board,
    Cluster,
    ClusterState,
    JoinToken,
    number_of,
)
from fleetplane.domains.boards.pins import kinds as gpio_kinds
from fleetplane.domains.boards.pins.kinds import Device, device_number
from fleetplane.domains.boards.rest.shapes.inventory import (
    ShownAgent,
    ShownApproval,
    ShownCluster,
    ShownCondition,
    ShownJoinToken,
    ShownNode,
)
from fleetplane.domains.boards.rest.shapes.pins import ShownPin
from fleetplane.domains.boards.wire.message_json import json_number
from fleetplane.kernel.values.times import spelled, spelled_or_null


def node(board: Board, *, last_seen_ns: int | None, devices: Iterable[ShownPin] | None = None) -> ShownNode:
    """The documented fields under their names, then what we know beside them."""
    spec, status = board.spec, status_of(board)
    return ShownNode(
        id=number_of(board),
        name=spec.name,
        ip_address=spec.ip_address,
        mac_address=spec.mac_address,
        status=status.state,
        role=spec.role,
        created_at=spelled(board.created_at_ns),
        updated_at=spelled(board.updated_at_ns),
        deleted_at=None,
        architecture=spec.architecture,
        model=spec.model,
        serial_number=spec.serial_number,
        cpu_cores=spec.cpu_cores,
        memory=spec.memory_bytes,
        cluster_id=spec.cluster_id,
        kube_version=spec.kube_version,
        node_name=spec.node_name,
        os_version=spec.os_version,
        kernel_version=spec.kernel_version,
        last_seen=spelled_or_null(last_seen_ns),
        agent=ShownAgent(
            version=status.agent_version,
            address=status.address,
            port=status.port,
            capabilities=list(status.capabilities),
            plaintext=status.plaintext,
            registered_at=spelled_or_null(status.registered_at_ns),
            certificate_expires_at=spelled_or_null(status.certificate_expires_at_ns),
        ),
        declared_status=status.declared,
        labels=board.labels,
        conditions=[
            ShownCondition(
                type=condition.type,
                status=condition.status,
                reason=condition.reason,
                message=condition.message,
                since=spelled_or_null(condition.changed_at_ns),
            )
            for condition in board.conditions
        ],
        gpio_devices=UNSET if devices is None else list(devices),
    )


def cluster(found: Cluster, nodes: Iterable[ShownNode] | None = None) -> ShownCluster:
    spec = found.spec
    return ShownCluster(
        id=number_of(found),
        name=spec.name,
        description=spec.description,
        status=cluster_state(found),
        version=spec.version,
        created_at=spelled(found.created_at_ns),
        updated_at=spelled(found.updated_at_ns),
        deleted_at=None,
        master_endpoint=spec.master_endpoint,
        nodes=UNSET if nodes is None else list(nodes),
    )


def cluster_state(found: Cluster) -> ClusterState:
    return found.status.state if found.status is not None else ClusterState.PENDING


def join_token(token: JoinToken, *, now_ns: int) -> ShownJoinToken:
    """All but the token, which nobody can show a second time."""
    spec, used = token.spec, token.status
    state = "used" if used is not None else "expired" if spec.expires_at_ns <= now_ns else "good"
    return ShownJoinToken(
        id=token.name,
        state=state,
        purpose=spec.purpose,
        name=spec.board_name or None,
        role=spec.role,
        cluster_id=spec.cluster_id,
        replaces=spec.replaces,
        created_by=spec.created_by,
        created_at=spelled(token.created_at_ns),
        expires_at=spelled(spec.expires_at_ns),
        used_at=spelled_or_null(used.used_at_ns if used is not None else None),
        used_by=used.used_by if used is not None else None,
    )


def approval(found: Approval) -> ShownApproval:
    spec, status = found.spec, found.status
    return ShownApproval(
        id=found.name,
        node_id=spec.board,
        name=spec.board_name,
        state=status.state if status is not None else ApprovalState.PENDING,
        key=spec.key_digest,
        serial_number=spec.serial_number,
        mac_address=spec.mac_address,
        address=spec.address,
        requested_at=spelled(spec.requested_at_ns),
        decided_by=(status.decided_by or None) if status is not None else None,
    )


def gpio_device(device: Device) -> ShownPin:
    """The documented fields, then what was wanted of the pin and who holds it."""
    spec, status = device.spec, gpio_kinds.status_of(device)
    lease = status.lease
    return ShownPin(
        id=device_number(device),
        name=spec.name,
        description=spec.description,
        node_id=spec.board,
        pin_number=spec.pin,
        direction=spec.direction,
        pull_mode=spec.pull,
        value=json_number(status.value) if status.value is not None else spec.level,
        device_type=spec.device_type,
        status=status.state,
        config=spec.config,
        created_at=spelled(device.created_at_ns),
        updated_at=spelled(device.updated_at_ns),
        reserved_by=lease.holder if lease is not None else None,
        reserved_at=spelled_or_null(lease.taken_at_ns if lease is not None else None),
        reservation_ttl=spelled_or_null(lease.expires_at_ns if lease is not None else None),
        wanted=spec.level,
        value_at=spelled_or_null(status.value_at_ns),
        reason=status.reason,
        message=status.message,
    )
