"""Protobuf to kinds and back, for the documented services and the original ones. Pure.

Both families have the same nodes, states and roles; where they differ, the functions say so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from fleetplane.domains.boards.inventory.boards import Came, status_of
from fleetplane.domains.boards.joining.enrolment import RegisteredBoard, Registration, require_agent_port
from fleetplane.domains.boards.kinds import (
    AgentDialect,
    ApprovalState,
    Board,
    BoardRole,
    BoardState,
    Cluster,
    ClusterSpec,
    ClusterState,
    number_of,
)
from fleetplane.domains.boards.ports import (
    ProvisioningAction,
    ProvisioningAnswer,
    ProvisioningOrder,
    ProvisioningState,
)
from fleetplane.domains.boards.rules import TEXT_LIMIT, BoardFacts
from fleetplane.domains.boards.wire.message_json import enum_table, filled, known
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.resources import Condition
from fleetplane.kernel.values.times import NS
from fleetplane.kernel.values.timestamps import timestamp

CAPABILITIES_LIMIT = 64
HOST_KEYS_LIMIT = 16
_HOST_KEY = re.compile(r"[a-z0-9@.-]{1,64} [A-Za-z0-9+/=]{16,4096}")
CHECKS_LIMIT = 32
CHECK_NAME_LIMIT = 64
CHECK_MESSAGE_LIMIT = 256
WORKERS_LIMIT = 1024
CONFIG_LIMIT = 64
"""Settings of one provisioning order, and the characters of a value's name; values have 1024."""
MOMENT_LIMIT_SECONDS = 253_402_300_800
"""The year 10000, where a Timestamp ends."""

_STATES: Final[Mapping[BoardState, pi.NodeStatus]] = enum_table(BoardState, pi.NodeStatus, "NODE_STATUS_")
_ROLES: Final = enum_table(BoardRole, pi.NodeRole, "NODE_ROLE_")
_CLUSTER_STATES: Final = enum_table(ClusterState, pi.ClusterStatus, "CLUSTER_STATUS_")
_ACTIONS: Final = {
    pb.ProvisioningRequest.UNSPECIFIED: ProvisioningAction.PROVISION,
    pb.ProvisioningRequest.PROVISION: ProvisioningAction.PROVISION,
    pb.ProvisioningRequest.DEPROVISION: ProvisioningAction.DEPROVISION,
    pb.ProvisioningRequest.CHECK: ProvisioningAction.CHECK,
    pb.ProvisioningRequest.CANCEL: ProvisioningAction.CANCEL,
}
_PROVISIONING_STATES: Final = enum_table(ProvisioningState, pb.ProvisioningStep.ProvisioningState, "")


# Single values.


def moment_ns(said: Timestamp) -> int | None:
    """None for one that was not given or cannot be."""
    if not 0 < said.seconds < MOMENT_LIMIT_SECONDS or not 0 <= said.nanos < NS:
        return None
    return said.seconds * NS + said.nanos


def node_status(state: BoardState) -> pi.NodeStatus:
    return _STATES[state]


def state(said: int, *, field: str = "status") -> BoardState | None:
    """None if nothing is said."""
    return known(said, _STATES, field)


def role(said: int) -> BoardRole | None:
    return known(said, _ROLES, "role")


def cluster_state(said: int) -> ClusterState | None:
    return known(said, _CLUSTER_STATES, "status")


# Boards.


def node(board: Board, *, last_seen_ns: int | None, devices: Iterable[pi.GPIODevice] = ()) -> pi.Node:
    spec, status = board.spec, status_of(board)
    return filled(
        pi.Node,
        spec,
        board,
        id=number_of(board),
        status=_STATES[status.state],
        role=_ROLES[spec.role],
        memory=spec.memory_bytes,
        last_seen=timestamp(last_seen_ns),
        gpio_devices=devices,
    )


def created_facts(request: pi.CreateNodeRequest) -> BoardFacts:
    return _machine(request)


def updated_facts(request: pi.UpdateNodeRequest) -> BoardFacts:
    """Presence does not matter: what is sent as blank is not said."""
    return _machine(
        request,
        kube_version=request.kube_version,
        node_name=request.node_name,
        os_version=request.os_version,
        kernel_version=request.kernel_version,
    )


def is_registration(request: pi.UpdateNodeRequest) -> bool:
    """Whether an agent says again who it is, as it does after a restart, and not only how it is."""
    return bool(request.ip_address or request.mac_address or request.name or request.architecture)


def _machine(
    said: pi.CreateNodeRequest | pi.UpdateNodeRequest | pb.NodeRegistration, **more: str
) -> BoardFacts:
    return BoardFacts(
        name=said.name,
        ip_address=said.ip_address,
        mac_address=said.mac_address,
        architecture=said.architecture,
        model=said.model,
        serial_number=said.serial_number,
        cpu_cores=said.cpu_cores,
        memory_bytes=said.memory,
        role=role(said.role),
        cluster_id=said.cluster_id if said.HasField("cluster_id") else None,
        **more,
    )


# Clusters.


def cluster(found: Cluster, nodes: Iterable[pi.Node]) -> pi.Cluster:
    return filled(
        pi.Cluster,
        found.spec,
        found,
        id=number_of(found),
        status=_CLUSTER_STATES[found.status.state] if found.status is not None else None,
        nodes=nodes,
    )


def cluster_spec(request: pi.CreateClusterRequest) -> ClusterSpec:
    return ClusterSpec(
        name=request.name,
        description=request.description,
        version=request.version,
        master_endpoint=request.master_endpoint,
    )


def cluster_changes(request: pi.UpdateClusterRequest) -> dict[str, str]:
    """The fields that are there, blank ones included: here presence says what is meant."""
    fields = ("name", "description", "version", "master_endpoint")
    return {field: getattr(request, field) for field in fields if request.HasField(field)}


# Registration.


def registration(request: pb.NodeRegistration, *, peer_address: str, default_port: int) -> Registration:
    """What is said; the address it came from stands in where none is given."""
    if len(request.capabilities) > CAPABILITIES_LIMIT:
        raise InvalidArgument(f"more than {CAPABILITIES_LIMIT} capabilities", field="capabilities")
    facts = _machine(request, os_version=request.os_version, kernel_version=request.kernel_version)
    came = Came(
        address=facts.ip_address or peer_address,
        port=require_agent_port(request.agent_port) or default_port,
        dialect=AgentDialect.FLEETPLANE,
        agent_version=text("agent_version", request.agent_version),
        capabilities=tuple(text("capabilities", one) for one in request.capabilities),
        boot_id=text("boot_id", request.boot_id),
        labels=dict(request.labels),
    )
    return Registration(
        facts=facts,
        came=came,
        join_token=request.join_token,
        csr_pem=request.csr_pem,
        claimed_id=request.node_id,
        ssh_host_keys=_host_keys(request.ssh_host_keys),
    )


def _host_keys(lines: Sequence[str]) -> tuple[str, ...]:
    """Type and key of each line, as in OpenSSH's `*.pub` files; anything else is refused."""
    if len(lines) > HOST_KEYS_LIMIT:
        raise InvalidArgument(f"more than {HOST_KEYS_LIMIT} keys", field="ssh_host_keys")
    for line in lines:
        if not _HOST_KEY.fullmatch(line):
            raise InvalidArgument("is not the type and base64 of a public key", field="ssh_host_keys")
    return tuple(lines)


_WAITING: Final = {
    ApprovalState.PENDING: ("PENDING_APPROVAL", "an operator must approve this key first; ask again later"),
    ApprovalState.REJECTED: ("REJECTED", "an operator has refused this key"),
}


def registration_response(
    done: RegisteredBoard, *, node: pi.Node | None, trust_pem: bytes, heartbeat_seconds: float
) -> pb.RegistrationResponse:
    response = pb.RegistrationResponse(
        success=done.approval is None,
        message="registered",
        ca_certificate_pem=trust_pem.decode(),
        heartbeat_interval_seconds=max(1, round(heartbeat_seconds)),
        already_registered=done.already_registered,
    )
    if done.approval is not None:
        response.reason, response.message = _WAITING[done.approval]
        response.status = pi.NODE_STATUS_DISCOVERED
    if done.issued is not None:
        response.certificate_pem = done.issued.certificate_pem.decode()
        response.certificate_not_after.FromDatetime(done.issued.not_after)
    if node is not None:
        response.node_id, response.status = node.id, node.status
        response.node.CopyFrom(node)
    return response


# Health.


def checks(report: pb.HealthReport, *, writer: str) -> list[Condition]:
    """What was checked on a board, or, from one of its services, how that service is."""
    if len(report.checks) > CHECKS_LIMIT:
        raise InvalidArgument(f"more than {CHECKS_LIMIT} checks", field="checks")
    prefix = "" if report.source in ("", "agent") else f"{_name('source', report.source)}/"
    found = [
        Condition(
            type=prefix + _name("checks.name", check.name),
            status=_name("checks.status", check.status),
            message=check.message[:CHECK_MESSAGE_LIMIT],
            writer=writer,
        )
        for check in report.checks
    ]
    if prefix:
        said = state(report.status)
        word = report.status_text or (said.value if said is not None else "reported")
        found.append(Condition(type=prefix.rstrip("/"), status=word[:CHECK_NAME_LIMIT], writer=writer))
    return found


def _name(field: str, said: str) -> str:
    if not said or len(said) > CHECK_NAME_LIMIT or not said.isprintable():
        raise InvalidArgument(f"{field} must have 1 to {CHECK_NAME_LIMIT} characters", field=field)
    return said


def text(field: str, said: str) -> str:
    if len(said) > TEXT_LIMIT or not said.isprintable():
        raise InvalidArgument(f"{field} must have at most {TEXT_LIMIT} printable characters", field=field)
    return said


# Provisioning.


def order(request: pb.ProvisioningRequest) -> ProvisioningOrder:
    if request.action not in _ACTIONS:
        raise InvalidArgument(f"action {request.action} is not known", field="action")
    if not (request.node_id or request.cluster_id or request.request_id):
        raise InvalidArgument("name a node or a cluster", field="node_id")
    if len(request.worker_node_ids) > WORKERS_LIMIT:
        raise InvalidArgument(f"more than {WORKERS_LIMIT} workers", field="worker_node_ids")
    if len(request.k3s_config) > CONFIG_LIMIT:
        raise InvalidArgument(f"more than {CONFIG_LIMIT} settings", field="k3s_config")
    for name, value in request.k3s_config.items():
        if len(name) > CONFIG_LIMIT or len(value) > 1024:
            raise InvalidArgument(f"k3s_config.{name[:CONFIG_LIMIT]} is too long", field="k3s_config")
    return ProvisioningOrder(
        action=_ACTIONS[request.action],
        board_id=request.node_id or None,
        cluster_id=request.cluster_id or None,
        role=role(request.role),
        worker_ids=tuple(request.worker_node_ids),
        k3s_version=text("k3s_version", request.k3s_version),
        k3s_channel=text("k3s_channel", request.k3s_channel),
        k3s_config=dict(request.k3s_config),
        credential_ref=text("credential_ref", request.credential_ref),
        request_id=text("request_id", request.request_id),
        dry_run=request.dry_run,
    )


def provisioning_response(answer: ProvisioningAnswer) -> pb.ProvisioningResponse:
    return filled(
        pb.ProvisioningResponse,
        answer,
        state=_PROVISIONING_STATES[answer.state],
        steps=[
            filled(pb.ProvisioningStep, step, state=_PROVISIONING_STATES[step.state]) for step in answer.steps
        ],
    )
