"""REST: the machine of an agent, the NGINX found there with its take-over, and the rendered configuration."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.proxies import wire
from fleetplane.domains.proxies.access import ADMINISTER, RAW, READ
from fleetplane.domains.proxies.agents.handover import Handovers, ShownConfiguration, TakeoverPlan
from fleetplane.domains.proxies.agents.machines import Machines
from fleetplane.domains.proxies.agents.ports import AgentResult
from fleetplane.domains.proxies.agents.registry import Agents
from fleetplane.domains.proxies.kinds.records import Agent, AgentTokenStatus, Certificate, Contender
from fleetplane.domains.proxies.kinds.unique import refuse
from fleetplane.domains.proxies.nginx.blocks import Unrenderable
from fleetplane.domains.proxies.nginx.rendering import render
from fleetplane.domains.proxies.nginx.site import LACKS, Binary, Paths, Site
from fleetplane.domains.proxies.rest import bodies as requests
from fleetplane.domains.proxies.rest import views
from fleetplane.domains.proxies.rest.agents import AgentTokenView, CommandView, enrolled
from fleetplane.domains.proxies.rest.common import CREATED, ProxyCall, actor, commander, created
from fleetplane.domains.proxies.serving.certificates import Certificates
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, NotFound
from fleetplane.kernel.values.times import spelled, spelled_or_null
from fleetplane.rpc import Needs
from fleetplane.web.rest.pages import number
from fleetplane.web.rest.problems import Problem
from fleetplane.web.rest.routes import Answer, Query, Route, RouteGroup

_RENDERED_ROUTES = RouteGroup("Configuration")

STATE = Path("/var/lib/fleetplane/proxy-agent")
"""Stands for the agent's own folders, which the server does not know."""
_MODULES = {
    "http2": "http_v2",
    "http3": "http_v3",
    "tls": "http_ssl",
    "realip": "http_realip",
    "auth-request": "http_auth_request",
    "brotli": "http_brotli",
    "stream": "stream",
    "stream-sni": "stream_ssl_preread",
}
_NEWEST = (1, 28, 0)
NUMBER_LIMIT = 1 << 31


class RenderedView(msgspec.Struct, frozen=True, kw_only=True):
    """Without certificates, keys and the files of users."""

    version: int
    against: int | UnsetType = UNSET
    files: dict[str, str]
    """By name; with `against`, what is different in them, as a unified diff."""


class RenderedRoutes:
    def __init__(self, workspaces: Workspaces, agents: Agents) -> None:
        self._workspaces = workspaces
        self._agents = agents

    def routes(self) -> Sequence[Route]:
        return (
            _RENDERED_ROUTES.get(
                "/agents/{agent_id}/configs/{version}/rendered",
                self.rendered,
                RAW,
                query=(
                    Query(name="against", summary="Compare with this version", kind="integer", low=1),
                    Query(name="virtual_host_id", summary="Only the file of this virtual host"),
                    Query(name="file", summary="Only the file of this name, such as nginx.conf"),
                ),
            ),
        )

    async def rendered(self, call: ProxyCall) -> Answer[RenderedView]:
        """Get the NGINX configuration that an agent writes for a version."""
        agent = self._agents.get(call.scope, call.path["agent_id"])
        problems: list[Problem] = []
        version = number(call.path, "version", 1, low=1, high=NUMBER_LIMIT, problems=problems)
        other = number(call.query, "against", 0, low=1, high=NUMBER_LIMIT, problems=problems)
        refuse(problems)
        files = self._files(agent, version)
        if other:
            files = _compared(self._files(agent, other), files)
        if "virtual_host_id" in call.query:
            name = f"conf.d/host-{call.query['virtual_host_id']}.conf"
            files = {name: files[name]} if name in files else {}
        if "file" in call.query:
            files = {name: text for name, text in files.items() if name == call.query["file"]}
        return Answer(content=RenderedView(version=version, against=other or UNSET, files=files))

    def _files(self, agent: Agent, version: int) -> dict[str, str]:
        found = self._workspaces.version(agent.scope, version)
        if found is None:
            raise NotFound(f"version {version} is not kept")
        config = self._workspaces.share(agent, found)
        update = wire.config_update(config, dict.fromkeys(config.certificates, b""))
        try:
            made = render(update, _site(agent), release=str(version))
        except Unrenderable as error:
            raise FailedPrecondition(f"an agent would not write it: {error.message}") from error
        return {
            name: file.content.decode()
            for name, file in sorted(made.files.items())
            if not name.startswith("certs/")
        }


def _site(agent: Agent) -> Site:
    """The agent's machine, as far as it told about it."""
    known = agent.status.capabilities if agent.status is not None else ()
    version = next((one[6:] for one in known if one.startswith("nginx-")), "")
    parts = [int(one) for one in version.split(".") if one.isdecimal()]
    modules = frozenset(module for name, module in _MODULES.items() if f"{LACKS}{name}" not in known)
    binary = Binary(
        path=Path("/usr/sbin/nginx"),
        version=(parts[0], parts[1], parts[2]) if len(parts) == 3 else _NEWEST,
        modules=modules,
    )
    return Site(paths=Paths(state=STATE), binary=binary)


def _compared(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    made = {}
    for name in sorted(before.keys() | after.keys()):
        old, new = (each.get(name, "").splitlines(keepends=True) for each in (before, after))
        if told := "".join(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")):
            made[name] = told
    return made


_MACHINES_ROUTES = RouteGroup("Agents")
_ONE = "/agents/{agent_id}"


class ContenderView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    hostname: str
    ip_address: str
    key_fingerprint: str | None
    """None if it showed only the token."""
    refused_at: str


class MachineView(msgspec.Struct, frozen=True, kw_only=True):
    agent_id: str
    key_fingerprint: str | None
    """SHA-256 of the key that speaks for the agent; None while that is whoever has the token."""
    certificate_expires_at: str | None
    contender: ContenderView | None
    """The machine that was refused last, and waits for somebody to decide."""
    approved: str | None
    """The contender that may take over when it comes again."""


class MachineRoutes:
    def __init__(self, agents: Agents, machines: Machines) -> None:
        self._agents = agents
        self._machines = machines

    def routes(self) -> Sequence[Route]:
        return (
            _MACHINES_ROUTES.get(f"{_ONE}/machine", self.get, READ),
            _MACHINES_ROUTES.post(
                f"{_ONE}/machine/approve", self.approve, ADMINISTER, body=requests.DecideMachine
            ),
            _MACHINES_ROUTES.post(
                f"{_ONE}/machine/dismiss", self.dismiss, ADMINISTER, body=requests.DecideMachine
            ),
            _MACHINES_ROUTES.post(
                f"{_ONE}/token",
                self.reissue,
                ADMINISTER,
                body=requests.ReissueToken,
                body_optional=True,
                status=CREATED,
            ),
        )

    async def get(self, call: ProxyCall) -> Answer[MachineView]:
        """Get the machine that an agent is bound to, and the one that was refused."""
        agent = self._agents.get(call.scope, call.path["agent_id"])
        return Answer(content=_machine(agent.name, self._machines.binding(agent)))

    async def approve(self, call: ProxyCall) -> Answer[MachineView]:
        """Approve a change of machine: the refused machine takes over when it connects again."""
        body: requests.DecideMachine = call.body
        agent = self._agents.get(call.scope, call.path["agent_id"])
        token = await self._machines.approve(agent, body.contender_id, actor=actor(call))
        return Answer(content=_machine(agent.name, token.status))

    async def dismiss(self, call: ProxyCall) -> Answer[MachineView]:
        """Dismiss the machine that was refused, and end the alert."""
        body: requests.DecideMachine = call.body
        agent = self._agents.get(call.scope, call.path["agent_id"])
        token = await self._machines.dismiss(agent, body.contender_id, actor=actor(call))
        return Answer(content=_machine(agent.name, token.status))

    async def reissue(self, call: ProxyCall) -> Answer[AgentTokenView]:
        """Revoke an agent's token and certificate; a new token is returned once."""
        body: requests.ReissueToken = call.body or requests.ReissueToken()
        answer = call.answering(enrolled)
        return answer(
            await self._agents.reissue(
                call.scope, call.path["agent_id"], hours=body.expires_in_hours, actor=actor(call)
            )
        )


def _machine(agent: str, status: AgentTokenStatus | None) -> MachineView:
    status = status or AgentTokenStatus(activated_at_ns=0)
    return MachineView(
        agent_id=agent,
        key_fingerprint=status.key or None,
        certificate_expires_at=spelled_or_null(status.expires_at_ns),
        contender=_contender(status.contender) if status.contender is not None else None,
        approved=status.approved or None,
    )


def _contender(found: Contender) -> ContenderView:
    return ContenderView(
        id=found.id,
        hostname=found.hostname,
        ip_address=found.address,
        key_fingerprint=found.key or None,
        refused_at=spelled(found.refused_at_ns),
    )


LINES = 100
LINES_LIMIT = 1000
_ROUTES = RouteGroup("Agents")


class ShownLog(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    lines: tuple[str, ...]


class ConfirmTakeover(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    plan: str
    """The id of the plan that was looked at."""


class FetchCertificate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    certificate: str
    """Its file, as the observed configuration spells it."""
    domain: str | None = None
    """The certificate's first name, unless another is given."""


class ObservedRoutes:
    def __init__(
        self, clock: Clock, agents: Agents, handovers: Handovers, certificates: Certificates
    ) -> None:
        self._certificates = certificates
        self._clock = clock
        self._agents = agents
        self._handovers = handovers

    def routes(self) -> Sequence[Route]:
        return (
            _ROUTES.get(f"{_ONE}/observed", self.observed, RAW, needs=Needs.WRITES),
            _ROUTES.get(
                f"{_ONE}/observed/log",
                self.log,
                RAW,
                query=(
                    Query(name="name", summary="One of the logs that the agent reports"),
                    Query(
                        name="lines",
                        summary="How many",
                        kind="integer",
                        default=LINES,
                        low=1,
                        high=LINES_LIMIT,
                    ),
                ),
                needs=Needs.WRITES,
            ),
            _ROUTES.post(
                f"{_ONE}/observed/certificates",
                self.certificate,
                ADMINISTER,
                body=FetchCertificate,
                status=CREATED,
            ),
            _ROUTES.get(f"{_ONE}/takeover", self.plan, ADMINISTER, needs=Needs.WRITES),
            _ROUTES.post(f"{_ONE}/takeover", self.take_over, ADMINISTER, body=ConfirmTakeover),
            _ROUTES.post(f"{_ONE}/give-back", self.give_back, ADMINISTER),
        )

    async def observed(self, call: ProxyCall) -> Answer[ShownConfiguration]:
        """Get the configuration of the NGINX that an agent observes."""
        agent = self._agents.get(call.scope, call.path["agent_id"])
        return Answer(content=await self._handovers.shown(agent, actor=commander(call)))

    async def log(self, call: ProxyCall) -> Answer[ShownLog]:
        """Get the last lines of a log of the NGINX that an agent observes."""
        agent = self._agents.get(call.scope, call.path["agent_id"])
        problems: list[Problem] = []
        lines = number(call.query, "lines", LINES, low=1, high=LINES_LIMIT, problems=problems)
        refuse(problems)
        name = call.query.get("name", "")
        text = await self._handovers.log(agent, name, lines, actor=commander(call))
        return Answer(content=ShownLog(name=name, lines=tuple(text.splitlines())))

    async def certificate(self, call: ProxyCall) -> Answer[views.CertificateView]:
        """Import a certificate with its key from the NGINX that an agent observes."""
        agent, body = self._agents.get(call.scope, call.path["agent_id"]), call.body
        answer = call.answering(self._created)
        sent = await self._handovers.certificate(agent, body.certificate, actor=commander(call))
        return answer(
            await self._certificates.bring(
                call.scope, body.domain, sent.certificate, sent.private_key, actor=actor(call)
            )
        )

    def _created(self, made: Certificate) -> Answer[views.CertificateView]:
        return created(views.certificate(made, now_ns=self._clock.now_ns()), made, "certificates")

    async def plan(self, call: ProxyCall) -> Answer[TakeoverPlan]:
        """Plan to take over the NGINX that an agent observes; changes nothing."""
        agent = self._agents.get(call.scope, call.path["agent_id"])
        return Answer(content=await self._handovers.plan(agent, actor=commander(call)))

    async def take_over(self, call: ProxyCall) -> Answer[CommandView]:
        """Take over the NGINX that an agent observes, as a plan says."""
        agent = self._agents.get(call.scope, call.path["agent_id"])
        return self._done(await self._handovers.take_over(agent, call.body.plan, actor=commander(call)))

    async def give_back(self, call: ProxyCall) -> Answer[CommandView]:
        """Start the NGINX again that was taken over, as it was started before."""
        agent = self._agents.get(call.scope, call.path["agent_id"])
        return self._done(await self._handovers.give_back(agent, actor=commander(call)))

    def _done(self, result: AgentResult) -> Answer[CommandView]:
        view = CommandView(
            success=result.success, message=result.message, timestamp=spelled(self._clock.now_ns())
        )
        return Answer(content=view)
