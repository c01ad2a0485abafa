"""What the proxies domain keeps, where, and who writes it.

Every resource is named by its UUID. Slugs and names can change, so scopes are made of ids too:

    user/{user}                          USER, SESSION
    org/{org}                            ORGANIZATION, MEMBERSHIP, API_TOKEN, AUDIT_NOTE, QUOTA_NOTE
    org/{org}/ws/{ws}                    WORKSPACE, AGENT, AGENT_TOKEN, VIRTUAL_HOST, UPSTREAM,
                                         ACCESS_LIST, DNS_ZONE, STREAM, CERTIFICATE, SETTINGS,
                                         CONFIG_VERSION, CONFIG_PART
    org/{org}/ws/{ws}/agent/{agent}      DEPLOYMENT

A request names a thing by its id alone. Where it lies is a claim: (kind, "", "id", id) is held
by the scope; `locate` in `registry` reads it. Other claims: `slug` of organisations (scope "")
and of workspaces (scope of the organisation), `email` of users, `name` of agents and upstreams
and `domain` of certificates (scope of the workspace), and `digest` of agent tokens (scope "",
held by the agent's id): the SHA-256 of the whole token in hexadecimal.

Two halves of the server write here, never to the same half of a resource: REST writes specs,
the agents' service writes statuses. Each kind below says so where it is not plain.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.proxies.kinds.values import (
    AgentHealth,
    AgentState,
    Algorithm,
    AllAgents,
    CertificateState,
    DeploymentMode,
    DeploymentState,
    HealthCheck,
    Location,
    Observed,
    OrganizationRole,
    TargetAgents,
    UpstreamServer,
)
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
    StreamLimits,
    StreamProtocol,
    StreamRoute,
    StreamTimeouts,
    UpstreamTls,
)
from fleetplane.kernel.resources import Kind, Nothing, Resource

SETTINGS_NAME = "global"
ID_CLAIM = "id"


def organization_scope(organization: str) -> str:
    return f"org/{organization}"


def workspace_scope(organization: str, workspace: str) -> str:
    return f"org/{organization}/ws/{workspace}"


def organization_of(scope: str) -> str:
    """The id of the organisation that a scope belongs to; empty for what belongs to none."""
    parts = scope.split("/")
    return parts[1] if len(parts) >= 2 and parts[0] == "org" else ""


def workspace_of(scope: str) -> str:
    """The id of the workspace that a scope belongs to; empty for what belongs to none."""
    parts = scope.split("/")
    return parts[3] if len(parts) >= 4 and parts[0] == "org" and parts[2] == "ws" else ""


def agent_scope(workspace: str, agent: str) -> str:
    """Below a workspace's scope."""
    return f"{workspace}/agent/{agent}"


def user_scope(user: str) -> str:
    return f"user/{user}"


def version_name(version: int) -> str:
    """Zero-padded, so that names sort as numbers do."""
    return f"{version:012d}"


class ProxiesSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Fields may be added later: what is stored keeps field names, and new fields have defaults."""


# People. Written by REST.


class UserSpec(ProxiesSpec, frozen=True):
    """The profile of an account (`fleet.people.account_kind`), which has the password."""

    email: str
    name: str = ""
    is_system_admin: bool = False
    disabled: bool = False
    is_adopted: bool = False
    """Whether the account was there before it became a user of proxies."""


class SessionSpec(ProxiesSpec, frozen=True):
    """A login, and every refresh token descended from it. Deleted when it ends."""

    user: str
    expires_at_ns: int
    """However often it is refreshed."""


class SessionStatus(ProxiesSpec, frozen=True):
    generation: int
    """Of the one refresh token that is good; each refresh makes the next."""
    idle_expires_at_ns: int


class MembershipSpec(ProxiesSpec, frozen=True):
    """Named by the user's id, in the organisation's scope."""

    role: OrganizationRole
    accepted: bool = True
    """Whether the user has agreed to it, or need not; else it is an invitation and gives no rights."""
    invited_by: str = ""
    """Who asked, as the audit log names them."""


class ApiTokenSpec(ProxiesSpec, frozen=True):
    """What is shown of a token; the token itself is the kernel's, named `proxies/{id}` there."""

    name: str
    role: OrganizationRole
    created_by: str
    expires_at_ns: int | None = None


# Places. Written by REST.


class OrganizationSpec(ProxiesSpec, frozen=True):
    name: str
    slug: str
    named_at_ns: int = 0
    """When it got its slug; 0: when it was made."""


class WorkspaceSpec(ProxiesSpec, frozen=True):
    name: str
    slug: str
    named_at_ns: int = 0
    """When it got its slug; 0: when it was made."""


# Agents.


class AgentSpec(ProxiesSpec, frozen=True):
    """Written by REST: with the registration token, by PATCH, by rollback."""

    name: str
    labels: dict[str, str] = {}
    """The operator's; they win over those that the agent reports."""
    pinned_version: int | None = None
    """Serve what that version said, whatever came later."""


class AgentStatus(ProxiesSpec, frozen=True):
    """Written by the agents' service, when a state changes, not with each heartbeat.

    An agent that never registered has none. `health` and `last_seen_at_ns` are as of the last
    write; newer ones are in memory, see `ports.Presence`.
    """

    state: AgentState
    hostname: str = ""
    ip_address: str = ""
    version: str = ""
    deployment_mode: DeploymentMode = DeploymentMode.STANDALONE
    capabilities: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    """As the agent reported them."""
    last_seen_at_ns: int | None = None
    health: AgentHealth | None = None
    reasons: tuple[str, ...] = ()
    """Why it is degraded or offline."""
    state_changed_at_ns: int = 0
    connected_at_ns: int | None = None
    """When it last came from being offline; whoever reads one version alone can tell by it, and by
    the next one, whether this very write is the news."""
    disconnected_at_ns: int | None = None
    observed: Observed | None = None
    """The NGINX that the agent was started beside, if it was."""
    machine: str | UnsetType = UNSET
    """Where servers share a database: which machine has the session, by the best that is known of it."""
    retry_asked_at_ns: int | UnsetType = UNSET
    """When somebody last asked, at another server than the agent's, to have what failed tried again."""


class AgentTokenSpec(ProxiesSpec, frozen=True):
    """Written by REST; named by the agent's id. Deleted with its agent."""

    digest: str
    expires_at_ns: int
    """Of the first use; an activated token stays good until its agent is deleted."""


class Contender(ProxiesSpec, frozen=True):
    """A machine that was refused, because another one is the agent."""

    id: str
    hostname: str
    address: str
    refused_at_ns: int
    key: str = ""
    """The digest of its key; empty if it showed only the token."""


class AgentTokenStatus(ProxiesSpec, frozen=True):
    """Written by the agents' service, from the first registration on; approvals by REST. See `machines`."""

    activated_at_ns: int
    key: str = ""
    """The digest of the key that speaks for the agent; empty while that is whoever has the token."""
    serial: str = ""
    """Of its newest certificate, in hexadecimal."""
    expires_at_ns: int | None = None
    """When that certificate ends."""
    contender: Contender | None = None
    """The machine that was refused last."""
    approved: str = ""
    """The contender that may take over, by its id."""
    approved_until_ns: int = 0
    machine_changed_at_ns: int = 0
    """When the agent was last bound to another machine than before."""


# What is served. Specs are written by REST, each change together with a CONFIG_VERSION.


class VirtualHostSpec(ProxiesSpec, frozen=True):
    name: str
    server_name: str
    """Names separated by one blank each."""
    listen_port: int
    ssl_enabled: bool = False
    ssl_certificate_id: str | None = None
    http2_enabled: bool = False
    http3_enabled: bool = False
    locations: tuple[Location, ...] = ()
    custom_directives: dict[str, str] = {}
    target_agents: TargetAgents = AllAgents()
    tls: HostTls | UnsetType = UNSET
    listening: Listening | UnsetType = UNSET
    access: Access | UnsetType = UNSET
    content: Content | UnsetType = UNSET
    pages: Pages | UnsetType = UNSET
    cache: CacheZone | UnsetType = UNSET
    logging: Logging | UnsetType = UNSET


class UpstreamSpec(ProxiesSpec, frozen=True):
    name: str
    algorithm: Algorithm
    servers: tuple[UpstreamServer, ...]
    health_check: HealthCheck = HealthCheck(enabled=False)
    keepalive_connections: int = 0
    protocol: Literal["http", "https", "grpc", "grpcs"] | UnsetType = UNSET
    tls: UpstreamTls | UnsetType = UNSET
    balancing: Balancing | UnsetType = UNSET
    keepalive: Keepalive | UnsetType = UNSET
    retries: Retries | UnsetType = UNSET


class AccessListSpec(ProxiesSpec, frozen=True):
    """Rules, bans and users that hosts and locations refer to by its id."""

    name: str
    rules: tuple[AccessRule, ...] = ()
    banned: tuple[str, ...] = ()
    users: tuple[BasicUser, ...] = ()


class DnsZoneSpec(ProxiesSpec, frozen=True):
    """A zone at a DNS provider, whose credentials are sealed elsewhere; see `serving/dns_zones`."""

    zone: str
    provider: str
    rotation: int = 0
    """How often its credentials were replaced."""


class StreamSpec(ProxiesSpec, frozen=True):
    """A port on which TCP or UDP is passed on as it comes."""

    name: str
    listen_port: int
    protocol: StreamProtocol = "tcp"
    upstream_id: str | UnsetType = UNSET
    routes: tuple[StreamRoute, ...] | UnsetType = UNSET
    send_proxy_protocol: bool | UnsetType = UNSET
    rules: tuple[AccessRule, ...] | UnsetType = UNSET
    limits: StreamLimits | UnsetType = UNSET
    timeouts: StreamTimeouts | UnsetType = UNSET
    responses: int | UnsetType = UNSET
    """Datagrams that answer one of a client's, after which the session ends; 0 for none."""
    log: bool | UnsetType = UNSET
    """False: connections are not written to the access log."""
    target_agents: TargetAgents = AllAgents()


class CertificateSpec(ProxiesSpec, frozen=True):
    domain: str
    provider: str
    auto_renew: bool


class CertificateStatus(ProxiesSpec, frozen=True):
    """The state of a certificate: written by REST on request, import and renewal, else by the issuer.

    The private key is a sealed secret, `proxies/certificate/{id}/{fingerprint}`: one for each
    certificate that this resource has been, so that an older version can still be served.
    """

    state: CertificateState
    fingerprint: str = ""
    """SHA-256 of the leaf in DER, in hexadecimal; empty while there is none."""
    chain_pem: str = ""
    names: tuple[str, ...] = ()
    issued_at_ns: int | None = None
    expires_at_ns: int | None = None
    error: str = ""
    """The authority's error of the last failed attempt."""
    failures: int = 0
    """Attempts without success in a row, the one that is running included."""
    next_attempt_at_ns: int | None = None
    """Not before; None for at once. Written when an attempt begins, so that a crash counts as a failure."""
    alarm: str = ""
    """How worrying the time left is: `warning`, `critical`, `expired`."""
    alarmed_at_ns: int | None = None
    """When that last got worse; whoever reads one version alone can tell by it whether this is the news."""


class SettingsSpec(ProxiesSpec, frozen=True):
    """The global settings of a workspace; named `global`."""

    nginx_directives: dict[str, str] = {}
    env_vars: dict[str, str] = {}


# Versions. Written by REST, in the transaction of the change they stem from.


class CertificatePart(ProxiesSpec, frozen=True):
    """The public half, and which sealed key belongs to it."""

    domain: str
    fingerprint: str
    chain_pem: str
    expires_at_ns: int


class PartSpec(ProxiesSpec, frozen=True):
    """One object as some version serves it; named by the digest of its content. Never changes."""

    id: str
    virtual_host: VirtualHostSpec | None = None
    upstream: UpstreamSpec | None = None
    certificate: CertificatePart | None = None
    settings: SettingsSpec | None = None
    access_list: AccessListSpec | UnsetType = UNSET
    stream: StreamSpec | UnsetType = UNSET


class ConfigVersionSpec(ProxiesSpec, frozen=True):
    """What a workspace serves, from this version to the next; named by `version_name`. Never changes.

    A table of contents: which object, at which content. What one agent gets of it is decided by
    `configuration.for_agent`. The highest version is the desired one.
    """

    version: int
    digest: str
    """Of all that follows up to `pins`: two versions with the same digest say the same."""
    virtual_hosts: dict[str, str] = {}
    """From an object's id to its part's name; so for the next three."""
    upstreams: dict[str, str] = {}
    certificates: dict[str, str] = {}
    settings: str = ""
    access_lists: dict[str, str] = {}
    streams: dict[str, str] = {}
    pins: dict[str, int] = {}
    """Agents that were rolled back, and to which version; and those that a rollout has brought to one."""
    held: int | None = None
    """The version that agents without a pin serve; this one itself if None. Rollouts set it."""
    cause: str = ""
    """The action that made it, such as `virtual_host.update`."""
    subject: str = ""
    """The id of what was changed."""
    actor: str = ""
    restored_version: int | None = None
    """The version that this one repeats."""


class DeploymentSpec(ProxiesSpec, frozen=True):
    """One version on its way to one agent; named by `version_name`. Written by the agents' service only."""

    version: int
    config_id: str
    checksum: str = ""
    sent_at_ns: int = 0
    attempt: int = 1
    """How often this content was sent under this number."""


class DeploymentStatus(ProxiesSpec, frozen=True):
    state: DeploymentState
    error: str = ""
    changed_at_ns: int = 0
    applied_at_ns: int | None = None
    """When it came to service; kept while it is sent again."""
    duration_ms: int | None = None
    set_aside: dict[str, str] = {}
    """Parts that are not in service although the version is, by `virtual_host/{id}`, each with its error."""


# What callers did. Written with whatever they did, see `audit_notes`.


class AuditNoteSpec(ProxiesSpec, frozen=True):
    """In the organisation's scope, in one of a few places that are written over in turn."""

    action: str
    actor: str
    request_id: str
    resource_type: str
    resource_id: str
    resource_name: str
    workspace_id: str | None


class QuotaNoteSpec(ProxiesSpec, frozen=True):
    """In the organisation's scope, while most of a quota is used; see `quotas`."""

    quota: str
    used: int
    """When the note was written."""
    limit: int
    setting: str
    workspace_id: str | None
    reached: bool
    """Whether nothing more fits."""


User = Resource[UserSpec, Nothing]
Session = Resource[SessionSpec, SessionStatus]
Membership = Resource[MembershipSpec, Nothing]
ApiToken = Resource[ApiTokenSpec, Nothing]
Organization = Resource[OrganizationSpec, Nothing]
Workspace = Resource[WorkspaceSpec, Nothing]


def named_since_ns(place: Organization | Workspace) -> int:
    """Since when a place has its slug: what was given at that path before was given by others."""
    return place.spec.named_at_ns or place.created_at_ns


Agent = Resource[AgentSpec, AgentStatus]
AgentToken = Resource[AgentTokenSpec, AgentTokenStatus]
VirtualHost = Resource[VirtualHostSpec, Nothing]
Upstream = Resource[UpstreamSpec, Nothing]
AccessList = Resource[AccessListSpec, Nothing]
DnsZone = Resource[DnsZoneSpec, Nothing]
Stream = Resource[StreamSpec, Nothing]
Certificate = Resource[CertificateSpec, CertificateStatus]
WorkspaceSettings = Resource[SettingsSpec, Nothing]
ConfigPart = Resource[PartSpec, Nothing]
ConfigVersion = Resource[ConfigVersionSpec, Nothing]
Deployment = Resource[DeploymentSpec, DeploymentStatus]
AuditNote = Resource[AuditNoteSpec, Nothing]
QuotaNote = Resource[QuotaNoteSpec, Nothing]

USER: Kind[UserSpec, Nothing] = Kind("proxy-user", UserSpec, Nothing)
SESSION: Kind[SessionSpec, SessionStatus] = Kind("proxy-session", SessionSpec, SessionStatus)
MEMBERSHIP: Kind[MembershipSpec, Nothing] = Kind("proxy-membership", MembershipSpec, Nothing)
API_TOKEN: Kind[ApiTokenSpec, Nothing] = Kind("proxy-api-token", ApiTokenSpec, Nothing)
ORGANIZATION: Kind[OrganizationSpec, Nothing] = Kind("proxy-organization", OrganizationSpec, Nothing)
WORKSPACE: Kind[WorkspaceSpec, Nothing] = Kind("proxy-workspace", WorkspaceSpec, Nothing)
AGENT: Kind[AgentSpec, AgentStatus] = Kind("proxy-agent", AgentSpec, AgentStatus)
AGENT_TOKEN: Kind[AgentTokenSpec, AgentTokenStatus] = Kind(
    "proxy-agent-token", AgentTokenSpec, AgentTokenStatus
)
VIRTUAL_HOST: Kind[VirtualHostSpec, Nothing] = Kind(
    "proxy-virtual-host", VirtualHostSpec, Nothing, is_secret=True
)
UPSTREAM: Kind[UpstreamSpec, Nothing] = Kind("proxy-upstream", UpstreamSpec, Nothing, is_secret=True)
ACCESS_LIST: Kind[AccessListSpec, Nothing] = Kind(
    "proxy-access-list", AccessListSpec, Nothing, is_secret=True
)
DNS_ZONE: Kind[DnsZoneSpec, Nothing] = Kind("proxy-dns-zone", DnsZoneSpec, Nothing)
STREAM: Kind[StreamSpec, Nothing] = Kind("proxy-stream", StreamSpec, Nothing, is_secret=True)
CERTIFICATE: Kind[CertificateSpec, CertificateStatus] = Kind(
    "proxy-certificate", CertificateSpec, CertificateStatus
)
SETTINGS: Kind[SettingsSpec, Nothing] = Kind("proxy-settings", SettingsSpec, Nothing, is_secret=True)
CONFIG_PART: Kind[PartSpec, Nothing] = Kind(
    "proxy-config-part", PartSpec, Nothing, is_logged=False, is_secret=True
)
CONFIG_VERSION: Kind[ConfigVersionSpec, Nothing] = Kind(
    "proxy-config-version", ConfigVersionSpec, Nothing, is_logged=False
)
DEPLOYMENT: Kind[DeploymentSpec, DeploymentStatus] = Kind(
    "proxy-deployment", DeploymentSpec, DeploymentStatus, is_secret=True
)
AUDIT_NOTE: Kind[AuditNoteSpec, Nothing] = Kind("proxy-audit-note", AuditNoteSpec, Nothing)
QUOTA_NOTE: Kind[QuotaNoteSpec, Nothing] = Kind("proxy-quota-note", QuotaNoteSpec, Nothing)

KINDS = (
    USER,
    SESSION,
    MEMBERSHIP,
    API_TOKEN,
    ORGANIZATION,
    WORKSPACE,
    AGENT,
    AGENT_TOKEN,
    VIRTUAL_HOST,
    UPSTREAM,
    ACCESS_LIST,
    DNS_ZONE,
    STREAM,
    CERTIFICATE,
    SETTINGS,
    CONFIG_PART,
    CONFIG_VERSION,
    DEPLOYMENT,
    AUDIT_NOTE,
    QUOTA_NOTE,
)
