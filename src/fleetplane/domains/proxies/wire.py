"""`nxmesh.agent.v1` messages to values and back. Pure.

Everything that is only so because the wire says it lies here: moments in milliseconds (a small
number is seconds), numbers that are 0 when nobody set them, names of enumerations, and the
checksum by which an agent says what it serves.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
from google.protobuf.json_format import MessageToDict
from msgspec import UNSET, UnsetType

from fleetplane.domains.proxies.agents.ports import AgentOrder, AgentVerb
from fleetplane.domains.proxies.kinds.records import (
    AccessListSpec,
    CertificatePart,
    SettingsSpec,
    StreamSpec,
    UpstreamSpec,
    VirtualHostSpec,
)
from fleetplane.domains.proxies.kinds.values import (
    HEALTHY_THRESHOLD,
    UNHEALTHY_THRESHOLD,
    AgentHealth,
    DeploymentMode,
    DeploymentState,
    Hands,
    Location,
    Observed,
    UpstreamServer,
)
from fleetplane.domains.proxies.rules.configuration import AgentConfig
from fleetplane.domains.proxies.typed_options import (
    Access,
    HostOptions,
    LocationOptions,
    SentStream,
    ServerOptions,
    UpstreamOptions,
)
from fleetplane.fleet import selectors
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values.times import NS

NS_PER_MS = 1_000_000
SECONDS_BELOW = 10**11
"""A moment below this is in seconds: as milliseconds it would lie in 1973."""
MILLISECONDS_BELOW = 10**14
"""As milliseconds, in the year 5138; what is later cannot be written as a date for long."""
TEXT_LIMIT = 255
CAPABILITIES_LIMIT = 64
ERROR_LIMIT = 4096
SET_ASIDE_LIMIT = 64
OBSERVED_LIMIT = 64
"""Of each list that an agent reports of an NGINX it found."""
"""Parts of one version that are kept with their errors: at most 256 KB, and rarely 1."""
_STREAMING = {"proxy_buffering": "off", "proxy_read_timeout": "3600s"}
"""Server-sent events may come an hour apart; NGINX by itself gathers them, and ends the answer after
a minute of silence."""
_PART = re.compile(r"(?:virtual_host|upstream|certificate|stream)/[A-Za-z0-9_-]{1,64}")

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
    """None for 0: nobody set it. None too for what no calendar has."""
    if not 0 < value < MILLISECONDS_BELOW:
        return None
    return value * NS if value < SECONDS_BELOW else value * NS_PER_MS


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
        check_text(field, getattr(request, field))
    if len(request.capabilities) > CAPABILITIES_LIMIT:
        raise InvalidArgument(f"more than {CAPABILITIES_LIMIT} capabilities", field="capabilities")
    for capability in request.capabilities:
        check_text("capabilities", capability)
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


def check_text(field: str, text: str) -> None:
    """Refuse what is not one line of bounded length."""
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


def measured(report: pb.HealthReport, *, moment: int) -> pb.MetricsBatch:
    """What a report says of traffic, as the measurements of an agent that sends none."""
    return pb.MetricsBatch(
        timestamp=moment,
        metrics=[
            pb.Metric(name="nginx_connections_active", value=report.nginx.active_connections),
            pb.Metric(name="nginx_http_requests_total", value=report.nginx.total_requests),
        ],
    )


def observed(report: pb.HealthReport) -> Observed | None:
    """What a report says of an NGINX that the agent found; None where it says nothing."""
    said = report.observation
    if not report.HasField("observation") or said.state not in tuple(Hands):
        return None
    return Observed(
        state=Hands(said.state),
        config_path=_short(said.config_path),
        nginx_version=_short(said.nginx_version)[:32],
        modules=_several(said.modules),
        workers=said.workers,
        listening=_several(said.listening),
        files=said.files,
        bytes=min(said.bytes, 2**53),
        digest=said.digest[:64],
        problems=_several(said.problems),
        logs=_several(said.logs),
        unit=_short(said.unit),
        error=_short(said.error, 2000),
    )


def _several(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(_short(text) for text in itertools.islice(texts, OBSERVED_LIMIT))


def _short(text: str, limit: int = 400) -> str:
    """One line of a text that an agent wrote."""
    return "".join(one if one.isprintable() else "?" for one in text[:limit])


def _plain(value: float) -> float:
    """A 32-bit float as people wrote it: 150.1, not 150.10000610351562. What is no number is 0."""
    return round(value, 3) if value == value and abs(value) < 1e15 else 0.0  # NaN


class VersionProgress(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's reported progress with a version."""

    config_id: str
    version: int
    state: DeploymentState
    error: str
    applied_at_ns: int | None
    set_aside: dict[str, str] = {}
    """Parts of it that are not in service, by `virtual_host/{id}` and the like, each with its error."""
    observed: bool = False
    """Whether it was concluded from a report that shows the version in service."""


def progress(status: pb.ConfigStatus) -> VersionProgress:
    state = _STATES.get(status.status)
    if state is None:
        raise InvalidArgument("config_status.status must be one of the six states", field="status")
    return VersionProgress(
        config_id=status.config_id,
        version=status.version,
        state=state,
        error=status.error_message[:ERROR_LIMIT],
        applied_at_ns=moment_ns(status.applied_at),
        set_aside=_set_aside(status.set_aside),
    )


def _set_aside(given: Mapping[str, str]) -> dict[str, str]:
    """What is no name of a part is left out; what is too much is cut."""
    named = sorted(name for name in given if _PART.fullmatch(name))[:SET_ASIDE_LIMIT]
    return {name: given[name][:ERROR_LIMIT] for name in named}


COMMAND_RESULT = "command.result"
_RESULTS = ("result", "response", "completed", "succeeded", "failed")
_SUCCEEDED = frozenset({"true", "1", "ok", "success", "succeeded", "completed", "done"})


def is_answer(event: pb.Event) -> bool:
    """Whether an event answers a command; `command_result` and `command.failed` do so, too."""
    area, _, word = event.event_type.replace("_", ".").partition(".")
    return area == "command" and word in _RESULTS


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandAnswer:
    """An agent's answer to a command."""

    command: str
    success: bool
    message: str
    output: str


def answer(event: pb.Event) -> CommandAnswer:
    """`success` may also be called `status`, or follow from the type; the id may be that of the event."""
    data = event.data
    command = data.get("command_id", "") or event.event_id
    if not command:
        raise InvalidArgument(f"{COMMAND_RESULT} needs command_id", field="data.command_id")
    message = data.get("message", "") or data.get("error_message", "") or data.get("error", "")
    said = data.get("success", "") or data.get("status", "")
    if not said and event.event_type.endswith(("completed", "succeeded")):
        said = "true"
    return CommandAnswer(
        command=command,
        success=said.lower() in _SUCCEEDED,
        message=message,
        output=data.get("output", "") or data.get("result", ""),
    )


# To agents.


def config_update(
    config: AgentConfig, keys: Mapping[str, bytes], variables: Mapping[str, str] | None = None
) -> pb.ConfigUpdate:
    """`keys` has the private key of each certificate, by its id; `variables` are the server's own."""
    return pb.ConfigUpdate(
        config_id=config.config_id,
        version=config.version,
        virtual_hosts=[
            _virtual_host(name, spec, config.authorities, config.access_lists)
            for name, spec in config.virtual_hosts.items()
        ],
        upstreams=[_upstream(name, spec, config.authorities) for name, spec in config.upstreams.items()],
        certificates={
            name: _certificate(name, part, keys[name]) for name, part in config.certificates.items()
        },
        global_settings=_settings(config.settings, variables or {}),
        streams=[_stream(name, spec) for name, spec in config.streams.items()],
    )


def candidate(
    hosts: Mapping[str, VirtualHostSpec],
    upstreams: Mapping[str, UpstreamSpec],
    certificates: Mapping[str, CertificatePart],
    authorities: Mapping[str, CertificatePart] | None = None,
    access_lists: Mapping[str, AccessListSpec] | None = None,
    streams: Mapping[str, StreamSpec] | None = None,
) -> bytes:
    """What an agent is asked to try beside what it serves. Private keys stay here: it is kept on its way."""
    return pb.ConfigUpdate(
        virtual_hosts=[
            _virtual_host(name, spec, authorities or {}, access_lists or {}) for name, spec in hosts.items()
        ],
        upstreams=[_upstream(name, spec, authorities or {}) for name, spec in upstreams.items()],
        certificates={name: _certificate(name, part, b"") for name, part in certificates.items()},
        streams=[_stream(name, spec) for name, spec in (streams or {}).items()],
    ).SerializeToString()


def checksum(update: pb.ConfigUpdate) -> str:
    """The checksum of the served content, independent of names.

    SHA-256 of the message as JSON with the contract's field names, keys sorted, no blanks, in
    UTF-8. Not of its protobuf bytes: those differ between languages for the same content.
    """
    content = MessageToDict(update, preserving_proto_field_name=True)
    content.pop("config_id", None)
    content.pop("version", None)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _virtual_host(
    identity: str,
    spec: VirtualHostSpec,
    authorities: Mapping[str, CertificatePart],
    lists: Mapping[str, AccessListSpec],
) -> pb.VirtualHost:
    return pb.VirtualHost(
        id=identity,
        name=spec.name,
        server_name=spec.server_name,
        listen_port=spec.listen_port,
        ssl_enabled=spec.ssl_enabled,
        ssl_certificate_id=spec.ssl_certificate_id or "",
        http2_enabled=spec.http2_enabled,
        http3_enabled=spec.http3_enabled,
        locations=[_location(location, lists) for location in spec.locations],
        custom_directives=spec.custom_directives,
        options=_host_options(spec, authorities, lists),
    )


def _host_options(
    spec: VirtualHostSpec,
    authorities: Mapping[str, CertificatePart],
    lists: Mapping[str, AccessListSpec],
) -> str:
    """The groups of options with what they refer to; empty where there are none."""
    options = HostOptions(
        tls=spec.tls,
        listening=spec.listening,
        access=_listed(spec.access, lists),
        content=spec.content,
        pages=spec.pages,
        cache=spec.cache,
        logging=spec.logging,
    )
    if spec.tls and spec.tls.client_certificates:
        found = authorities.get(spec.tls.client_certificates.authority_id)
        options = msgspec.structs.replace(options, authority_pem=found.chain_pem if found else UNSET)
    return _encoded(options)


def _encoded(options: msgspec.Struct) -> str:
    text = msgspec.json.encode(options, order="deterministic").decode()
    return "" if text == "{}" else text


def _listed(access: Access | UnsetType, lists: Mapping[str, AccessListSpec]) -> Access | UnsetType:
    """Access with what its lists say; one that is missing stays named, and the agent refuses the host."""
    if not (access and access.list_ids) or any(one not in lists for one in access.list_ids):
        return access
    named: list[AccessListSpec | Access] = [*(lists[one] for one in access.list_ids), access]
    users = {user.name: user for each in named for user in each.users or ()}
    return msgspec.structs.replace(
        access,
        list_ids=UNSET,
        rules=tuple(rule for each in named for rule in each.rules or ()) or UNSET,
        banned=tuple(one for each in named for one in each.banned or ()) or UNSET,
        users=tuple(users.values()) or UNSET,
    )


def _location(location: Location, lists: Mapping[str, AccessListSpec]) -> pb.Location:
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
        # In words that every agent knows; what an administrator wrote for the location counts more.
        custom_directives={
            **(_STREAMING if location.streaming else {}),
            **(location.custom_directives or {}),
        },
        options=_encoded(
            LocationOptions(
                access=_listed(location.access, lists),
                content=location.content,
                respond=location.respond,
                canaries=location.canaries,
                resolver=location.resolver,
                cache=location.cache,
            )
        ),
    )


def _upstream_options(spec: UpstreamSpec, authorities: Mapping[str, CertificatePart]) -> str:
    trusted = authorities.get(spec.tls.authority_id or "") if spec.tls else None
    servers = {
        server.address: ServerOptions(
            draining=server.draining, slow_start=server.slow_start, max_connections=server.max_connections
        )
        for server in spec.servers
    }
    return _encoded(
        UpstreamOptions(
            protocol=spec.protocol,
            tls=spec.tls,
            authority_pem=trusted.chain_pem if trusted else UNSET,
            balancing=spec.balancing,
            keepalive=spec.keepalive,
            retries=spec.retries,
            servers={name: one for name, one in servers.items() if one != ServerOptions()} or UNSET,
        )
    )


def _upstream(identity: str, spec: UpstreamSpec, authorities: Mapping[str, CertificatePart]) -> pb.Upstream:
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
        options=_upstream_options(spec, authorities),
    )


def _stream(identity: str, spec: StreamSpec) -> pb.Stream:
    given = {name: getattr(spec, name) for name in SentStream.__struct_fields__}
    return pb.Stream(id=identity, options=_encoded(SentStream(**given)))


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


def command(order: AgentOrder) -> pb.Command:
    """Without its id, which it gets when it is issued."""
    match order.verb:
        case AgentVerb.RELOAD:
            return pb.Command(reload=pb.ReloadCommand(graceful=order.graceful))
        case AgentVerb.RESTART:
            return pb.Command(restart=pb.RestartCommand(force=order.force))
        case AgentVerb.STOP:
            return pb.Command(
                stop=pb.StopCommand(graceful=order.graceful, timeout_seconds=order.timeout_seconds)
            )
        case AgentVerb.STATUS:
            return pb.Command(get_status=pb.GetStatusCommand())
        case AgentVerb.VALIDATE if order.candidate:
            candidate = pb.ConfigUpdate.FromString(order.candidate)
            return pb.Command(validate_config=pb.ValidateConfigCommand(candidate=candidate))
        case AgentVerb.VALIDATE:
            return pb.Command(validate_config=pb.ValidateConfigCommand(config_content=order.config_content))
        case AgentVerb.SHOW:
            shown = pb.ShowObservedCommand(
                page=order.page,
                log=order.log,
                lines=order.lines,
                certificate=order.certificate,
                seal_to=order.seal_to,
            )
            return pb.Command(show_observed=shown)
        case AgentVerb.TAKE_OVER:
            return pb.Command(take_over=pb.TakeOverCommand(version=order.version, digest=order.digest))
        case AgentVerb.GIVE_BACK:
            return pb.Command(give_back=pb.GiveBackCommand())


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
