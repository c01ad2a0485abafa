"""The values that virtual hosts, upstreams and their kin are made of.

One model from the database to JSON: these structs are what a request's body is read into, what
is stored and what is answered. A field that callers rarely use is `UNSET` unless they named it,
and is then left out of the answer too; `UNSET` is false, so `server.down or False` reads it.
Shape only: what makes sense together is decided in `rules`.

New ids, unique values, and refusals that every registry shares.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from msgspec import UNSET, UnsetType

from fleetplane.domains.proxies.typed_options import Access, Cache, Canaries, Content, Resolver, Respond
from fleetplane.domains.proxies.typed_options import Value as Value  # noqa: PLC0414  # callers know it from here

MAX_FAILS = 3
FAIL_TIMEOUT_SECONDS = 30
HEALTHY_THRESHOLD = 2
UNHEALTHY_THRESHOLD = 3


class Algorithm(StrEnum):
    ROUND_ROBIN = "round_robin"
    LEAST_CONNECTIONS = "least_connections"
    IP_HASH = "ip_hash"
    WEIGHTED_ROUND_ROBIN = "weighted_round_robin"


class UpstreamServer(Value, frozen=True):
    address: str
    """`host:port` or `[v6]:port`."""
    weight: int = 1
    backup: bool = False
    max_fails: int = MAX_FAILS
    fail_timeout: int = FAIL_TIMEOUT_SECONDS
    """Seconds."""
    down: bool | UnsetType = UNSET
    draining: bool | UnsetType = UNSET
    """No new requests; those that it has are finished."""
    slow_start: int | UnsetType = UNSET
    """Seconds in which its share grows after it was away."""
    max_connections: int | UnsetType = UNSET


class HealthCheck(Value, frozen=True):
    enabled: bool
    path: str = "/"
    interval: int = 10
    """Seconds."""
    timeout: int = 5
    """Seconds; less than the interval."""
    healthy_threshold: int | UnsetType = UNSET
    unhealthy_threshold: int | UnsetType = UNSET


class Header(Value, frozen=True):
    name: str
    value: str
    always: bool | UnsetType = UNSET
    """On a location that proxies: true sets it on the answer, false on the request that is passed on."""


class RewriteRule(Value, frozen=True):
    pattern: str
    replacement: str
    flag: Literal["last", "break", "redirect", "permanent"] | UnsetType = UNSET


class Location(Value, frozen=True):
    """Exactly one of `upstream_id`, `proxy_pass`, `root` and `respond` says what is served."""

    path: str
    upstream_id: str | UnsetType = UNSET
    proxy_pass: str | UnsetType = UNSET
    root: str | UnsetType = UNSET
    index: str | UnsetType = UNSET
    custom_headers: tuple[Header, ...] | UnsetType = UNSET
    rewrite_rules: tuple[RewriteRule, ...] | UnsetType = UNSET
    streaming: bool | UnsetType = UNSET
    """On a location that proxies: pass every byte on as it comes, for server-sent events."""
    custom_directives: dict[str, str] | UnsetType = UNSET
    access: Access | UnsetType = UNSET
    content: Content | UnsetType = UNSET
    respond: Respond | UnsetType = UNSET
    canaries: Canaries | UnsetType = UNSET
    resolver: Resolver | UnsetType = UNSET
    cache: Cache | UnsetType = UNSET


class AllAgents(Value, frozen=True, tag_field="type", tag="all"):
    """Every agent of the workspace."""


class SelectedAgents(Value, frozen=True, tag_field="type", tag="selector"):
    """The agents whose labels match."""

    label_selector: str


class NamedAgents(Value, frozen=True, tag_field="type", tag="agents"):
    agent_ids: tuple[str, ...]


TargetAgents = AllAgents | SelectedAgents | NamedAgents


class DeploymentMode(StrEnum):
    DOCKER_SIDECAR = "docker_sidecar"
    KUBERNETES_SIDECAR = "kubernetes_sidecar"
    STANDALONE = "standalone"


class AgentState(StrEnum):
    ONLINE = "online"
    DEGRADED = "degraded"
    OFFLINE = "offline"


class AgentHealth(Value, frozen=True):
    """The last report of an agent, as REST tells it."""

    nginx_status: Literal["running", "stopped", "unknown"]
    nginx_uptime_seconds: int
    active_connections: int
    requests_per_second: float
    cpu_percent: float
    memory_used_mb: int
    config_version: int


class Hands(StrEnum):
    """Whose NGINX serves beside an agent that found one."""

    OBSERVING = "observing"
    TAKING_OVER = "taking_over"
    TAKEN_OVER = "taken_over"
    GIVING_BACK = "giving_back"


class Observed(Value, frozen=True):
    """An NGINX that an agent found on its machine, as it reports it."""

    state: Hands
    config_path: str
    nginx_version: str
    modules: tuple[str, ...]
    workers: int
    listening: tuple[str, ...]
    """The TCP addresses that it listens on."""
    files: int
    bytes: int
    digest: str
    """Of its configuration: another one after every change."""
    problems: tuple[str, ...]
    """What of its configuration is not shown, and why."""
    logs: tuple[str, ...]
    unit: str
    """The service that started it, if one did."""
    error: str
    """Why the last change of hands failed."""


class CertificateState(StrEnum):
    PENDING = "pending"
    ISSUING = "issuing"
    ACTIVE = "active"
    RENEWING = "renewing"
    EXPIRED = "expired"
    FAILED = "failed"
    REVOKED = "revoked"


class RevocationReason(StrEnum):
    UNSPECIFIED = "unspecified"
    KEY_COMPROMISE = "key_compromise"
    AFFILIATION_CHANGED = "affiliation_changed"
    SUPERSEDED = "superseded"
    CESSATION_OF_OPERATION = "cessation_of_operation"


class DeploymentState(StrEnum):
    """How far one agent is with one version."""

    PENDING = "pending"
    VALIDATING = "validating"
    APPLYING = "applying"
    SUCCESS = "success"
    FAILED = "failed"
    ROLLED_BACK = "rolled_back"
    SUPERSEDED = "superseded"
    """Never in service: a newer version came first."""


class OrganizationRole(StrEnum):
    """From least to most; each may do what those before it may."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"
    OWNER = "owner"
