"""What REST answers with: each resource as its callers know it. Pure.

Lists show summaries, single resources everything. A rarely used field is left out unless it
was set.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.proxies.access import organization_of
from fleetplane.domains.proxies.configuration import labels_of
from fleetplane.domains.proxies.kinds import (
    Agent,
    ApiToken,
    Certificate,
    Membership,
    Organization,
    Upstream,
    User,
    VirtualHost,
    Workspace,
)
from fleetplane.domains.proxies.ports import Sighting
from fleetplane.domains.proxies.values import (
    AgentHealth,
    AgentState,
    Algorithm,
    CertificateState,
    DeploymentMode,
    HealthCheck,
    Location,
    OrganizationRole,
    TargetAgents,
    UpstreamServer,
)
from fleetplane.web.times import spelled, spelled_or_null


class View(msgspec.Struct, frozen=True, kw_only=True):
    pass


class OrganizationView(View, frozen=True):
    id: str
    name: str
    slug: str
    created_at: str
    updated_at: str


def organization(found: Organization) -> OrganizationView:
    return OrganizationView(
        id=found.name,
        name=found.spec.name,
        slug=found.spec.slug,
        created_at=spelled(found.created_at_ns),
        updated_at=spelled(found.updated_at_ns),
    )


class WorkspaceView(View, frozen=True):
    id: str
    organization_id: str
    name: str
    slug: str
    created_at: str


def workspace(found: Workspace) -> WorkspaceView:
    return WorkspaceView(
        id=found.name,
        organization_id=organization_of(found.scope),
        name=found.spec.name,
        slug=found.spec.slug,
        created_at=spelled(found.created_at_ns),
    )


class UserView(View, frozen=True):
    id: str
    email: str
    name: str
    is_system_admin: bool
    disabled: bool
    created_at: str


def user(found: User) -> UserView:
    return UserView(
        id=found.name,
        email=found.spec.email,
        name=found.spec.name,
        is_system_admin=found.spec.is_system_admin,
        disabled=found.spec.disabled,
        created_at=spelled(found.created_at_ns),
    )


class MemberView(View, frozen=True):
    user_id: str
    email: str
    name: str
    role: OrganizationRole
    created_at: str


def member(found: Membership, of: User | None) -> MemberView:
    return MemberView(
        user_id=found.name,
        email=of.spec.email if of is not None else "",
        name=of.spec.name if of is not None else "",
        role=found.spec.role,
        created_at=spelled(found.created_at_ns),
    )


class ApiTokenView(View, frozen=True):
    id: str
    organization_id: str
    name: str
    role: OrganizationRole
    created_by: str
    created_at: str
    expires_at: str | None
    token: str | UnsetType = UNSET
    """Only in the answer that made it."""


def api_token(found: ApiToken, token: str | UnsetType = UNSET) -> ApiTokenView:
    return ApiTokenView(
        id=found.name,
        organization_id=organization_of(found.scope),
        name=found.spec.name,
        role=found.spec.role,
        created_by=found.spec.created_by,
        created_at=spelled(found.created_at_ns),
        expires_at=spelled_or_null(found.spec.expires_at_ns),
        token=token,
    )


class AgentView(View, frozen=True, kw_only=True):
    id: str
    workspace_id: str
    name: str
    hostname: str
    ip_address: str
    version: str
    state: AgentState
    deployment_mode: DeploymentMode
    last_seen_at: str | None
    capabilities: tuple[str, ...]
    labels: dict[str, str]
    health: AgentHealth | UnsetType | None = UNSET
    """Only of a single agent; null before its first report."""
    created_at: str


def agent(found: Agent, seen: Sighting | None, *, detailed: bool = False) -> AgentView:
    status = found.status
    last_seen = seen.last_seen_at_ns if seen else status.last_seen_at_ns if status else None
    health: AgentHealth | UnsetType | None = UNSET
    if detailed:
        health = seen.health if seen and seen.health else status.health if status else None
    return AgentView(
        id=found.name,
        workspace_id=_workspace_of(found.scope),
        name=found.spec.name,
        hostname=status.hostname if status else "",
        ip_address=status.ip_address if status else "",
        version=status.version if status else "",
        state=agent_state(found),
        deployment_mode=status.deployment_mode if status else DeploymentMode.STANDALONE,
        last_seen_at=spelled_or_null(last_seen),
        capabilities=status.capabilities if status else (),
        labels=labels_of(found),
        health=health,
        created_at=spelled(found.created_at_ns),
    )


def agent_state(found: Agent) -> AgentState:
    """Of an agent that never came: offline."""
    return found.status.state if found.status is not None else AgentState.OFFLINE


def _workspace_of(scope: str) -> str:
    return scope.rpartition("/")[2]


class VirtualHostView(View, frozen=True, kw_only=True):
    id: str
    workspace_id: str
    name: str
    server_name: str
    listen_port: int
    ssl_enabled: bool
    ssl_certificate_id: str | None
    http2_enabled: bool
    http3_enabled: bool | UnsetType = UNSET
    locations: tuple[Location, ...] | UnsetType = UNSET
    """Only of a single virtual host."""
    custom_directives: dict[str, str] | UnsetType = UNSET
    target_agents: TargetAgents
    warnings: tuple[str, ...] | UnsetType = UNSET
    created_at: str
    updated_at: str


def virtual_host(
    found: VirtualHost, *, detailed: bool = False, warnings: tuple[str, ...] = ()
) -> VirtualHostView:
    spec = found.spec
    return VirtualHostView(
        id=found.name,
        workspace_id=_workspace_of(found.scope),
        name=spec.name,
        server_name=spec.server_name,
        listen_port=spec.listen_port,
        ssl_enabled=spec.ssl_enabled,
        ssl_certificate_id=spec.ssl_certificate_id,
        http2_enabled=spec.http2_enabled,
        http3_enabled=spec.http3_enabled or UNSET,
        locations=spec.locations if detailed else UNSET,
        custom_directives=spec.custom_directives if detailed and spec.custom_directives else UNSET,
        target_agents=spec.target_agents,
        warnings=warnings or UNSET,
        created_at=spelled(found.created_at_ns),
        updated_at=spelled(found.updated_at_ns),
    )


class UpstreamView(View, frozen=True, kw_only=True):
    id: str
    workspace_id: str
    name: str
    algorithm: Algorithm
    servers: tuple[UpstreamServer, ...]
    health_check: HealthCheck
    keepalive_connections: int | UnsetType = UNSET
    created_at: str
    updated_at: str


def upstream(found: Upstream) -> UpstreamView:
    spec = found.spec
    return UpstreamView(
        id=found.name,
        workspace_id=_workspace_of(found.scope),
        name=spec.name,
        algorithm=spec.algorithm,
        servers=spec.servers,
        health_check=spec.health_check,
        keepalive_connections=spec.keepalive_connections or UNSET,
        created_at=spelled(found.created_at_ns),
        updated_at=spelled(found.updated_at_ns),
    )


class CertificateView(View, frozen=True, kw_only=True):
    """Never with its private key."""

    id: str
    workspace_id: str
    domain: str
    is_wildcard: bool
    provider: str
    status: CertificateState
    issued_at: str | None
    expires_at: str | None
    auto_renew: bool
    error: str | UnsetType = UNSET
    created_at: str


def certificate(found: Certificate, *, now_ns: int) -> CertificateView:
    status = found.status
    assert status is not None
    expired = status.expires_at_ns is not None and status.expires_at_ns <= now_ns
    return CertificateView(
        id=found.name,
        workspace_id=_workspace_of(found.scope),
        domain=found.spec.domain,
        is_wildcard=found.spec.domain.startswith("*."),
        provider=found.spec.provider,
        status=CertificateState.EXPIRED if expired else status.state,
        issued_at=spelled_or_null(status.issued_at_ns),
        expires_at=spelled_or_null(status.expires_at_ns),
        auto_renew=found.spec.auto_renew,
        error=status.error or UNSET,
        created_at=spelled(found.created_at_ns),
    )
