"""Agents beside NGINX, and what can be done with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fleetplane.domains.proxies import access
from fleetplane.domains.proxies.agents import observed
from fleetplane.domains.proxies.agents.ports import AgentResult
from fleetplane.domains.proxies.agents.runs import ProxyCall, ProxyCommand
from fleetplane.domains.proxies.kinds.records import AGENT, Agent, AgentSpec, agent_scope
from fleetplane.domains.proxies.resources.places import MIRROR, place
from fleetplane.domains.proxies.resources.raw_rights import raw_right
from fleetplane.domains.proxies.rules.configuration import labels_of
from fleetplane.fleet.resources.acting import freeze_actions
from fleetplane.fleet.resources.declaration import (
    READING,
    ActionCall,
    Begun,
    Column,
    ObjectState,
    PublicResource,
    ResourceAction,
    ResourceShape,
    ResourceVerb,
    ResourceView,
    ViewReader,
)
from fleetplane.fleet.runs.channel import RunOrder
from fleetplane.fleet.runs.policy import RunPolicy
from fleetplane.fleet.runs.resources import begin
from fleetplane.fleet.runs.targets import RunTarget
from fleetplane.kernel.errors import FailedPrecondition
from fleetplane.kernel.values.times import spelled_or_null


class ProxyAgentStatusView(ResourceShape, frozen=True):
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
    nginx: str
    """`running`, `stopped` or `unknown`."""
    config_version: int | None
    observed: ObservedView | None
    """The NGINX that the agent was started beside, if it was."""


class ObservedView(ResourceShape, frozen=True):
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


def agent_view(agent: Agent, _reading: ViewReader) -> ResourceView[Any, ProxyAgentStatusView]:
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
    return ResourceView(spec=MIRROR.shown(agent.spec), status=shown, labels=labels_of(agent))


def live_agent(domain: Any, agent: Agent) -> Agent:
    """The record with what its open session knows, which is stored with changes only."""
    seen = domain.presences.sighting(agent.name)
    if agent.status is None or seen is None:
        return agent
    health = seen.health or agent.status.health
    status = msgspec.structs.replace(agent.status, last_seen_at_ns=seen.last_seen_at_ns, health=health)
    return msgspec.structs.replace(agent, status=status)


def agent_state(agent: Agent) -> ObjectState:
    """The state of an agent, with what is wrong with it."""
    if agent.status is None:
        return ObjectState("unregistered")
    return ObjectState(agent.status.state, "; ".join(agent.status.reasons))


def _commanded(command: ProxyCommand, summary: str) -> ResourceAction:
    async def run(call: ActionCall) -> Begun | None:
        asked = ProxyCall(command=command)
        order = RunOrder(
            scope=call.stored.scope,
            target=RunTarget(names=(call.stored.name,)),
            call=asked,
            policy=RunPolicy(deadline_seconds=asked.answer_seconds),
            actor=call.actor,
        )
        return await begin(call, call.domain.runs, order)

    return ResourceAction(
        name=command, summary=summary, permission=access.OPERATE, run=run, takes_time=True, anywhere=True
    )


class PinVersionBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    version: int | None = None


class TakeOverBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    plan: str
    """The id of what `GET /v1/agents/ID/takeover` plans."""


async def _take_over(call: ActionCall) -> Begun | None:
    _must(await call.domain.handovers.take_over(call.stored, call.body.plan, actor=call.actor))
    return None


async def _give_back(call: ActionCall) -> Begun | None:
    _must(await call.domain.handovers.give_back(call.stored, actor=call.actor))
    return None


def _must(result: AgentResult) -> None:
    if not result.success:
        raise FailedPrecondition(result.message)


async def _pin(call: ActionCall) -> Begun | None:
    await call.domain.agent_registry.pin(
        call.stored.scope, call.stored.name, call.body.version, actor=call.actor, raw=raw_right(call)
    )
    return None


AGENTS = PublicResource(
    name="proxy-agent",
    plural="proxy-agents",
    short=("pa",),
    summary="An agent beside an NGINX",
    kind=AGENT,
    spec=MIRROR.shape(AgentSpec),
    status=ProxyAgentStatusView,
    view=agent_view,
    live=live_agent,
    state=agent_state,
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
    verbs=READING | {ResourceVerb.EXPLAIN, ResourceVerb.LOGS, ResourceVerb.FIGURES},
    actions=(
        _commanded(ProxyCommand.RELOAD, "Let its NGINX read its configuration again"),
        _commanded(ProxyCommand.RESTART, "Restart its NGINX"),
        _commanded(ProxyCommand.TEST, "Test what it serves, without applying anything"),
        ResourceAction(
            name="roll-back",
            summary="Serve what a version said, whatever came later; without one, the newest again",
            permission=access.OPERATE,
            run=_pin,
            anywhere=True,
            body=PinVersionBody,
        ),
        ResourceAction(
            name="take-over",
            summary="Serve in the place of the NGINX that it observes, as a plan says",
            permission=access.ADMINISTER,
            run=_take_over,
            anywhere=True,
            body=TakeOverBody,
        ),
        ResourceAction(
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
