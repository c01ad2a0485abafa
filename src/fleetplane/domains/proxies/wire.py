"""`nxmesh.agent.v1` messages to values and back. Pure.

Everything that is only so because the wire says it lies here: moments in milliseconds (a small
number is seconds), numbers that are 0 when nobody set them, names of enumerations, and the
checksum by which an agent says what it serves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.json_format import MessageToDict

from fleetplane.domains.proxies import selectors
from fleetplane.domains.proxies.configuration import AgentConfig
from fleetplane.domains.proxies.kinds import CertificatePart, SettingsSpec, UpstreamSpec, VirtualHostSpec
from fleetplane.domains.proxies.ports import Order, Verb
from fleetplane.domains.proxies.values import (
    HEALTHY_THRESHOLD,
    UNHEALTHY_THRESHOLD,
    AgentHealth,
    DeploymentMode,
    DeploymentState,
    Location,
    UpstreamServer,
)
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.errors import InvalidArgument

NS_PER_MS = 1_000_000
NS_PER_SECOND = 1_000_000_000
SECONDS_BELOW = 10**11
"""A moment below this is in seconds: as milliseconds it would lie in 1973."""
TEXT_LIMIT = 255
CAPABILITIES_LIMIT = 64

_MODES = {
    pb.DOCKER_SIDECAR: DeploymentMode.DOCKER_SIDECAR,
    pb.KUBERNETES_SIDECAR: DeploymentMode.KUBERNETES_SIDECAR,
}
_STATES = {
    pb.PENDING: DeploymentState.PENDING,
    pb.VALIDATING: DeploymentState.VALIDATING,
    pb.APPLYING: DeploymentState.APPLYING,
    pb.SUCCESS: DeploymentState.SUCCESS,
    pb.FAILED: DeploymentState.FAILED,
    pb.ROLLED_BACK: DeploymentState.ROLLED_BACK,
}


# Moments.


def moment_ns(value: int) -> int | None:
    """None for 0: nobody set it."""
    if value <= 0:
        return None
    return value * NS_PER_SECOND if value < SECONDS_BELOW else value * NS_PER_MS


def moment(at_ns: int) -> int:
    return at_ns // NS_PER_MS


# From agents.


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What an agent says about itself when it registers."""

    token: str
    hostname: str
    ip_address: str
    version: str
    capabilities: tuple[str, ...]
    labels: dict[str, str]
    deployment_mode: DeploymentMode


def introduction(request: pb.RegistrationRequest, *, address: str) -> Introduction:
    """`address` is where the connection comes from, for agents that do not say where they are."""
    for field in ("hostname", "ip_address", "version"):
        _check_text(field, getattr(request, field))
    if len(request.capabilities) > CAPABILITIES_LIMIT:
        raise InvalidArgument(f"more than {CAPABILITIES_LIMIT} capabilities", field="capabilities")
    for capability in request.capabilities:
        _check_text("capabilities", capability)
    labels = dict(request.labels)
    for key, problem in selectors.label_problems(labels):
        raise InvalidArgument(f"label {key!r}: {problem}", field="labels")
    return Introduction(
        token=request.token,
        hostname=request.hostname,
        ip_address=request.ip_address or address,
        version=request.version,
        capabilities=tuple(request.capabilities),
        labels=labels,
        deployment_mode=_MODES.get(request.deployment_mode, DeploymentMode.STANDALONE),
    )


def _check_text(field: str, text: str) -> None:
    if len(text) > TEXT_LIMIT or any(ord(character) < 32 for character in text):
        raise InvalidArgument(f"{field} must be one line of at most {TEXT_LIMIT} characters", field=field)


def health(report: pb.HealthReport) -> AgentHealth:
    nginx, system = report.nginx, report.system
    status = "unknown" if not report.HasField("nginx") else ("running" if nginx.is_running else "stopped")
    return AgentHealth(
        nginx_status=status,  # type: ignore[arg-type]  # one of the three
        nginx_uptime_seconds=nginx.uptime_seconds,
        active_connections=nginx.active_connections,
        requests_per_second=_plain(nginx.requests_per_second),
        cpu_percent=_plain(system.cpu_percent),
        memory_used_mb=system.memory_used_bytes // 1_048_576,
        config_version=report.config_version,
    )


def _plain(value: float) -> float:
    """A 32-bit float as people wrote it: 150.1, not 150.10000610351562. What is no number is 0."""
    return round(value, 3) if value == value and abs(value) < 1e15 else 0.0  # NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an agent says it is with a version."""

    config_id: str
    version: int
    state: DeploymentState
    error: str
    applied_at_ns: int | None


def progress(status: pb.ConfigStatus) -> Progress:
    state = _STATES.get(status.status)
    if state is None:
        raise InvalidArgument("config_status.status must be one of the six states", field="status")
    return Progress(
        config_id=status.config_id,
        version=status.version,
        state=state,
        error=status.error_message[:4096],
        applied_at_ns=moment_ns(status.applied_at),
    )


COMMAND_RESULT = "command.result"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An agent's word about a command."""

    command: str
    success: bool
    message: str
    output: str


def answer(event: pb.Event) -> Answer:
    data = event.data
    if not data.get("command_id"):
        raise InvalidArgument(f"{COMMAND_RESULT} needs command_id", field="data.command_id")
    return Answer(
        command=data["command_id"],
        success=data.get("success", "").lower() in ("true", "1"),
        message=data.get("message", ""),
        output=data.get("output", ""),
    )


# To agents.


def config_update(
    config: AgentConfig, keys: Mapping[str, bytes], variables: Mapping[str, str] | None = None
) -> pb.ConfigUpdate:
    """`keys` has the private key of each certificate, by its id; `variables` are the server's own."""
    return pb.ConfigUpdate(
        config_id=config.config_id,
        version=config.version,
        virtual_hosts=[_virtual_host(name, spec) for name, spec in config.virtual_hosts.items()],
        upstreams=[_upstream(name, spec) for name, spec in config.upstreams.items()],
        certificates={
            name: _certificate(name, part, keys[name]) for name, part in config.certificates.items()
        },
        global_settings=_settings(config.settings, variables or {}),
    )


def checksum(update: pb.ConfigUpdate) -> str:
    """Of what is to be served, whatever it is called.

    SHA-256 of the message as JSON with the contract's field names, keys sorted, no blanks, in
    UTF-8. Not of its protobuf bytes: those differ between languages for the same content.
    """
    content = MessageToDict(update, preserving_proto_field_name=True)
    content.pop("config_id", None)
    content.pop("version", None)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _virtual_host(identity: str, spec: VirtualHostSpec) -> pb.VirtualHost:
    return pb.VirtualHost(
        id=identity,
        name=spec.name,
        server_name=spec.server_name,
        listen_port=spec.listen_port,
        ssl_enabled=spec.ssl_enabled,
        ssl_certificate_id=spec.ssl_certificate_id or "",
        http2_enabled=spec.http2_enabled,
        http3_enabled=spec.http3_enabled,
        locations=[_location(location) for location in spec.locations],
        custom_directives=spec.custom_directives,
    )


def _location(location: Location) -> pb.Location:
    return pb.Location(
        path=location.path,
        proxy_pass=location.proxy_pass or "",
        upstream_id=location.upstream_id or "",
        root=location.root or "",
        index=location.index or "",
        custom_headers=[
            pb.Header(name=header.name, value=header.value, always=header.always or False)
            for header in location.custom_headers or ()
        ],
        rewrite_rules=[
            pb.RewriteRule(pattern=rule.pattern, replacement=rule.replacement, flag=rule.flag or "")
            for rule in location.rewrite_rules or ()
        ],
        custom_directives=location.custom_directives or {},
    )


def _upstream(identity: str, spec: UpstreamSpec) -> pb.Upstream:
    check = spec.health_check
    return pb.Upstream(
        id=identity,
        name=spec.name,
        algorithm=spec.algorithm.name,
        servers=[_server(server) for server in spec.servers],
        health_check=pb.HealthCheckConfig(
            enabled=check.enabled,
            path=check.path,
            interval_seconds=check.interval,
            timeout_seconds=check.timeout,
            healthy_threshold=check.healthy_threshold or HEALTHY_THRESHOLD,
            unhealthy_threshold=check.unhealthy_threshold or UNHEALTHY_THRESHOLD,
        ),
        keepalive_connections=spec.keepalive_connections,
    )


def _server(server: UpstreamServer) -> pb.UpstreamServer:
    return pb.UpstreamServer(
        address=server.address,
        weight=server.weight,
        backup=server.backup,
        down=server.down or False,
        max_fails=server.max_fails,
        fail_timeout_seconds=server.fail_timeout,
    )


def _certificate(identity: str, part: CertificatePart, key: bytes) -> pb.Certificate:
    return pb.Certificate(
        id=identity,
        domain=part.domain,
        certificate_pem=part.chain_pem,
        private_key_pem=key.decode(),
        expires_at=moment(part.expires_at_ns),
    )


def _settings(settings: SettingsSpec, variables: Mapping[str, str]) -> pb.GlobalSettings:
    return pb.GlobalSettings(
        nginx_directives=settings.nginx_directives, env_vars={**settings.env_vars, **variables}
    )


def command(order: Order) -> pb.Command:
    """Without its id, which it gets when it is issued."""
    match order.verb:
        case Verb.RELOAD:
            return pb.Command(reload=pb.ReloadCommand(graceful=order.graceful))
        case Verb.RESTART:
            return pb.Command(restart=pb.RestartCommand(force=order.force))
        case Verb.STOP:
            return pb.Command(
                stop=pb.StopCommand(graceful=order.graceful, timeout_seconds=order.timeout_seconds)
            )
        case Verb.STATUS:
            return pb.Command(get_status=pb.GetStatusCommand())
        case Verb.VALIDATE:
            return pb.Command(validate_config=pb.ValidateConfigCommand(config_content=order.config_content))


def receipt(message: pb.AgentMessage) -> str | None:
    """The id by which a message is acknowledged; None for those that are not."""
    match message.WhichOneof("payload"):
        case "event":
            return message.event.event_id
        case "config_status":
            status = message.config_status
            known = status.status in pb.ConfigApplyStatus.values()  # an agent may be newer than we are
            state = pb.ConfigApplyStatus.Name(status.status) if known else str(status.status)
            return f"{status.config_id}:{status.version}:{state}"
        case "metrics" | "logs":
            return str(message.timestamp)
        case _:
            return None
