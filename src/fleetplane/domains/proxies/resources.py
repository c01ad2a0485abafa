"""What proxies have, as objects of the resource API. Pure.

An organisation is the tenant of its slug, and a workspace a place in it. What refers to another thing by its
id is shown with that thing's name. Secrets in what operators write are masked for everybody, as for viewers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from fleetplane.domains.proxies import access
from fleetplane.domains.proxies.agents import observed
from fleetplane.domains.proxies.agents.events import AGENT_EVENT, AgentEvent
from fleetplane.domains.proxies.agents.ports import Result
from fleetplane.domains.proxies.agents.runs import PROXY_RUN, ProxyCall, ProxyCommand
from fleetplane.domains.proxies.kinds.passwords import host_without_hashes
from fleetplane.domains.proxies.kinds.records import (
    ACCESS_LIST,
    AGENT,
    CERTIFICATE,
    ORGANIZATION,
    UPSTREAM,
    USER,
    VIRTUAL_HOST,
    WORKSPACE,
    Agent,
    AgentSpec,
    Certificate,
    CertificateStatus,
    StreamSpec,
    Upstream,
    UpstreamSpec,
    User,
    VirtualHost,
    VirtualHostSpec,
    Workspace,
    agent_scope,
    organization_of,
    organization_scope,
    workspace_of,
    workspace_scope,
)
from fleetplane.domains.proxies.kinds.values import CertificateState, Location, NamedAgents, RevocationReason
from fleetplane.domains.proxies.rules.configuration import labels_of
from fleetplane.domains.proxies.rules.raw_text import RawRight
from fleetplane.domains.proxies.rules.secrecy import without_secrets
from fleetplane.domains.proxies.stream_options import StreamRoute
from fleetplane.domains.proxies.typed_options import (
    Access,
    Balancing,
    Canaries,
    Canary,
    ClientCertificates,
    ConnectionLimit,
    RateLimit,
    UpstreamTls,
)
from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.acting import freeze_actions
from fleetplane.fleet.resources.common import AccountSpecView, AccountStatusView, NoStatus, account_resource
from fleetplane.fleet.resources.declaration import (
    READING,
    Action,
    ActionCall,
    Begun,
    Column,
    PublicResource,
    Reading,
    Related,
    Secret,
    Shape,
    Verb,
    View,
)
from fleetplane.fleet.resources.mirrors import Mirror
from fleetplane.fleet.runs import targets
from fleetplane.fleet.runs.channel import RunOrder
from fleetplane.fleet.runs.policy import RunPolicy
from fleetplane.fleet.runs.resources import Printed, run_resource
from fleetplane.fleet.runs.targets import Target
from fleetplane.kernel.commands import CommandTarget
from fleetplane.kernel.errors import FailedPrecondition, PermissionDenied
from fleetplane.kernel.resources import AnyKind, AnyResource, SpecT
from fleetplane.kernel.store import Draft
from fleetplane.kernel.values.times import spelled, spelled_or_null

MIRROR = Mirror(
    "Proxy",
    renamed={
        (VirtualHostSpec, "ssl_certificate_id"): "certificate",
        (ClientCertificates, "authority_id"): "authority",
        (UpstreamTls, "authority_id"): "authority",
        (UpstreamTls, "client_certificate_id"): "client_certificate",
        (Access, "list_ids"): "access_lists",
        (Location, "upstream_id"): "upstream",
        (Canary, "upstream_id"): "upstream",
        (NamedAgents, "agent_ids"): "agents",
        (StreamSpec, "upstream_id"): "upstream",
        (StreamRoute, "upstream_id"): "upstream",
    },
    without={
        VirtualHostSpec: ("name",),
        UpstreamSpec: ("name",),
        AgentSpec: ("name",),
        StreamSpec: ("name",),
    },
)


def place(stored: AnyResource, reading: Reading) -> str:
    """The tenant of the organisation, or the workspace in it; empty if neither is there any more."""
    organization, workspace = organization_of(stored.scope), workspace_of(stored.scope)
    owner = reading.get(ORGANIZATION, organization_scope(organization), organization)
    if owner is None:
        return ""
    tenant = scopes.tenant_path(owner.spec.slug)
    if not workspace:
        return tenant
    found = reading.get(WORKSPACE, workspace_scope(organization, workspace), workspace)
    return "" if found is None else scopes.below(tenant, "workspaces", found.spec.slug)


def workspace_place(stored: Workspace, reading: Reading) -> str:
    """A workspace itself lies at its tenant."""
    organization = organization_of(stored.scope)
    owner = reading.get(ORGANIZATION, organization_scope(organization), organization)
    return "" if owner is None else scopes.tenant_path(owner.spec.slug)


def _names(
    kind: AnyKind, scope: str, reading: Reading, name: Callable[[Any], str] = lambda found: found.spec.name
) -> Callable[[str], str]:
    """From an id to a name; what is gone keeps its id."""

    def named(identity: str) -> str:
        found = reading.get(kind, scope, identity)
        return identity if found is None else str(name(found))

    return named


def _certificate_names(scope: str, reading: Reading) -> Callable[[str], str]:
    """From an id to a domain, unless several providers have issued for it."""

    def named(identity: str) -> str:
        found = reading.get(CERTIFICATE, scope, identity)
        if found is None:
            return identity
        same = [one for one in reading.list(CERTIFICATE, scope) if one.spec.domain == found.spec.domain]
        return found.spec.domain if len(same) == 1 else identity

    return named


def references(scope: str, reading: Reading) -> Mapping[str, Callable[[str], str]]:
    """Names of what the things of a workspace refer to."""
    certificate = _certificate_names(scope, reading)
    return {
        "certificate": certificate,
        "client_certificate": certificate,
        "authority": certificate,
        "access_lists": _names(ACCESS_LIST, scope, reading),
        "upstream": _names(UPSTREAM, scope, reading),
        "agents": _names(AGENT, scope, reading),
    }


# Agents.


class ProxyAgentStatusView(Shape, frozen=True):
    state: str
    """`online`, `degraded`, `offline`, or `unregistered`: no machine has come with its token yet."""
    since: str | None
    reasons: Sequence[str]
    hostname: str
    address: str
    version: str
    mode: str
    capabilities: Sequence[str]
    last_seen_at: str | None
    """As of the last change of state."""
    nginx: str
    """`running`, `stopped` or `unknown`."""
    config_version: int | None
    observed: ObservedView | None
    """The NGINX that the agent was started beside, if it was."""


class ObservedView(Shape, frozen=True):
    state: str
    """`observing`, `taking_over`, `taken_over` or `giving_back`."""
    config_path: str
    nginx_version: str
    modules: Sequence[str]
    workers: int
    listening: Sequence[str]
    files: int
    bytes: int
    digest: str
    problems: Sequence[str]
    """What of its configuration is not shown, and why."""
    logs: Sequence[str]
    unit: str
    error: str
    """Why the last change of hands failed."""


def agent_view(agent: Agent, _reading: Reading) -> View[Any, ProxyAgentStatusView]:
    """What is shown of an agent."""
    status = agent.status
    if status is None:
        shown = ProxyAgentStatusView(
            state="unregistered",
            since=None,
            reasons=(),
            hostname="",
            address="",
            version="",
            mode="",
            capabilities=(),
            last_seen_at=None,
            nginx="unknown",
            config_version=None,
            observed=None,
        )
    else:
        shown = ProxyAgentStatusView(
            state=status.state,
            since=spelled_or_null(status.state_changed_at_ns or None),
            reasons=status.reasons,
            hostname=status.hostname,
            address=status.ip_address,
            version=status.version,
            mode=status.deployment_mode,
            capabilities=status.capabilities,
            last_seen_at=spelled_or_null(status.last_seen_at_ns),
            nginx=status.health.nginx_status if status.health is not None else "unknown",
            config_version=status.health.config_version if status.health is not None else None,
            observed=ObservedView(**msgspec.structs.asdict(status.observed)) if status.observed else None,
        )
    return View(spec=MIRROR.shown(agent.spec), status=shown, labels=labels_of(agent))


def _commanded(command: ProxyCommand, summary: str) -> Action:
    async def run(call: ActionCall) -> Begun | None:
        asked = ProxyCall(command=command)
        order = RunOrder(
            scope=call.stored.scope,
            target=Target(names=(call.stored.name,)),
            call=asked,
            policy=RunPolicy(deadline_seconds=asked.answer_seconds),
            actor=call.actor,
        )
        begun = await call.domain.runs.start(order)
        return Begun(resource="runs", name=begun.name, scope=call.scope)

    return Action(
        name=command, summary=summary, permission=access.OPERATE, run=run, takes_time=True, anywhere=True
    )


class PinVersionBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    version: int | None = None


class VersionBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    version: int


class TakeOverBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    plan: str
    """The id of what `GET /v1/agents/ID/takeover` plans."""


async def _take_over(call: ActionCall) -> Begun | None:
    _must(await call.domain.handovers.take_over(call.stored, call.body.plan, actor=call.actor))
    return None


async def _give_back(call: ActionCall) -> Begun | None:
    _must(await call.domain.handovers.give_back(call.stored, actor=call.actor))
    return None


def _must(result: Result) -> None:
    if not result.success:
        raise FailedPrecondition(result.message)


def _raw_right(call: ActionCall) -> RawRight:
    def decide(_draft: Draft, reason: str) -> None:
        if not call.may(access.RAW):
            raise PermissionDenied(
                f"{call.actor} may not do this: {reason}", details={"permission": access.RAW}
            )

    return decide


async def _pin(call: ActionCall) -> Begun | None:
    await call.domain.agent_registry.pin(
        call.stored.scope, call.stored.name, call.body.version, actor=call.actor, raw=_raw_right(call)
    )
    return None


async def _restore(call: ActionCall) -> Begun | None:
    await call.domain.rewriting.restore(
        call.stored.scope, call.body.version, actor=call.actor, raw=_raw_right(call)
    )
    return None


# Workspaces.


class WorkspaceSpecView(Shape, frozen=True, forbid_unknown_fields=True):
    display_name: str = ""
    """Its name, unless it is called something else."""


def workspace_view(workspace: Workspace, _reading: Reading) -> View[WorkspaceSpecView, NoStatus]:
    """What is shown of a workspace."""
    return View(spec=WorkspaceSpecView(display_name=workspace.spec.name), status=None)


WORKSPACES = PublicResource(
    name="workspace",
    plural="workspaces",
    short=("ws",),
    summary="Virtual hosts and the proxies that serve them",
    kind=WORKSPACE,
    spec=WorkspaceSpecView,
    status=NoStatus,
    view=workspace_view,
    place=workspace_place,
    moves=True,
    permission=access.READ,
    named=lambda workspace, _reading: workspace.spec.slug,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="DISPLAY-NAME", value=".spec.displayName"),
        Column(title="AGE", value=".metadata.createdAt", type="age"),
    ),
    actions=(
        Action(
            name="roll-back",
            summary="Make the workspace what a version said, under a new number",
            permission=access.OPERATE,
            run=_restore,
            anywhere=True,
            body=VersionBody,
        ),
        *freeze_actions("proxies", lambda workspace: workspace.scope),
    ),
    search=(".metadata.name", ".spec.displayName"),
)


AGENTS = PublicResource(
    name="proxy-agent",
    plural="proxy-agents",
    short=("pa",),
    summary="An agent beside an NGINX",
    kind=AGENT,
    spec=MIRROR.shape(AgentSpec),
    status=ProxyAgentStatusView,
    view=agent_view,
    place=place,
    moves=True,
    permission=access.READ,
    named=lambda agent, _reading: agent.spec.name,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="STATE", value=".status.state"),
        Column(title="CONFIG", value=".status.configVersion", type="number"),
        Column(title="NGINX", value=".status.nginx"),
        Column(title="SINCE", value=".status.since", type="age"),
        Column(title="REASONS", value=".status.reasons"),
        Column(title="HOSTNAME", value=".status.hostname", wide=True),
        Column(title="ADDRESS", value=".status.address", wide=True),
        Column(title="VERSION", value=".status.version", wide=True),
    ),
    verbs=READING | {Verb.EXPLAIN, Verb.LOGS, Verb.FIGURES},
    actions=(
        _commanded(ProxyCommand.RELOAD, "Let its NGINX read its configuration again"),
        _commanded(ProxyCommand.RESTART, "Restart its NGINX"),
        _commanded(ProxyCommand.TEST, "Test what it serves, without applying anything"),
        Action(
            name="roll-back",
            summary="Serve what a version said, whatever came later; without one, the newest again",
            permission=access.OPERATE,
            run=_pin,
            anywhere=True,
            body=PinVersionBody,
        ),
        Action(
            name="take-over",
            summary="Serve in the place of the NGINX that it observes, as a plan says",
            permission=access.ADMINISTER,
            run=_take_over,
            anywhere=True,
            body=TakeOverBody,
        ),
        Action(
            name="give-back",
            summary="Start the NGINX again that it took over, as it was started before",
            permission=access.ADMINISTER,
            run=_give_back,
            anywhere=True,
        ),
        *freeze_actions("proxies", lambda agent: agent_scope(agent.scope, agent.name)),
    ),
    explain="agent",
    logs=observed.logs,
    figures=observed.figures,
    search=(".metadata.name", ".status.hostname", ".status.address"),
)


# What is served.

_NO_SECRETS = (RateLimit, ConnectionLimit, Canaries, Balancing)
"""Options with fields that are only called like secrets: a `key` by which requests are counted."""


def _for_readers(spec: SpecT) -> SpecT:
    """A spec with its secrets masked, and nothing else: what is shown can be applied elsewhere."""
    shown: SpecT = _unmasked(without_secrets(spec), spec)
    return shown


def _unmasked(shown: Any, real: Any) -> Any:
    if isinstance(real, _NO_SECRETS):
        return real
    if isinstance(real, msgspec.Struct):
        fields = real.__struct_fields__
        return msgspec.structs.replace(
            shown, **{name: _unmasked(getattr(shown, name), getattr(real, name)) for name in fields}
        )
    return tuple(map(_unmasked, shown, real)) if isinstance(real, tuple) else shown


def host_view(host: VirtualHost, reading: Reading) -> View[Any, NoStatus]:
    """What is shown of a virtual host."""
    spec = MIRROR.shown(host_without_hashes(_for_readers(host.spec)), references(host.scope, reading))
    return View(spec=spec, status=None)


VIRTUAL_HOSTS = PublicResource(
    name="virtual-host",
    plural="virtual-hosts",
    short=("vh", "host", "hosts"),
    summary="Names that proxies answer, and what they do with requests",
    kind=VIRTUAL_HOST,
    spec=MIRROR.shape(VirtualHostSpec),
    status=NoStatus,
    view=host_view,
    place=place,
    moves=True,
    permission=access.READ,
    named=lambda host, _reading: host.spec.name,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="SERVER-NAME", value=".spec.serverName"),
        Column(title="PORT", value=".spec.listenPort", type="number"),
        Column(title="TLS", value=".spec.sslEnabled"),
        Column(title="CERTIFICATE", value=".spec.certificate"),
        Column(title="LOCATIONS", value=lambda shown: len(shown["spec"]["locations"]), type="number"),
        Column(title="AGE", value=".metadata.createdAt", type="age", wide=True),
    ),
    verbs=READING | {Verb.EXPLAIN},
    relates=(Related(resource="certificate", path=".spec.certificate"),),
    explain="host",
    search=(".metadata.name", ".spec.serverName"),
)


def upstream_view(upstream: Upstream, reading: Reading) -> View[Any, NoStatus]:
    """What is shown of an upstream."""
    spec = MIRROR.shown(_for_readers(upstream.spec), references(upstream.scope, reading))
    return View(spec=spec, status=None)


UPSTREAMS = PublicResource(
    name="upstream",
    plural="upstreams",
    short=("up",),
    summary="Servers behind proxies",
    kind=UPSTREAM,
    spec=MIRROR.shape(UpstreamSpec),
    status=NoStatus,
    view=upstream_view,
    place=place,
    moves=True,
    permission=access.READ,
    named=lambda upstream, _reading: upstream.spec.name,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="ALGORITHM", value=".spec.algorithm"),
        Column(
            title="SERVERS",
            value=lambda shown: ",".join(one["address"] for one in shown["spec"]["servers"][:4]),
        ),
        Column(title="CHECKED", value=".spec.healthCheck.enabled"),
    ),
    search=(".metadata.name",),
)


# Certificates.


class ProxyCertificateSpecView(Shape, frozen=True, forbid_unknown_fields=True):
    provider: str
    """Who issues it; `imported` if its owner brings it."""
    domain: str = ""
    """Its name, which need not be said twice."""
    auto_renew: bool | None = None
    """Unless given, whatever somebody else than its owner issues is renewed."""
    private_key: Secret = Secret(set=False)
    """Imported through the proxies' own API, never here, and never shown."""


class ProxyCertificateStatusView(Shape, frozen=True):
    state: str
    names: Sequence[str]
    fingerprint: str
    issued_at: str | None
    expires_at: str | None
    error: str
    failures: int
    next_attempt_at: str | None
    alarm: str


def certificate_view(
    certificate: Certificate, _reading: Reading
) -> View[ProxyCertificateSpecView, ProxyCertificateStatusView]:
    """What is shown of a certificate; of its key, whether there is one."""
    spec, status = certificate.spec, certificate.status or CertificateStatus(state=CertificateState.PENDING)
    return View(
        spec=ProxyCertificateSpecView(
            domain=spec.domain,
            provider=spec.provider,
            auto_renew=spec.auto_renew,
            private_key=Secret(set=bool(status.fingerprint)),
        ),
        status=ProxyCertificateStatusView(
            state=status.state,
            names=status.names,
            fingerprint=status.fingerprint,
            issued_at=spelled_or_null(status.issued_at_ns),
            expires_at=spelled_or_null(status.expires_at_ns),
            error=status.error,
            failures=status.failures,
            next_attempt_at=spelled_or_null(status.next_attempt_at_ns),
            alarm=status.alarm,
        ),
    )


class RevokeCertificateBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    reason: RevocationReason = RevocationReason.UNSPECIFIED


async def _renew(call: ActionCall) -> Begun | None:
    await call.domain.certificates.renew(call.stored.scope, call.stored.name, actor=call.actor)
    return Begun(resource="certificates", name=call.stored.spec.domain, scope=call.scope)


async def _revoke(call: ActionCall) -> Begun | None:
    await call.domain.revoker.revoke(
        call.stored.scope, call.stored.name, reason=call.body.reason, actor=call.actor
    )
    return None


CERTIFICATES = PublicResource(
    name="certificate",
    plural="certificates",
    short=("cert", "certs"),
    summary="A certificate that proxies present",
    kind=CERTIFICATE,
    spec=ProxyCertificateSpecView,
    status=ProxyCertificateStatusView,
    view=certificate_view,
    place=place,
    moves=True,
    permission=access.READ,
    named=lambda certificate, _reading: certificate.spec.domain,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="STATE", value=".status.state"),
        Column(title="PROVIDER", value=".spec.provider"),
        Column(title="EXPIRES", value=".status.expiresAt", type="age"),
        Column(title="ERROR", value=".status.error"),
        Column(title="NAMES", value=".status.names", wide=True),
    ),
    verbs=READING | {Verb.EXPLAIN},
    actions=(
        Action(
            name="rotate",
            summary="Order another certificate for the same names",
            permission=access.OPERATE,
            run=_renew,
            anywhere=True,
            takes_time=True,
        ),
        Action(
            name="revoke",
            summary="Tell the authority that it must not be trusted any more",
            permission=access.OPERATE,
            run=_revoke,
            anywhere=True,
            body=RevokeCertificateBody,
        ),
    ),
    explain="certificate",
    search=(".metadata.name", ".status.names", ".status.fingerprint"),
)


# Events, people, runs.


class EventSpecView(Shape, frozen=True):
    type: str
    about: str
    """The object that it is about, as `resource/name`."""
    occurred_at: str
    details: Mapping[str, str]


def event_view(event: AgentEvent, reading: Reading) -> View[EventSpecView, NoStatus]:
    """What is shown of an event that an agent reported."""
    workspace, _, agent = event.scope.rpartition("/agent/")
    spec = event.spec
    return View(
        spec=EventSpecView(
            type=spec.event_type,
            about=f"proxy-agents/{_names(AGENT, workspace, reading)(agent)}",
            occurred_at=spelled(spec.occurred_at_ns),
            details=spec.data,
        ),
        status=None,
    )


EVENTS = PublicResource(
    name="event",
    plural="events",
    short=("ev",),
    summary="Something that an agent reported from its machine",
    kind=AGENT_EVENT,
    spec=EventSpecView,
    status=NoStatus,
    view=event_view,
    place=place,
    moves=True,
    permission=access.READ,
    named=lambda event, _reading: event.spec.event_id or event.uid,
    columns=(
        Column(title="TYPE", value=".spec.type"),
        Column(title="ABOUT", value=".spec.about"),
        Column(title="WHEN", value=".spec.occurredAt", type="age"),
        Column(title="DETAILS", value=".spec.details"),
    ),
    search=(".spec.type", ".spec.about"),
)


def user_view(user: User, _reading: Reading) -> View[AccountSpecView, AccountStatusView]:
    """What is shown of a user of proxies; roles are held in organisations."""
    spec = user.spec
    return View(
        spec=AccountSpecView(
            domain="proxies",
            email=spec.email,
            display_name=spec.name,
            roles=("proxies.system_admin",) if spec.is_system_admin else (),
            active=not spec.disabled,
            password=Secret(set=True),
        ),
        status=AccountStatusView(last_login_at=None),
    )


ACCOUNTS = account_resource(
    USER,
    view=user_view,
    named=lambda user, _reading: user.spec.email,
    shows=lambda user: not user.spec.is_adopted,
)


def _printed(_domain: Any, target: CommandTarget) -> Printed:
    return Printed(message=target.status.detail if target.status is not None else "")


RUNS = run_resource(
    PROXY_RUN,
    domain="proxies",
    place=place,
    read=access.READ,
    operate=access.OPERATE,
    command=lambda spec: spec.call.command,
    target=lambda spec: targets.shown(spec.target),
    runs=lambda domain: domain.runs,
    printed=_printed,
    anywhere=True,
)
RESOURCES = (WORKSPACES, AGENTS, VIRTUAL_HOSTS, UPSTREAMS, CERTIFICATES, EVENTS, ACCOUNTS, RUNS)
