"""What REST answers with: each resource as its callers know it. Pure.

Lists show summaries, single resources everything. A rarely used field is left out unless it
was set.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.proxies.access import organization_of
from fleetplane.domains.proxies.agents.ports import AgentSighting
from fleetplane.domains.proxies.kinds.passwords import without_hashes
from fleetplane.domains.proxies.kinds.records import (
    AccessList,
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
from fleetplane.domains.proxies.kinds.values import (
    AgentHealth,
    AgentState,
    Algorithm,
    CertificateState,
    DeploymentMode,
    HealthCheck,
    Location,
    Observed,
    OrganizationRole,
    TargetAgents,
    UpstreamServer,
)
from fleetplane.domains.proxies.rules.alerts import Alert, Severity
from fleetplane.domains.proxies.rules.configuration import labels_of
from fleetplane.domains.proxies.typed_options import (
    Access,
    AccessRule,
    Balancing,
    BasicUser,
    CacheZone,
    Content,
    HostTls,
    Keepalive,
    Listening,
    Logging,
    Pages,
    Retries,
    UpstreamTls,
)
from fleetplane.kernel.values.times import spelled, spelled_or_null


class ProxyShape(msgspec.Struct, frozen=True, kw_only=True):
    pass


class OrganizationView(ProxyShape, frozen=True):
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


class WorkspaceView(ProxyShape, frozen=True):
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


class UserView(ProxyShape, frozen=True):
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


class MemberView(ProxyShape, frozen=True):
    user_id: str
    email: str
    name: str
    role: OrganizationRole
    created_at: str
    status: Literal["active", "invited"]
    """`invited` until the user accepts; without any rights meanwhile."""


class InvitationView(ProxyShape, frozen=True):
    organization_id: str
    organization_name: str
    role: OrganizationRole
    created_at: str


def invitation(found: Membership, of: Organization) -> InvitationView:
    return InvitationView(
        organization_id=of.name,
        organization_name=of.spec.name,
        role=found.spec.role,
        created_at=spelled(found.created_at_ns),
    )


def member(found: Membership, of: User | None) -> MemberView:
    return MemberView(
        user_id=found.name,
        email=of.spec.email if of is not None else "",
        name=of.spec.name if of is not None else "",
        role=found.spec.role,
        created_at=spelled(found.created_at_ns),
        status="active" if found.spec.accepted else "invited",
    )


class QuotaView(ProxyShape, frozen=True):
    quota: str
    used: int
    limit: int
    setting: str
    """Which one raises it; empty for what is fixed."""
    workspace_id: str | None


class ApiTokenView(ProxyShape, frozen=True):
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


class AgentView(ProxyShape, frozen=True, kw_only=True):
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
    reasons: tuple[str, ...] | UnsetType = UNSET
    """Why it is degraded or offline."""
    alerts: tuple[AlertView, ...] | UnsetType = UNSET
    """What is wrong with it, if anything; only of a single agent."""
    observed: Observed | UnsetType = UNSET
    """The NGINX that it was started beside, if it was; only of a single agent."""
    created_at: str


class AlertView(ProxyShape, frozen=True, kw_only=True):
    id: str
    severity: Severity
    message: str
    metric: str | None
    value: float | None
    since: str


def alert(found: Alert) -> AlertView:
    spec = found.spec
    return AlertView(
        id=found.name,
        severity=spec.severity,
        message=spec.message,
        metric=spec.metric,
        value=spec.value,
        since=spelled(found.created_at_ns),
    )


def agent(
    found: Agent, seen: AgentSighting | None, *, detailed: bool = False, alerts: Iterable[Alert] = ()
) -> AgentView:
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
        reasons=(status.reasons if status else ()) or UNSET,
        alerts=tuple(alert(one) for one in alerts) or UNSET,
        observed=(status.observed if status and detailed else None) or UNSET,
        created_at=spelled(found.created_at_ns),
    )


def agent_state(found: Agent) -> AgentState:
    """The state of an agent; offline for one that never connected."""
    return found.status.state if found.status is not None else AgentState.OFFLINE


def _workspace_of(scope: str) -> str:
    return scope.rpartition("/")[2]


class VirtualHostView(ProxyShape, frozen=True, kw_only=True):
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
    tls: HostTls | UnsetType = UNSET
    listening: Listening | UnsetType = UNSET
    access: Access | UnsetType = UNSET
    content: Content | UnsetType = UNSET
    pages: Pages | UnsetType = UNSET
    cache: CacheZone | UnsetType = UNSET
    logging: Logging | UnsetType = UNSET
    warnings: tuple[str, ...] | UnsetType = UNSET
    set_aside: tuple[SetAsideView, ...] | UnsetType = UNSET
    """Agents that do not serve it as it is here, and why; only of a single virtual host."""
    created_at: str
    updated_at: str


def _location(location: Location) -> Location:
    shown = without_hashes(location.access)
    return location if shown is location.access else msgspec.structs.replace(location, access=shown)


class SetAsideView(ProxyShape, frozen=True, kw_only=True):
    agent_id: str
    version: int
    error: str


def virtual_host(
    found: VirtualHost,
    *,
    detailed: bool = False,
    warnings: tuple[str, ...] = (),
    set_aside: tuple[SetAsideView, ...] = (),
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
        locations=tuple(map(_location, spec.locations)) if detailed else UNSET,
        custom_directives=spec.custom_directives if detailed and spec.custom_directives else UNSET,
        target_agents=spec.target_agents,
        tls=spec.tls if detailed else UNSET,
        listening=spec.listening if detailed else UNSET,
        access=without_hashes(spec.access) if detailed else UNSET,
        content=spec.content if detailed else UNSET,
        pages=spec.pages if detailed else UNSET,
        cache=spec.cache if detailed else UNSET,
        logging=spec.logging if detailed else UNSET,
        warnings=warnings or UNSET,
        set_aside=set_aside or UNSET,
        created_at=spelled(found.created_at_ns),
        updated_at=spelled(found.updated_at_ns),
    )


class UpstreamView(ProxyShape, frozen=True, kw_only=True):
    id: str
    workspace_id: str
    name: str
    algorithm: Algorithm
    servers: tuple[UpstreamServer, ...]
    health_check: HealthCheck
    keepalive_connections: int | UnsetType = UNSET
    protocol: Literal["http", "https", "grpc", "grpcs"] | UnsetType = UNSET
    tls: UpstreamTls | UnsetType = UNSET
    balancing: Balancing | UnsetType = UNSET
    keepalive: Keepalive | UnsetType = UNSET
    retries: Retries | UnsetType = UNSET
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
        protocol=spec.protocol,
        tls=spec.tls,
        balancing=spec.balancing,
        keepalive=spec.keepalive,
        retries=spec.retries,
        created_at=spelled(found.created_at_ns),
        updated_at=spelled(found.updated_at_ns),
    )


class AccessListView(ProxyShape, frozen=True, kw_only=True):
    """Users without their passwords."""

    id: str
    workspace_id: str
    name: str
    rules: tuple[AccessRule, ...]
    banned: tuple[str, ...]
    users: tuple[BasicUser, ...]
    created_at: str
    updated_at: str


def access_list(found: AccessList) -> AccessListView:
    spec = found.spec
    return AccessListView(
        id=found.name,
        workspace_id=_workspace_of(found.scope),
        name=spec.name,
        rules=spec.rules,
        banned=spec.banned,
        users=tuple(BasicUser(name=user.name) for user in spec.users),
        created_at=spelled(found.created_at_ns),
        updated_at=spelled(found.updated_at_ns),
    )


class CertificateView(ProxyShape, frozen=True, kw_only=True):
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
