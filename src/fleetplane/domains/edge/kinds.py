"""What the edge domain keeps about who may come in: daemons, tokens, workers.

    tenant/{tenant}   EDGE_NODE (named by the node's id), ENROLLMENT (by jti)
    (everywhere)      BLACKLISTED (by jti), WORKER (by the node's id), WORKER_TOKEN (by id)

A daemon belongs to one tenant. The claim (EDGE_NODE, "", "node_id", id), held by the tenant's
scope, keeps two tenants from owning one daemon; a revoked daemon's record stays and its claim is
given back, so that another tenant may enrol the same machine.

Of a daemon's record, the spec is written by enrolment, key rotation and operators, the status by
its stream. Tags are the operators' and stand in the spec; labels are the daemon's own and stand
in the status.
"""

from __future__ import annotations

import re
import uuid
from enum import StrEnum

import msgspec

from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.resources import Kind, Resource

PUBLIC_KEY_BYTES = 32
NODE_CLAIM = "node_id"
TENANT_PATTERN = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
"""1 to 63 characters, as in a host name's label."""


def tenant_scope(tenant: str) -> str:
    return f"tenant/{tenant}"


def tenant_of(scope: str) -> str:
    """The tenant whose scope this is."""
    return scope.removeprefix("tenant/")


def principal_name(node_id: str) -> str:
    """What a daemon is called wherever callers are named: in audits, sessions, revocations."""
    return f"edge/{node_id}"


def check_tenant(tenant: str, *, field: str = "tenant") -> str:
    if TENANT_PATTERN.fullmatch(tenant) is None:
        raise InvalidArgument(
            f"{tenant[:80]!r} is no tenant: 1 to 63 of a-z, 0-9 and inner hyphens are", field=field
        )
    return tenant


def check_uuid(text: str, *, field: str) -> str:
    """A UUID in its usual form; returned in lower case."""
    try:
        found = str(uuid.UUID(text))
    except ValueError as error:
        raise InvalidArgument(f"{field} must be a UUID, not {text[:80]!r}", field=field) from error
    if found != text.lower():  # UUID() also takes braces, urn: and missing hyphens
        raise InvalidArgument(f"{field} must be a hyphenated UUID, not {text[:80]!r}", field=field)
    return found


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """Fields may be added later: what is stored keeps field names, and new fields have defaults."""


class Nothing(Spec, frozen=True):
    """For kinds that have no status of their own."""


class Dialect(StrEnum):
    DOCUMENTED = "documented"
    """The documented one, which our own daemon speaks."""
    LEGACY = "legacy"
    """The one of daemons already in the field."""


# Edge daemons.


class Desired(StrEnum):
    ACTIVE = "active"
    DRAINING = "draining"
    SHUTDOWN = "shutdown"


class NodeState(StrEnum):
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"
    REVOKED = "revoked"


class NodeResources(Spec, frozen=True):
    gpu_count: int = 0
    vram_gb: int = 0
    cpu_cores: int = 0
    memory_gb: int = 0
    runtimes: tuple[str, ...] = ()


class Capabilities(Spec, frozen=True):
    os: str = ""
    arch: str = ""
    local_tools: tuple[str, ...] = ()
    mount_points: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    node: NodeResources = NodeResources()


class UsedRequest(Spec, frozen=True):
    """A rotation request that must not work twice."""

    digest: bytes
    at_ns: int
    until_ns: int = 0
    """When it would be refused for its age anyway; 0 if it carries no time."""
    key_version: int = 0


class NodeSpec(Spec, frozen=True):
    display_name: str
    public_key: bytes
    token_id: str
    """The jti of the token that is good now."""
    token_expires_at_ns: int
    enrolled_at_ns: int
    tags: tuple[str, ...] = ()
    key_version: int = 1
    previous_public_key: bytes = b""
    previous_token_id: str = ""
    previous_key_until_ns: int = 0
    """Until then the stream that was open at a rotation may go on under the previous key and token."""
    recent_nonces: tuple[UsedRequest, ...] = ()
    desired: Desired = Desired.ACTIVE
    shutdown_grace_seconds: float = 0.0
    revoked_at_ns: int | None = None


class NodeStatus(Spec, frozen=True):
    state: NodeState
    since_ns: int
    capabilities: Capabilities = Capabilities()
    last_heartbeat_at_ns: int | None = None
    stream_id: str = ""
    dialect: Dialect = Dialect.DOCUMENTED
    config_version: str = ""


class EnrollmentSpec(Spec, frozen=True):
    issued_to: str
    issued_by: str
    issued_at_ns: int
    expires_at_ns: int
    redeemed_at_ns: int | None = None
    redeemed_by: str = ""
    """The node's id."""
    revoked: bool = False


class BlacklistedSpec(Spec, frozen=True):
    node_id: str
    reason: str
    at_ns: int
    expires_at_ns: int
    """When the token would have ended anyway."""


# Workers: nodes of the cluster that can be dialled.


class WorkerRole(StrEnum):
    CONTROLLER = "controller"
    WORKER = "worker"
    HYBRID = "hybrid"
    RELAY_COORDINATOR = "relay-coordinator"


class WorkerState(StrEnum):
    ACTIVE = "active"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"


class WorkerSpec(Spec, frozen=True):
    role: WorkerRole
    public_key: bytes
    attested_at_ns: int
    token_id: str
    token_expires_at_ns: int
    capabilities: NodeResources = NodeResources()
    tags: tuple[str, ...] = ()
    grpc_address: str = ""
    registered_at_ns: int | None = None
    """None until it registers, and again after it deregistered."""
    draining: bool = False
    """What the operators want."""


class WorkerStatus(Spec, frozen=True):
    state: WorkerState
    since_ns: int
    last_heartbeat_at_ns: int | None = None
    """At the last change of state; between changes, heartbeats are kept in memory."""
    config_version: str = ""


class WorkerTokenSpec(Spec, frozen=True):
    node_id: str
    secret_hash: bytes
    issued_by: str
    issued_at_ns: int
    expires_at_ns: int
    redeemed_at_ns: int | None = None


EDGE_NODE: Kind[NodeSpec, NodeStatus] = Kind("edge-node", NodeSpec, NodeStatus)
ENROLLMENT: Kind[EnrollmentSpec, Nothing] = Kind("edge-enrollment", EnrollmentSpec, Nothing)
BLACKLISTED: Kind[BlacklistedSpec, Nothing] = Kind("edge-blacklist", BlacklistedSpec, Nothing)
WORKER: Kind[WorkerSpec, WorkerStatus] = Kind("edge-worker", WorkerSpec, WorkerStatus)
WORKER_TOKEN: Kind[WorkerTokenSpec, Nothing] = Kind("edge-worker-token", WorkerTokenSpec, Nothing)

EdgeNode = Resource[NodeSpec, NodeStatus]
Enrollment = Resource[EnrollmentSpec, Nothing]
Worker = Resource[WorkerSpec, WorkerStatus]
WorkerToken = Resource[WorkerTokenSpec, Nothing]

KINDS = (EDGE_NODE, ENROLLMENT, BLACKLISTED, WORKER, WORKER_TOKEN)
"""Of this room; others add theirs."""
