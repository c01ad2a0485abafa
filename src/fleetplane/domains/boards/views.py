"""Boards and what belongs to them as REST shows them: one function a shape. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from fleetplane.domains.boards import gpio_kinds
from fleetplane.domains.boards.gpio_kinds import Device, device_number
from fleetplane.domains.boards.kinds import (
    Approval,
    Board,
    Cluster,
    ClusterState,
    JoinToken,
    number_of,
)
from fleetplane.domains.boards.registry import status_of
from fleetplane.web.times import spelled, spelled_or_null

Json = dict[str, Any]


def node(board: Board, *, last_seen_ns: int | None, devices: Iterable[Json] | None = None) -> Json:
    """The documented fields under their names, then what we know beside them."""
    spec, status = board.spec, status_of(board)
    told: Json = {
        "id": number_of(board),
        "name": spec.name,
        "ip_address": spec.ip_address,
        "mac_address": spec.mac_address,
        "status": status.state,
        "role": spec.role,
        "created_at": spelled(board.created_at_ns),
        "updated_at": spelled(board.updated_at_ns),
        "deleted_at": None,
        "architecture": spec.architecture,
        "model": spec.model,
        "serial_number": spec.serial_number,
        "cpu_cores": spec.cpu_cores,
        "memory": spec.memory_bytes,
        "cluster_id": spec.cluster_id,
        "kube_version": spec.kube_version,
        "node_name": spec.node_name,
        "os_version": spec.os_version,
        "kernel_version": spec.kernel_version,
        "last_seen": spelled_or_null(last_seen_ns),
        "agent": {
            "version": status.agent_version,
            "address": status.address,
            "port": status.port,
            "capabilities": list(status.capabilities),
            "plaintext": status.plaintext,
            "registered_at": spelled_or_null(status.registered_at_ns),
            "certificate_expires_at": spelled_or_null(status.certificate_expires_at_ns),
        },
        "declared_status": status.declared,
        "labels": board.labels,
        "conditions": [
            {
                "type": condition.type,
                "status": condition.status,
                "reason": condition.reason,
                "message": condition.message,
                "since": spelled_or_null(condition.changed_at_ns),
            }
            for condition in board.conditions
        ],
    }
    if devices is not None:
        told["gpio_devices"] = list(devices)
    return told


def cluster(found: Cluster, nodes: Iterable[Json] | None = None) -> Json:
    spec = found.spec
    told: Json = {
        "id": number_of(found),
        "name": spec.name,
        "description": spec.description,
        "status": cluster_state(found),
        "version": spec.version,
        "created_at": spelled(found.created_at_ns),
        "updated_at": spelled(found.updated_at_ns),
        "deleted_at": None,
        "master_endpoint": spec.master_endpoint,
    }
    if nodes is not None:
        told["nodes"] = list(nodes)
    return told


def cluster_state(found: Cluster) -> ClusterState:
    return found.status.state if found.status is not None else ClusterState.PENDING


def join_token(token: JoinToken, *, now_ns: int) -> Json:
    """All but the token, which nobody can show a second time."""
    spec, used = token.spec, token.status
    state = "used" if used is not None else "expired" if spec.expires_at_ns <= now_ns else "good"
    return {
        "id": token.name,
        "state": state,
        "purpose": spec.purpose,
        "name": spec.board_name or None,
        "role": spec.role,
        "cluster_id": spec.cluster_id,
        "replaces": spec.replaces,
        "created_by": spec.created_by,
        "created_at": spelled(token.created_at_ns),
        "expires_at": spelled(spec.expires_at_ns),
        "used_at": spelled_or_null(used.used_at_ns if used is not None else None),
        "used_by": used.used_by if used is not None else None,
    }


def approval(found: Approval) -> Json:
    spec, status = found.spec, found.status
    return {
        "id": found.name,
        "node_id": spec.board,
        "name": spec.board_name,
        "state": status.state if status is not None else "pending",
        "key": spec.key_digest,
        "serial_number": spec.serial_number,
        "mac_address": spec.mac_address,
        "address": spec.address,
        "requested_at": spelled(spec.requested_at_ns),
        "decided_by": (status.decided_by or None) if status is not None else None,
    }


def gpio_device(device: Device) -> Json:
    """The documented fields, then what was wanted of the pin and who holds it."""
    spec, status = device.spec, gpio_kinds.status_of(device)
    lease = status.lease
    return {
        "id": device_number(device),
        "name": spec.name,
        "description": spec.description,
        "node_id": spec.board,
        "pin_number": spec.pin,
        "direction": spec.direction,
        "pull_mode": spec.pull,
        "value": status.value if status.value is not None else spec.level,
        "device_type": spec.device_type,
        "status": status.state,
        "config": msgspec.structs.asdict(spec.config),
        "created_at": spelled(device.created_at_ns),
        "updated_at": spelled(device.updated_at_ns),
        "reserved_by": lease.holder if lease is not None else None,
        "reserved_at": spelled_or_null(lease.taken_at_ns if lease is not None else None),
        "reservation_ttl": spelled_or_null(lease.expires_at_ns if lease is not None else None),
        "wanted": spec.level,
        "value_at": spelled_or_null(status.value_at_ns),
        "reason": status.reason,
        "message": status.message,
    }
