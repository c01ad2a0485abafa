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
from enum import StrEnum

import msgspec

from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.resources import Kind, Nothing, Resource

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


def credential_name(tenant: str, node_id: str) -> str:
    """What revocations of a daemon are about: the node as this tenant's, and no other's."""
    return f"edge/{tenant}/{node_id}"


def check_tenant(tenant: str, *, field: str = "tenant") -> str:
    if TENANT_PATTERN.fullmatch(tenant) is None:
        raise InvalidArgument(
            f"{tenant[:80]!r} is no tenant: 1 to 63 of a-z, 0-9 and inner hyphens are", field=field
        )
    return tenant


def daemon_scope(scope: str, node_id: str) -> str:
    """Where a freeze of one daemon lies, below its tenant's scope."""
    return f"{scope}/daemon/{node_id}"


def worker_scope(worker: str) -> str:
    """Where a freeze of one worker lies; workers belong to no tenant."""
    return f"worker/{worker}"


class EdgeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Fields may be added later: what is stored keeps field names, and new fields have defaults."""


class PayloadDialect(StrEnum):
    DOCUMENTED = "documented"
    """The documented dialect, which our own daemon uses."""
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


class NodeResources(EdgeSpec, frozen=True):
    gpu_count: int = 0
    vram_gb: int = 0
    cpu_cores: int = 0
    memory_gb: int = 0
    runtimes: tuple[str, ...] = ()


class Capabilities(EdgeSpec, frozen=True):
    os: str = ""
    arch: str = ""
    local_tools: tuple[str, ...] = ()
    mount_points: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    node: NodeResources = NodeResources()


class UsedRequest(EdgeSpec, frozen=True):
    """A rotation request that must not work twice."""

    digest: bytes
    at_ns: int
    until_ns: int = 0
    """When it would be refused for its age anyway; 0 if it carries no time."""
    key_version: int = 0


class Former(EdgeSpec, frozen=True):
    """Credentials that were replaced, and are good until then on a stream that was open under them."""

    public_key: bytes
    token_id: str
    until_ns: int


EARLIER_LIMIT = 16
"""Credentials before the last that may still be in use: rotations within one overlap."""


class NodeSpec(EdgeSpec, frozen=True):
    display_name: str
    public_key: bytes
    """Empty for one that was revoked and may enrol again: it has no credentials until it does."""
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
    earlier: tuple[Former, ...] = ()
    """The same of rotations before the last, oldest first."""
    recent_nonces: tuple[UsedRequest, ...] = ()
    desired: Desired = Desired.ACTIVE
    shutdown_grace_seconds: float = 0.0
    config_again_at_ns: int = 0
    """When a rollout asked for a configuration that it refused to be sent once more, on whichever server."""
    revoked_at_ns: int | None = None

    def former(self, token_id: str) -> Former | None:
        """The replaced credentials of a token, if it is of those."""
        for one in (*self.earlier, self.previous):
            if one.token_id and one.token_id == token_id:
                return one
        return None

    @property
    def previous(self) -> Former:
        return Former(
            public_key=self.previous_public_key or self.public_key,
            token_id=self.previous_token_id,
            until_ns=self.previous_key_until_ns,
        )


class NodeStatus(EdgeSpec, frozen=True):
    state: NodeState
    since_ns: int
    capabilities: Capabilities = Capabilities()
    last_heartbeat_at_ns: int | None = None
    stream_id: str = ""
    dialect: PayloadDialect = PayloadDialect.DOCUMENTED
    config_version: str = ""
    config_refused: str = ""
    """Why it did not take the configuration that it was sent last; empty if it did, or has not said."""
    config_refused_version: str = ""
    """Of the configuration that it did not take."""
    config_refused_at_ns: int = 0
    hello_ms: int = 0
    """The time that its last hello was signed with: after a restart, nothing older opens a stream."""


class EnrollmentSpec(EdgeSpec, frozen=True):
    issued_to: str
    issued_by: str
    issued_at_ns: int
    expires_at_ns: int
    redeemed_at_ns: int | None = None
    redeemed_by: str = ""
    """The node's id."""
    revoked: bool = False
    node_id: str = ""
    """The only node that it is for; empty: for one that does not exist yet."""
    replace: bool = False
    """The node that it is for may be taken over with another key."""


class ChallengeSpec(EdgeSpec, frozen=True):
    """Of a machine that asked to come in, where several servers share a database."""

    sealed: bytes
    """The nonce and who asks, under the master key."""
    expires_at_ns: int


class RouteSpec(EdgeSpec, frozen=True):
    """Which worker an execution was routed to, where several servers share a database."""

    worker: str
    expires_at_ns: int


class BlacklistedSpec(EdgeSpec, frozen=True):
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


EVERY_TENANT = "*"


class WorkerSpec(EdgeSpec, frozen=True):
    role: WorkerRole
    """As the token said that it was let in with."""
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
    tenants: tuple[str, ...] = ()
    """Tenants that the worker acts for; `EVERY_TENANT` for all. Taken from its token."""

    def serves(self, tenant: str) -> bool:
        """Whether it acts for a tenant; for what belongs to none, only who acts for all does."""
        return EVERY_TENANT in self.tenants or (bool(tenant) and tenant in self.tenants)


class WorkerStatus(EdgeSpec, frozen=True):
    state: WorkerState
    since_ns: int
    last_heartbeat_at_ns: int | None = None
    """At the last change of state; between changes, heartbeats are kept in memory."""
    config_version: str = ""


class WorkerTokenSpec(EdgeSpec, frozen=True):
    node_id: str
    secret_hash: bytes
    issued_by: str
    issued_at_ns: int
    expires_at_ns: int
    redeemed_at_ns: int | None = None
    role: WorkerRole = WorkerRole.WORKER
    tenants: tuple[str, ...] = ()


EDGE_NODE: Kind[NodeSpec, NodeStatus] = Kind("edge-node", NodeSpec, NodeStatus)
ENROLLMENT: Kind[EnrollmentSpec, Nothing] = Kind("edge-enrollment", EnrollmentSpec, Nothing)
CHALLENGE: Kind[ChallengeSpec, Nothing] = Kind("edge-challenge", ChallengeSpec, Nothing)
ROUTE: Kind[RouteSpec, Nothing] = Kind("edge-route", RouteSpec, Nothing)
BLACKLISTED: Kind[BlacklistedSpec, Nothing] = Kind("edge-blacklist", BlacklistedSpec, Nothing)
WORKER: Kind[WorkerSpec, WorkerStatus] = Kind("edge-worker", WorkerSpec, WorkerStatus)
WORKER_TOKEN: Kind[WorkerTokenSpec, Nothing] = Kind("edge-worker-token", WorkerTokenSpec, Nothing)

EdgeNode = Resource[NodeSpec, NodeStatus]
Enrollment = Resource[EnrollmentSpec, Nothing]
Worker = Resource[WorkerSpec, WorkerStatus]
WorkerToken = Resource[WorkerTokenSpec, Nothing]

KINDS = (EDGE_NODE, ENROLLMENT, CHALLENGE, ROUTE, BLACKLISTED, WORKER, WORKER_TOKEN)
"""Of this room; others add theirs."""
