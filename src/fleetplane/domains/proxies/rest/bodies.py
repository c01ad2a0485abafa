"""What REST takes: the body of every request. Unknown fields are refused, absent ones are `UNSET`."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.proxies.kinds.records import AccessListSpec, StreamSpec, UpstreamSpec, VirtualHostSpec
from fleetplane.domains.proxies.kinds.values import (
    Algorithm,
    AllAgents,
    HealthCheck,
    Location,
    OrganizationRole,
    RevocationReason,
    TargetAgents,
    UpstreamServer,
    Value,
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

HTTP_PORT = 80
HTTPS_PORT = 443


class Login(Value, frozen=True):
    email: str
    password: str


class Refresh(Value, frozen=True):
    refresh_token: str


class ChangePassword(Value, frozen=True):
    current_password: str
    new_password: str


class CreateUser(Value, frozen=True):
    email: str
    password: str
    name: str = ""
    is_system_admin: bool = False


class UpdateUser(Value, frozen=True):
    email: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    is_system_admin: bool | UnsetType = UNSET
    disabled: bool | UnsetType = UNSET
    password: str | UnsetType = UNSET


class AddMember(Value, frozen=True):
    email: str
    role: OrganizationRole


class AnswerInvitation(Value, frozen=True):
    organization_id: str


class ChangeMember(Value, frozen=True):
    role: OrganizationRole


class CreateApiToken(Value, frozen=True):
    organization_id: str
    name: str
    role: OrganizationRole = OrganizationRole.VIEWER
    expires_in_days: int | None = None


class CreatePlace(Value, frozen=True):
    """An organisation or a workspace."""

    name: str
    slug: str


class UpdatePlace(Value, frozen=True):
    name: str | UnsetType = UNSET
    slug: str | UnsetType = UNSET


class CreateAgentToken(Value, frozen=True):
    name: str
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    expires_in_hours: int = 24


class DecideMachine(Value, frozen=True):
    contender_id: str
    """As `GET /agents/{id}/machine` names it, so that nobody approves another one than they looked at."""


class ReissueToken(Value, frozen=True):
    expires_in_hours: int = 24


class UpdateAgent(Value, frozen=True):
    name: str | UnsetType = UNSET
    labels: dict[str, str] | UnsetType = UNSET


class Restart(Value, frozen=True):
    force: bool = False


class Stop(Value, frozen=True):
    graceful: bool = True
    timeout_seconds: int = 30


class Rollback(Value, frozen=True):
    version: int


class CreateVirtualHost(Value, frozen=True):
    name: str
    server_name: str
    listen_port: int | UnsetType = UNSET
    ssl_enabled: bool = False
    ssl_certificate_id: str | None = None
    http2_enabled: bool = False
    http3_enabled: bool = False
    locations: tuple[Location, ...] = ()
    custom_directives: dict[str, str] = msgspec.field(default_factory=dict)
    target_agents: TargetAgents = AllAgents()
    tls: HostTls | UnsetType = UNSET
    listening: Listening | UnsetType = UNSET
    access: Access | UnsetType = UNSET
    content: Content | UnsetType = UNSET
    pages: Pages | UnsetType = UNSET
    cache: CacheZone | UnsetType = UNSET
    logging: Logging | UnsetType = UNSET

    def spec(self) -> VirtualHostSpec:
        port = self.listen_port
        if port is UNSET:
            port = HTTPS_PORT if self.ssl_enabled else HTTP_PORT
        return VirtualHostSpec(
            name=self.name,
            server_name=self.server_name,
            listen_port=port,
            ssl_enabled=self.ssl_enabled,
            ssl_certificate_id=self.ssl_certificate_id,
            http2_enabled=self.http2_enabled,
            http3_enabled=self.http3_enabled,
            locations=self.locations,
            custom_directives=self.custom_directives,
            target_agents=self.target_agents,
            tls=self.tls,
            listening=self.listening,
            access=self.access,
            content=self.content,
            pages=self.pages,
            cache=self.cache,
            logging=self.logging,
        )


class UpdateVirtualHost(Value, frozen=True):
    name: str | UnsetType = UNSET
    server_name: str | UnsetType = UNSET
    listen_port: int | UnsetType = UNSET
    ssl_enabled: bool | UnsetType = UNSET
    ssl_certificate_id: str | UnsetType | None = UNSET
    http2_enabled: bool | UnsetType = UNSET
    http3_enabled: bool | UnsetType = UNSET
    locations: tuple[Location, ...] | UnsetType = UNSET
    custom_directives: dict[str, str] | UnsetType = UNSET
    target_agents: TargetAgents | UnsetType = UNSET
    tls: HostTls | UnsetType | None = UNSET
    """Null takes a group of options away; so for the next ones."""
    listening: Listening | UnsetType | None = UNSET
    access: Access | UnsetType | None = UNSET
    content: Content | UnsetType | None = UNSET
    pages: Pages | UnsetType | None = UNSET
    cache: CacheZone | UnsetType | None = UNSET
    logging: Logging | UnsetType | None = UNSET


class CreateAccessList(Value, frozen=True):
    name: str
    rules: tuple[AccessRule, ...] = ()
    banned: tuple[str, ...] = ()
    users: tuple[BasicUser, ...] = ()

    def spec(self) -> AccessListSpec:
        return AccessListSpec(name=self.name, rules=self.rules, banned=self.banned, users=self.users)


class UpdateAccessList(Value, frozen=True):
    name: str | UnsetType = UNSET
    rules: tuple[AccessRule, ...] | UnsetType = UNSET
    banned: tuple[str, ...] | UnsetType = UNSET
    users: tuple[BasicUser, ...] | UnsetType = UNSET


class CreateUpstream(Value, frozen=True):
    name: str
    servers: tuple[UpstreamServer, ...]
    algorithm: Algorithm = Algorithm.ROUND_ROBIN
    health_check: HealthCheck = HealthCheck(enabled=False)
    keepalive_connections: int = 0
    protocol: Literal["http", "https", "grpc", "grpcs"] | UnsetType = UNSET
    tls: UpstreamTls | UnsetType = UNSET
    balancing: Balancing | UnsetType = UNSET
    keepalive: Keepalive | UnsetType = UNSET
    retries: Retries | UnsetType = UNSET

    def spec(self) -> UpstreamSpec:
        return UpstreamSpec(
            name=self.name,
            algorithm=self.algorithm,
            servers=self.servers,
            health_check=self.health_check,
            keepalive_connections=self.keepalive_connections,
            protocol=self.protocol,
            tls=self.tls,
            balancing=self.balancing,
            keepalive=self.keepalive,
            retries=self.retries,
        )


class UpdateUpstream(Value, frozen=True):
    name: str | UnsetType = UNSET
    algorithm: Algorithm | UnsetType = UNSET
    servers: tuple[UpstreamServer, ...] | UnsetType = UNSET
    health_check: HealthCheck | UnsetType = UNSET
    keepalive_connections: int | UnsetType = UNSET
    protocol: Literal["http", "https", "grpc", "grpcs"] | UnsetType | None = UNSET
    tls: UpstreamTls | UnsetType | None = UNSET
    balancing: Balancing | UnsetType | None = UNSET
    keepalive: Keepalive | UnsetType | None = UNSET
    retries: Retries | UnsetType | None = UNSET


class CreateStream(Value, frozen=True):
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
    log: bool | UnsetType = UNSET
    target_agents: TargetAgents = AllAgents()

    def spec(self) -> StreamSpec:
        return StreamSpec(**{name: getattr(self, name) for name in StreamSpec.__struct_fields__})


class UpdateStream(Value, frozen=True):
    """Null takes an option away."""

    name: str | UnsetType = UNSET
    listen_port: int | UnsetType = UNSET
    protocol: StreamProtocol | UnsetType = UNSET
    upstream_id: str | UnsetType | None = UNSET
    routes: tuple[StreamRoute, ...] | UnsetType | None = UNSET
    send_proxy_protocol: bool | UnsetType | None = UNSET
    rules: tuple[AccessRule, ...] | UnsetType | None = UNSET
    limits: StreamLimits | UnsetType | None = UNSET
    timeouts: StreamTimeouts | UnsetType | None = UNSET
    responses: int | UnsetType | None = UNSET
    log: bool | UnsetType | None = UNSET
    target_agents: TargetAgents | UnsetType = UNSET


class RequestCertificate(Value, frozen=True):
    domain: str
    provider: str = "letsencrypt"
    auto_renew: bool = True


class ImportCertificate(Value, frozen=True):
    certificate: str
    """The chain in PEM, leaf first."""
    private_key: str
    """In PEM, not encrypted. Never returned."""
    domain: str | None = None
    """The certificate's first name, unless another is given."""


class RevokeCertificate(Value, frozen=True):
    reason: RevocationReason = RevocationReason.UNSPECIFIED


class PutSettings(Value, frozen=True):
    nginx_directives: dict[str, str] = msgspec.field(default_factory=dict)
    env_vars: dict[str, str] = msgspec.field(default_factory=dict)


class Validate(Value, frozen=True):
    """What to try: a whole NGINX configuration on an agent, or objects against this workspace."""

    config_content: str | UnsetType = UNSET
    virtual_host: CreateVirtualHost | UnsetType = UNSET
    upstream: CreateUpstream | UnsetType = UNSET
