"""REST: versions of a workspace's configuration, and everything that is done with whole configurations."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET

from fleetplane.domains.proxies import wire
from fleetplane.domains.proxies.access import OPERATE, RAW, READ, Access
from fleetplane.domains.proxies.agents.ports import AgentOrder, AgentVerb, CommandPort
from fleetplane.domains.proxies.agents.registry import Agents
from fleetplane.domains.proxies.kinds.records import (
    ACCESS_LIST,
    AGENT,
    CERTIFICATE,
    CONFIG_VERSION,
    UPSTREAM,
    VIRTUAL_HOST,
    Agent,
    CertificatePart,
    ConfigVersionSpec,
    UpstreamSpec,
    VirtualHostSpec,
)
from fleetplane.domains.proxies.nginx.paths import ANYWHERE
from fleetplane.domains.proxies.nginx.reading import foreign_fault
from fleetplane.domains.proxies.nginx.site import VALIDATES_TYPED
from fleetplane.domains.proxies.rest import bodies as requests
from fleetplane.domains.proxies.rest import version_views as views
from fleetplane.domains.proxies.rest.common import PAGING, ProxyCall, Secrecy, actor, commander
from fleetplane.domains.proxies.rest.version_views import (
    AgentConfigView,
    DeploymentView,
    DiffView,
    RollbackView,
    ValidationView,
    VersionView,
)
from fleetplane.domains.proxies.rules import configuration, raw_text
from fleetplane.domains.proxies.rules import validation as rules
from fleetplane.domains.proxies.rules.configuration import authorities_of, upstream_authorities, upstreams_of
from fleetplane.domains.proxies.rules.raw_text import RawRight
from fleetplane.domains.proxies.serving.bulk_changes import ImportOutcome, Rewriting
from fleetplane.domains.proxies.serving.bundles import Bundle
from fleetplane.domains.proxies.serving.hosts import normal, sealing
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.kernel.errors import FailedPrecondition, NotFound
from fleetplane.kernel.store import Store
from fleetplane.web.rest.pages import Listing, listing, number, paging
from fleetplane.web.rest.problems import Code, ConflictBlocker, Problem, Rejected
from fleetplane.web.rest.routes import Answer, Query, Route, RouteGroup

_CONFIG = RouteGroup("Configuration")
CANDIDATE = "candidate"
"""The id of what is tried: of none that there is."""
_WORKSPACE, _AGENT = "/workspaces/{workspace_id}", "/agents/{agent_id}"


class VersionRoutes:
    def __init__(
        self,
        store: Store,
        workspaces: Workspaces,
        agents: Agents,
        rewriting: Rewriting,
        commander: CommandPort,
        access: Access,
    ) -> None:
        self._secrecy = Secrecy(access)
        self._store = store
        self._access = access
        self._workspaces = workspaces
        self._agents = agents
        self._rewriting = rewriting
        self._commander = commander

    def routes(self) -> Sequence[Route]:
        return (*self._workspace_routes(), *self._agent_routes())

    def _workspace_routes(self) -> Sequence[Route]:
        configs = f"{_WORKSPACE}/configs"
        return (
            _CONFIG.get(configs, self.versions, READ, query=PAGING),
            _CONFIG.get(
                f"{configs}/diff",
                self.diff,
                READ,
                query=(
                    Query(name="from", summary="Version number", kind="integer", low=1),
                    Query(name="to", summary="Version number; the newest when absent", kind="integer", low=1),
                ),
            ),
            _CONFIG.get(f"{configs}/{{version}}", self.version, READ),
            _CONFIG.post(f"{_WORKSPACE}/rollback", self.restore, OPERATE, body=requests.Rollback),
            _CONFIG.post(
                f"{_WORKSPACE}/config/validate",
                self.validate,
                OPERATE,
                body=requests.Validate,
                query=(
                    Query(name="agent_id", summary="Agent whose NGINX tests the configuration"),
                    Query(name="virtual_host_id", summary="Virtual host that `virtual_host` would replace"),
                ),
            ),
            _CONFIG.get(f"{_WORKSPACE}/export", self.export, READ),
            _CONFIG.post(
                f"{_WORKSPACE}/import",
                self.bring_in,
                RAW,
                body=Bundle,
                query=(
                    Query(name="dry_run", summary="Validate without importing", choices=("true", "false")),
                ),
            ),
        )

    def _agent_routes(self) -> Sequence[Route]:
        return (
            _CONFIG.get(f"{_AGENT}/configs", self.deployments, READ, query=PAGING),
            _CONFIG.get(f"{_AGENT}/configs/{{version}}", self.share, READ),
            _CONFIG.post(f"{_AGENT}/rollback", self.pin, OPERATE, body=requests.Rollback),
            _CONFIG.delete(f"{_AGENT}/rollback", self.unpin, OPERATE),
        )

    # A workspace's versions.

    async def versions(self, call: ProxyCall) -> Answer[Listing[VersionView]]:
        """List versions, newest first."""
        found = list(reversed(self._store.list(CONFIG_VERSION, call.scope)))
        return Answer(content=listing(found, paging(call.query), views.version))

    async def version(self, call: ProxyCall) -> Answer[VersionView]:
        """Get a version."""
        wanted = _number(call.path, "version")
        for found in reversed(self._store.list(CONFIG_VERSION, call.scope)):
            if found.spec.version == wanted:
                return Answer(content=views.version(found))
        raise NotFound(f"version {wanted} is not kept")

    async def diff(self, call: ProxyCall) -> Answer[DiffView]:
        """Compare two versions."""
        newest = self._newest(call.scope)
        if "from" not in call.query:
            raise Rejected(Problem(field="from", message="This field is required", code=Code.REQUIRED))
        before = self._kept(call.scope, _number(call.query, "from"))
        after = self._kept(call.scope, _number(call.query, "to")) if "to" in call.query else newest
        found = configuration.differences(before, after, lambda name: self._workspaces.part(call.scope, name))
        told = list(self._secrecy.differences(call, found))
        view = DiffView(from_version=before.version, to_version=after.version, differences=told)
        return Answer(content=view)

    def _newest(self, scope: str) -> ConfigVersionSpec:
        newest = self._workspaces.newest(scope)
        if newest is None:
            raise NotFound("workspace not found")
        return newest

    def _kept(self, scope: str, number: int) -> ConfigVersionSpec:
        found = self._workspaces.version(scope, number)
        if found is None:
            raise NotFound(f"version {number} is not kept")
        return found

    async def restore(self, call: ProxyCall) -> Answer[RollbackView]:
        """Roll a workspace back to a version, as a new version."""
        body: requests.Rollback = call.body
        made = await self._rewriting.restore(
            call.scope, body.version, actor=actor(call), raw=self._raw_right(call)
        )
        return Answer(content=RollbackView(version=made.version, restored_version=body.version))

    async def export(self, call: ProxyCall) -> Answer[Bundle]:
        """Export the configuration of a workspace."""
        return Answer(content=self._secrecy.document(call, self._rewriting.export(call.scope)))

    async def bring_in(self, call: ProxyCall) -> Answer[ImportOutcome]:
        """Import an exported configuration: create and change what it names."""
        asked = call.query.get("dry_run", "false")
        if asked not in ("true", "false"):
            raise Rejected(Problem(field="dry_run", message="Must be true or false"))
        outcome = await self._rewriting.bring_in(
            call.scope,
            call.body,
            dry_run=asked == "true",
            actor=actor(call),
            raw=self._raw_right(call),
        )
        return Answer(content=outcome)

    def _raw_right(self, call: ProxyCall) -> RawRight:
        return self._access.raw_right(call.caller, call.scope)

    # Trying.

    async def validate(self, call: ProxyCall) -> Answer[ValidationView]:
        """Validate a configuration without applying it."""
        body: requests.Validate = call.body
        typed = body.virtual_host is not UNSET or body.upstream is not UNSET
        if body.config_content is not UNSET and typed:
            message = "Either this or virtual_host and upstream, not both"
            raise Rejected(Problem(field="config_content", message=message, code=Code.INCOMPATIBLE))
        if body.config_content is not UNSET:
            return await self._try_on_agent(call, body.config_content)
        if not typed:
            raise Rejected(
                Problem(
                    field="",
                    message="Nothing to validate: config_content, virtual_host or upstream",
                    code=Code.REQUIRED,
                )
            )
        errors: list[Problem] = []
        if body.upstream is not UNSET:
            around = self._workspaces.surroundings(call.scope)
            problems = rules.upstream_problems(body.upstream.spec(), around.certificates)
            errors += _under("upstream", list(problems))
        if body.virtual_host is not UNSET:
            errors += _under("virtual_host", self._host_errors(call, body.virtual_host))
        if not errors and "agent_id" in call.query:
            return await self._try_typed(call, body)
        return Answer(content=ValidationView(valid=not errors, errors=errors))

    def _host_errors(self, call: ProxyCall, host: requests.CreateVirtualHost) -> Sequence[Problem]:
        replaced = call.query.get("virtual_host_id", "")
        if replaced and self._store.get(VIRTUAL_HOST, call.scope, replaced) is None:
            raise NotFound(f"virtual host {replaced} is not in this workspace")
        around = self._workspaces.surroundings(call.scope, without=replaced)
        try:
            rules.accept_host(normal(host.spec()), around)
        except (Rejected, ConflictBlocker) as error:
            return error.problems
        return ()

    async def _try_typed(self, call: ProxyCall, body: requests.Validate) -> Answer[ValidationView]:
        """Have an agent's NGINX look at them beside what it serves."""
        agent = self._asked_agent(call)
        called = call.query.get("virtual_host_id", "") or CANDIDATE  # it takes the place of what is called so
        hosts = {} if body.virtual_host is UNSET else {called: normal(body.virtual_host.spec())}
        hosts = {name: await sealing(spec) for name, spec in hosts.items()}
        for spec in hosts.values():
            if raw_text.host_reason(None, spec):
                self._access.check(call.caller, RAW, call.scope, missing="workspace")
        if VALIDATES_TYPED not in (agent.status.capabilities if agent.status else ()):
            raise FailedPrecondition(
                f"agent {agent.spec.name} cannot try virtual hosts and upstreams",
                hint="update its program, or leave agent_id out to have the server's rules alone applied",
            )
        upstreams = {} if body.upstream is UNSET else {CANDIDATE: body.upstream.spec()}
        groups = {**self._needed_upstreams(call.scope, hosts), **upstreams}
        candidate = wire.candidate(
            hosts,
            groups,
            self._needed_certificates(call.scope, hosts, groups),
            self._authorities(call.scope, hosts, groups),
            {one.name: one.spec for one in self._store.list(ACCESS_LIST, call.scope)},
        )
        order = AgentOrder(verb=AgentVerb.VALIDATE, candidate=candidate)
        return await self._asked(call, agent, order, field="virtual_host" if hosts else "upstream")

    def _needed_upstreams(self, scope: str, hosts: Mapping[str, VirtualHostSpec]) -> dict[str, UpstreamSpec]:
        named = {one for host in hosts.values() for place in host.locations for one in upstreams_of(place)}
        return {one.name: one.spec for one in self._store.list(UPSTREAM, scope) if one.name in named}

    def _authorities(
        self, scope: str, hosts: Mapping[str, VirtualHostSpec], groups: Mapping[str, UpstreamSpec]
    ) -> dict[str, CertificatePart]:
        named = {one for host in hosts.values() for one in authorities_of(host)}
        named |= {one for group in groups.values() for one in upstream_authorities(group)}
        return {
            one.name: CertificatePart(
                domain=one.spec.domain, fingerprint="", chain_pem=one.status.chain_pem, expires_at_ns=0
            )
            for one in self._store.list(CERTIFICATE, scope)
            if one.name in named and one.status is not None
        }

    def _needed_certificates(
        self, scope: str, hosts: Mapping[str, VirtualHostSpec], groups: Mapping[str, UpstreamSpec]
    ) -> dict[str, CertificatePart]:
        """Those that are still being issued too: for a trial their name is enough."""
        named = {host.ssl_certificate_id for host in hosts.values() if host.ssl_enabled}
        named |= {one.tls.client_certificate_id or None for one in groups.values() if one.tls}
        return {
            one.name: CertificatePart(domain=one.spec.domain, fingerprint="", chain_pem="", expires_at_ns=0)
            for one in self._store.list(CERTIFICATE, scope)
            if one.name in named
        }

    def _asked_agent(self, call: ProxyCall) -> Agent:
        agent = self._store.get(AGENT, call.scope, call.query.get("agent_id", ""))
        if agent is None:
            raise Rejected(
                Problem(
                    field="agent_id",
                    message="An agent of this workspace is needed to try it",
                    code=Code.UNKNOWN_REFERENCE,
                )
            )
        return agent

    async def _asked(
        self, call: ProxyCall, agent: Agent, order: AgentOrder, *, field: str
    ) -> Answer[ValidationView]:
        result = await self._commander.order(agent, order, actor=commander(call))
        errors = [] if result.success else [Problem(field=field, message=result.message)]
        return Answer(
            content=ValidationView(
                valid=result.success, errors=errors, message=result.message, output=result.output or UNSET
            )
        )

    async def _try_on_agent(self, call: ProxyCall, content: str) -> Answer[ValidationView]:
        """Raw text is an administrator's, also where it is only tested: NGINX opens what it names."""
        self._access.check(call.caller, RAW, call.scope, missing="workspace")
        agent = self._asked_agent(call)
        # A megabyte takes the parser a second: not on the event loop.
        if fault := await asyncio.to_thread(foreign_fault, content, ANYWHERE):
            refused = [Problem(field="config_content", message=fault)]
            return Answer(content=ValidationView(valid=False, errors=refused, message=fault))
        order = AgentOrder(verb=AgentVerb.VALIDATE, config_content=content)
        return await self._asked(call, agent, order, field="config_content")

    # One agent's.

    async def deployments(self, call: ProxyCall) -> Answer[Listing[DeploymentView]]:
        """List versions sent to an agent, newest first."""
        agent = self._agents.get(call.scope, call.path["agent_id"])
        return Answer(content=listing(self._agents.deployments(agent), paging(call.query), views.deployment))

    async def share(self, call: ProxyCall) -> Answer[AgentConfigView]:
        """Get the part of a version that an agent receives."""
        agent = self._agents.get(call.scope, call.path["agent_id"])
        version = self._kept(call.scope, _number(call.path, "version"))
        return Answer(
            content=self._secrecy.document(call, views.share(self._workspaces.share(agent, version)))
        )

    async def pin(self, call: ProxyCall) -> Answer[RollbackView]:
        """Pin an agent to an older version, under a new number."""
        body: requests.Rollback = call.body
        agent = await self._agents.pin(
            call.scope, call.path["agent_id"], body.version, actor=actor(call), raw=self._raw_right(call)
        )
        return self._pinned(agent)

    async def unpin(self, call: ProxyCall) -> Answer[RollbackView]:
        """Unpin an agent: it serves the newest version again."""
        agent = await self._agents.pin(call.scope, call.path["agent_id"], None, actor=actor(call))
        return self._pinned(agent)

    def _pinned(self, agent: Agent) -> Answer[RollbackView]:
        newest = self._newest(agent.scope)
        return Answer(
            content=RollbackView(version=newest.version, restored_version=agent.spec.pinned_version)
        )


def _number(source: Mapping[str, str], name: str) -> int:
    problems: list[Problem] = []
    found = number(source, name, 0, low=1, high=10**12, problems=problems)
    if problems:
        raise Rejected(*problems)
    return found


def _under(field: str, problems: Sequence[Problem]) -> list[Problem]:
    return [msgspec.structs.replace(problem, field=f"{field}.{problem.field}") for problem in problems]
