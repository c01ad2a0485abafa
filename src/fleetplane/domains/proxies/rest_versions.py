"""REST: versions of a workspace's configuration, and everything that is done with whole configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.proxies import configuration, requests, rules
from fleetplane.domains.proxies.access import OPERATE, RAW, READ
from fleetplane.domains.proxies.agents import Agents
from fleetplane.domains.proxies.configuration import AgentConfig, Difference
from fleetplane.domains.proxies.hosts import normal
from fleetplane.domains.proxies.kinds import (
    AGENT,
    CONFIG_VERSION,
    Agent,
    ConfigVersion,
    ConfigVersionSpec,
    Deployment,
    SettingsSpec,
    UpstreamSpec,
    VirtualHostSpec,
)
from fleetplane.domains.proxies.ports import Commander, Order, Verb
from fleetplane.domains.proxies.rest import PAGING, ProxyCall, actor, commander
from fleetplane.domains.proxies.rewriting import Bundle, Outcome, Rewriting
from fleetplane.domains.proxies.values import DeploymentState
from fleetplane.domains.proxies.workspaces import Workspaces
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.store import Store
from fleetplane.web.paging import Listing, listing, number, paging
from fleetplane.web.problems import Code, Held, Problem, Rejected
from fleetplane.web.routes import Answer, Query, Route
from fleetplane.web.times import spelled, spelled_or_null

_CONFIG = "Configuration"
_WORKSPACE, _AGENT = "/workspaces/{workspace_id}", "/agents/{agent_id}"


class VersionView(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    digest: str
    cause: str
    subject: str
    actor: str
    restored_version: int | None
    virtual_hosts: int
    upstreams: int
    certificates: int
    created_at: str


class DiffView(msgspec.Struct, frozen=True, kw_only=True):
    from_version: int = msgspec.field(name="from")
    to_version: int = msgspec.field(name="to")
    differences: Sequence[Difference]


class DeploymentView(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    config_id: str
    state: DeploymentState | None
    error: str
    sent_at: str
    applied_at: str | None
    duration_ms: int | None


class ServedCertificate(msgspec.Struct, frozen=True, kw_only=True):
    domain: str
    fingerprint: str
    expires_at: str


class AgentConfigView(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent gets of a version; objects by id, certificates without their keys."""

    version: int
    content_version: int
    config_id: str
    virtual_hosts: dict[str, VirtualHostSpec]
    upstreams: dict[str, UpstreamSpec]
    certificates: dict[str, ServedCertificate]
    settings: SettingsSpec
    withheld: Sequence[str]
    """Virtual hosts that wait for their certificate."""


class RollbackView(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    """The new one."""
    restored_version: int | None


class ValidationView(msgspec.Struct, frozen=True, kw_only=True):
    valid: bool
    errors: Sequence[Problem]
    message: str | UnsetType = UNSET
    output: str | UnsetType = UNSET


class VersionRoutes:
    def __init__(
        self,
        store: Store,
        workspaces: Workspaces,
        agents: Agents,
        rewriting: Rewriting,
        commander: Commander,
    ) -> None:
        self._store = store
        self._workspaces = workspaces
        self._agents = agents
        self._rewriting = rewriting
        self._commander = commander

    def routes(self) -> Sequence[Route]:
        return (*self._workspace_routes(), *self._agent_routes())

    def _workspace_routes(self) -> Sequence[Route]:
        configs = f"{_WORKSPACE}/configs"
        return (
            Route(
                method="GET", path=configs, handler=self.versions, summary="List versions, newest first",
                tag=_CONFIG, permission=READ, answer=Listing[VersionView], query=PAGING,
            ),
            Route(
                method="GET", path=f"{configs}/diff", handler=self.diff, tag=_CONFIG, permission=READ,
                summary="Compare two versions", answer=DiffView,
                query=(
                    Query(name="from", summary="A version", kind="integer", low=1),
                    Query(name="to", summary="A version; the newest when absent", kind="integer", low=1),
                ),
            ),
            Route(
                method="GET", path=f"{configs}/{{version}}", handler=self.version, tag=_CONFIG,
                summary="Get a version", permission=READ, answer=VersionView,
            ),
            Route(
                method="POST", path=f"{_WORKSPACE}/rollback", handler=self.restore, tag=_CONFIG,
                summary="Make the workspace what a version said, as a new version", permission=OPERATE,
                body=requests.Rollback, answer=RollbackView,
            ),
            Route(
                method="POST", path=f"{_WORKSPACE}/config/validate", handler=self.validate, tag=_CONFIG,
                summary="Try a configuration without applying it", permission=OPERATE,
                body=requests.Validate, answer=ValidationView,
                query=(Query(name="agent_id", summary="The agent that tries `config_content`"),),
            ),
            Route(
                method="GET", path=f"{_WORKSPACE}/export", handler=self.export, tag=_CONFIG,
                summary="The whole configuration as one document", permission=READ, answer=Bundle,
            ),
            Route(
                method="POST", path=f"{_WORKSPACE}/import", handler=self.bring_in, tag=_CONFIG,
                summary="Add and change what an exported document names", permission=RAW, body=Bundle,
                answer=Outcome,
                query=(Query(name="dry_run", summary="Only check", choices=("true", "false")),),
            ),
        )  # fmt: skip

    def _agent_routes(self) -> Sequence[Route]:
        return (
            Route(
                method="GET", path=f"{_AGENT}/configs", handler=self.deployments, tag=_CONFIG,
                summary="Versions that were sent to an agent, newest first", permission=READ,
                answer=Listing[DeploymentView], query=PAGING,
            ),
            Route(
                method="GET", path=f"{_AGENT}/configs/{{version}}", handler=self.share, tag=_CONFIG,
                summary="What an agent gets of a version", permission=READ, answer=AgentConfigView,
            ),
            Route(
                method="POST", path=f"{_AGENT}/rollback", handler=self.pin, tag=_CONFIG, permission=OPERATE,
                summary="Let one agent serve an older version, under a new number",
                body=requests.Rollback, answer=RollbackView,
            ),
            Route(
                method="DELETE", path=f"{_AGENT}/rollback", handler=self.unpin, tag=_CONFIG,
                summary="Let an agent serve the newest version again", permission=OPERATE,
                answer=RollbackView,
            ),
        )  # fmt: skip

    # A workspace's versions.

    async def versions(self, call: ProxyCall) -> Answer[Listing[VersionView]]:
        found = list(reversed(self._store.list(CONFIG_VERSION, call.scope)))
        return Answer(content=listing(found, paging(call.query), _version))

    async def version(self, call: ProxyCall) -> Answer[VersionView]:
        wanted = _number(call.path, "version")
        for found in reversed(self._store.list(CONFIG_VERSION, call.scope)):
            if found.spec.version == wanted:
                return Answer(content=_version(found))
        raise NotFound(f"version {wanted} is not kept")

    async def diff(self, call: ProxyCall) -> Answer[DiffView]:
        newest = self._newest(call.scope)
        if "from" not in call.query:
            raise Rejected(Problem(field="from", message="This field is required", code=Code.REQUIRED))
        before = self._kept(call.scope, _number(call.query, "from"))
        after = self._kept(call.scope, _number(call.query, "to")) if "to" in call.query else newest
        found = configuration.differences(before, after, lambda name: self._workspaces.part(call.scope, name))
        view = DiffView(from_version=before.version, to_version=after.version, differences=list(found))
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
        body: requests.Rollback = call.body
        made = await self._rewriting.restore(call.scope, body.version, actor=actor(call))
        return Answer(content=RollbackView(version=made.version, restored_version=body.version))

    async def export(self, call: ProxyCall) -> Answer[Bundle]:
        return Answer(content=self._rewriting.export(call.scope))

    async def bring_in(self, call: ProxyCall) -> Answer[Outcome]:
        asked = call.query.get("dry_run", "false")
        if asked not in ("true", "false"):
            raise Rejected(Problem(field="dry_run", message="Must be true or false"))
        outcome = await self._rewriting.bring_in(
            call.scope, call.body, dry_run=asked == "true", actor=actor(call)
        )
        return Answer(content=outcome)

    # Trying.

    async def validate(self, call: ProxyCall) -> Answer[ValidationView]:
        body: requests.Validate = call.body
        if body.config_content is not UNSET:
            return await self._try_on_agent(call, body.config_content)
        if body.virtual_host is UNSET and body.upstream is UNSET:
            raise Rejected(
                Problem(field="", message="Nothing to validate: config_content, virtual_host or upstream",
                        code=Code.REQUIRED)
            )  # fmt: skip
        errors: list[Problem] = []
        if body.upstream is not UNSET:
            errors += _under("upstream", list(rules.upstream_problems(body.upstream.spec())))
        if body.virtual_host is not UNSET:
            errors += _under("virtual_host", self._host_errors(call.scope, body.virtual_host))
        return Answer(content=ValidationView(valid=not errors, errors=errors))

    def _host_errors(self, scope: str, host: requests.CreateVirtualHost) -> Sequence[Problem]:
        try:
            rules.accept_host(normal(host.spec()), self._workspaces.surroundings(scope))
        except (Rejected, Held) as error:
            return error.problems
        return ()

    async def _try_on_agent(self, call: ProxyCall, content: str) -> Answer[ValidationView]:
        agent = self._store.get(AGENT, call.scope, call.query.get("agent_id", ""))
        if agent is None:
            raise Rejected(
                Problem(field="agent_id", message="An agent of this workspace is needed to try it",
                        code=Code.UNKNOWN_REFERENCE)
            )  # fmt: skip
        order = Order(verb=Verb.VALIDATE, config_content=content)
        result = await self._commander.order(agent, order, actor=commander(call))
        errors = [] if result.success else [Problem(field="config_content", message=result.message)]
        return Answer(
            content=ValidationView(
                valid=result.success, errors=errors, message=result.message, output=result.output or UNSET
            )
        )

    # One agent's.

    async def deployments(self, call: ProxyCall) -> Answer[Listing[DeploymentView]]:
        agent = self._agents.get(call.scope, call.path["agent_id"])
        return Answer(content=listing(self._agents.deployments(agent), paging(call.query), _deployment))

    async def share(self, call: ProxyCall) -> Answer[AgentConfigView]:
        agent = self._agents.get(call.scope, call.path["agent_id"])
        version = self._kept(call.scope, _number(call.path, "version"))
        return Answer(content=_share(self._workspaces.share(agent, version)))

    async def pin(self, call: ProxyCall) -> Answer[RollbackView]:
        body: requests.Rollback = call.body
        agent = await self._agents.pin(call.scope, call.path["agent_id"], body.version, actor=actor(call))
        return self._pinned(agent)

    async def unpin(self, call: ProxyCall) -> Answer[RollbackView]:
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


def _version(found: ConfigVersion) -> VersionView:
    spec = found.spec
    return VersionView(
        version=spec.version,
        digest=spec.digest,
        cause=spec.cause,
        subject=spec.subject,
        actor=spec.actor.partition("?")[0],
        restored_version=spec.restored_version,
        virtual_hosts=len(spec.virtual_hosts),
        upstreams=len(spec.upstreams),
        certificates=len(spec.certificates),
        created_at=spelled(found.created_at_ns),
    )


def _deployment(found: Deployment) -> DeploymentView:
    status = found.status
    return DeploymentView(
        version=found.spec.version,
        config_id=found.spec.config_id,
        state=status.state if status else None,
        error=status.error if status else "",
        sent_at=spelled(found.spec.sent_at_ns),
        applied_at=spelled_or_null(status.applied_at_ns if status else None),
        duration_ms=status.duration_ms if status else None,
    )


def _share(found: AgentConfig) -> AgentConfigView:
    return AgentConfigView(
        version=found.version,
        content_version=found.content_version,
        config_id=found.config_id,
        virtual_hosts=dict(found.virtual_hosts),
        upstreams=dict(found.upstreams),
        certificates={
            identity: ServedCertificate(
                domain=one.domain, fingerprint=one.fingerprint, expires_at=spelled(one.expires_at_ns)
            )
            for identity, one in found.certificates.items()
        },
        settings=found.settings,
        withheld=found.withheld,
    )
