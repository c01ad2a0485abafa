"""REST: deployments of versions at agents, retries, and runs of commands at many agents."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.proxies.access import OPERATE, READ
from fleetplane.domains.proxies.agents.commands import printed
from fleetplane.domains.proxies.agents.events import AgentEvent, AgentEvents
from fleetplane.domains.proxies.agents.ports import AgentPresence, Deployer
from fleetplane.domains.proxies.agents.registry import Agents
from fleetplane.domains.proxies.agents.runs import ProxyCall as NginxCall
from fleetplane.domains.proxies.agents.runs import ProxyCommand, ProxyOrder, ProxyRuns, ProxyRunSpec
from fleetplane.domains.proxies.kinds.records import (
    AGENT,
    DEPLOYMENT,
    Agent,
    Deployment,
    agent_scope,
    version_name,
)
from fleetplane.domains.proxies.kinds.values import AgentState, DeploymentState
from fleetplane.domains.proxies.rest import views
from fleetplane.domains.proxies.rest.common import PAGING, STOP_LIMIT_SECONDS, ProxyCall, actor
from fleetplane.domains.proxies.rules.alerts import ALERT
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.fleet.runs.channel import RunOrder
from fleetplane.fleet.runs.rest import RunBody, RunRequests, RunRoutes, TargetResult
from fleetplane.kernel.commands import CommandTarget
from fleetplane.kernel.errors import Conflict, NotFound, Unavailable
from fleetplane.kernel.reconcile import Reason
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import spelled, spelled_or_null
from fleetplane.web.rest.pages import Listing, in_order, listing, number, paging
from fleetplane.web.rest.problems import Code, Problem, Rejected
from fleetplane.web.rest.routes import Answer, Route, RouteGroup


class ProxyRunBody(RunBody, forbid_unknown_fields=True, kw_only=True):
    command: ProxyCommand
    force: bool = False
    """With `restart`."""
    graceful: bool = True
    """With `reload` and `stop`."""
    timeout_seconds: int = 30
    """With `stop`: within how long NGINX has to end its connections."""


def order(call: ProxyCall) -> ProxyOrder:
    """What a request asks for. Agents have the usual time for an answer unless the policy gives another."""
    body: ProxyRunBody = call.body
    if not 0 <= body.timeout_seconds <= STOP_LIMIT_SECONDS:
        message = f"Must be between 0 and {STOP_LIMIT_SECONDS}"
        raise Rejected(Problem(field="timeout_seconds", message=message, code=Code.OUT_OF_RANGE))
    asked = NginxCall(
        command=body.command, force=body.force, graceful=body.graceful, timeout_seconds=body.timeout_seconds
    )
    return RunOrder(
        scope=call.scope,
        target=body.target.target(),
        call=asked,
        policy=body.policy.policy(deadline_seconds=asked.answer_seconds),
        actor=actor(call),
    )


def run_routes(runs: ProxyRuns) -> RunRoutes[ProxyRunSpec, NginxCall]:
    def result(target: CommandTarget) -> TargetResult:
        assert target.status is not None
        return TargetResult(message=target.status.detail, stdout=printed(runs.ledger, target))

    requests: RunRequests[ProxyRunSpec, NginxCall] = RunRequests(
        base="/workspaces/{workspace_id}",
        tag="Runs",
        read=READ,
        operate=OPERATE,
        body=ProxyRunBody,
        order=order,
        target=lambda spec: spec.target,
        program=lambda spec: (spec.call.command, spec.call.arguments),
        result=result,
        actor=actor,
        anywhere=True,
        started_by=lambda name: name.partition("?")[0],  # what follows belongs to the audit log
    )
    return RunRoutes(runs, requests)


_CONFIG = RouteGroup("Configuration")
_AGENTS = RouteGroup("Agents")
_VERSION, _AGENT = "/workspaces/{workspace_id}/configs/{version}", "/agents/{agent_id}"
_FAILED = (DeploymentState.FAILED, DeploymentState.ROLLED_BACK, DeploymentState.SUPERSEDED)


class AgentVersionView(msgspec.Struct, frozen=True, kw_only=True):
    """How far one agent is with one version."""

    agent_id: str
    agent_name: str
    in_service: bool
    """Whether the agent's last report shows this version."""
    state: DeploymentState | None
    """Null for a version that the agent was not sent."""
    error: str
    sent_at: str | None
    applied_at: str | None
    duration_ms: int | None
    attempt: int
    set_aside: dict[str, str] | UnsetType = UNSET
    """Parts that are not in service although the version is, each with its error."""


class AgentEventView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: str
    occurred_at: str
    received_at: str
    details: dict[str, str]


class RetryView(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    """What is tried again: the newest."""
    agents: Sequence[str]
    """Those that try again."""
    away: Sequence[str] = ()
    """Those that are not connected; they get the newest version when they come."""


class ExplanationView(msgspec.Struct, frozen=True, kw_only=True):
    agent_id: str
    state: AgentState
    reasons: Sequence[str]
    """Why it is degraded or offline."""
    alerts: Sequence[views.AlertView]
    findings: Sequence[Reason]
    """What its configuration waits for; empty if it serves what it should."""
    looked_at: str | None
    next_look_at: str | None
    last_error: str
    """Of the server's own last look, if that failed."""


class DeploymentRoutes:
    def __init__(
        self,
        store: Store,
        workspaces: Workspaces,
        agents: Agents,
        presence: AgentPresence,
        deployer: Deployer,
    ) -> None:
        self._store = store
        self._workspaces = workspaces
        self._agents = agents
        self._presence = presence
        self._deployer = deployer
        self._events = AgentEvents(store)

    def routes(self) -> Sequence[Route]:
        return (
            _CONFIG.get(f"{_VERSION}/agents", self.agents, READ, query=PAGING),
            _CONFIG.post(f"{_VERSION}/retry", self.retry_version, OPERATE),
            _AGENTS.post(f"{_AGENT}/retry", self.retry_agent, OPERATE),
            _AGENTS.get(f"{_AGENT}/explain", self.explain, READ),
            _AGENTS.get(f"{_AGENT}/events", self.events, READ, query=PAGING),
        )

    # Versions.

    async def agents(self, call: ProxyCall) -> Answer[Listing[AgentVersionView]]:
        """List each agent's progress with a version."""
        version = self._kept(call)
        found = in_order(self._store.list(AGENT, call.scope))
        return Answer(content=listing(found, paging(call.query), lambda one: self._row(one, version)))

    def _kept(self, call: ProxyCall) -> int:
        problems: list[Problem] = []
        version = number(call.path, "version", 0, low=1, high=10**12, problems=problems)
        if problems:
            raise Rejected(*problems)
        if self._workspaces.version(call.scope, version) is None:
            raise NotFound(f"version {version} is not kept")
        return version

    def _row(self, agent: Agent, version: int) -> AgentVersionView:
        found = self._deployment(agent, version)
        status = found.status if found is not None else None
        return AgentVersionView(
            agent_id=agent.name,
            agent_name=agent.spec.name,
            in_service=self._serves(agent) == version,
            state=status.state if status else None,
            error=status.error if status else "",
            sent_at=spelled(found.spec.sent_at_ns) if found else None,
            applied_at=spelled_or_null(status.applied_at_ns if status else None),
            duration_ms=status.duration_ms if status else None,
            attempt=found.spec.attempt if found else 0,
            set_aside=(status.set_aside if status else {}) or UNSET,
        )

    def _serves(self, agent: Agent) -> int | None:
        """The version that an agent reports; of one at another server, the last that it confirmed."""
        seen = self._presence.sighting(agent.name)
        if (seen is None or not seen.here) and self._presence.is_present(agent.name):
            done = (one for one in self._agents.deployments(agent) if _is_confirmed(one))
            return next((one.spec.version for one in done), None)
        health = seen.health if seen else agent.status.health if agent.status else None
        return health.config_version if health is not None else None

    def _deployment(self, agent: Agent, version: int) -> Deployment | None:
        return self._store.get(DEPLOYMENT, agent_scope(agent.scope, agent.name), version_name(version))

    # Trying again.

    async def retry_version(self, call: ProxyCall) -> Answer[RetryView]:
        """Retry the newest version on every agent where it failed."""
        version, newest = self._kept(call), self._newest(call.scope)
        if version != newest:
            raise Conflict(
                f"version {version} is not the newest, {newest} is", hint="only the newest version is tried"
            )
        wanting = [one for one in self._store.list(AGENT, call.scope) if self._has_failed(one, version)]
        tried = [agent.name for agent in wanting if await self._deployer.retried(agent)]
        away = [agent.name for agent in wanting if agent.name not in tried]
        return Answer(content=RetryView(version=version, agents=tried, away=away))

    async def retry_agent(self, call: ProxyCall) -> Answer[RetryView]:
        """Retry the newest version on an agent where it failed."""
        agent = self._agents.get(call.scope, call.path["agent_id"])
        newest = self._newest(call.scope)
        failed = self._has_failed(agent, newest)
        if failed and not await self._deployer.retried(agent):
            raise Unavailable(f"agent {agent.spec.name} is not connected")
        return Answer(content=RetryView(version=newest, agents=[agent.name] if failed else []))

    def _newest(self, scope: str) -> int:
        newest = self._workspaces.newest(scope)
        if newest is None:
            raise NotFound("workspace not found")
        return newest.version

    def _has_failed(self, agent: Agent, version: int) -> bool:
        found = self._deployment(agent, version)
        status = found.status if found is not None else None
        return status is not None and (status.state in _FAILED or bool(status.set_aside))

    # Why, and what happened.

    async def explain(self, call: ProxyCall) -> Answer[ExplanationView]:
        """Explain an agent's state and what its configuration waits for."""
        agent = self._agents.get(call.scope, call.path["agent_id"])
        found = self._deployer.explain(agent.name)
        alerts = self._store.list(ALERT, agent_scope(agent.scope, agent.name))
        return Answer(
            content=ExplanationView(
                agent_id=agent.name,
                state=views.agent_state(agent),
                reasons=agent.status.reasons if agent.status else ("the agent has never registered",),
                alerts=[views.alert(one) for one in alerts],
                findings=found.reasons if found else (),
                looked_at=spelled_or_null(found.at_ns if found else None),
                next_look_at=spelled_or_null(found.next_due_ns if found else None),
                last_error=found.last_error if found else "",
            )
        )

    async def events(self, call: ProxyCall) -> Answer[Listing[AgentEventView]]:
        """List events of an agent's machine, newest first."""
        agent = self._agents.get(call.scope, call.path["agent_id"])
        return Answer(content=listing(self._events.of(agent), paging(call.query), _event))


def _is_confirmed(found: Deployment) -> bool:
    return found.status is not None and found.status.state is DeploymentState.SUCCESS


def _event(found: AgentEvent) -> AgentEventView:
    return AgentEventView(
        id=found.spec.event_id,
        type=found.spec.event_type,
        occurred_at=spelled(found.spec.occurred_at_ns),
        received_at=spelled(found.updated_at_ns),
        details=found.spec.data,
    )
