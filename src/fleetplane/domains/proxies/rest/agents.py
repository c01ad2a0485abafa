"""REST: agents, their registration tokens, and commands to them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.proxies.access import ADMINISTER, OPERATE, READ, Access
from fleetplane.domains.proxies.agents.ports import (
    AgentOrder,
    AgentPresence,
    AgentVerb,
    CommandPort,
)
from fleetplane.domains.proxies.agents.registry import AgentEnrolment, Agents
from fleetplane.domains.proxies.kinds.records import AGENT, Agent, agent_scope
from fleetplane.domains.proxies.kinds.values import AgentState
from fleetplane.domains.proxies.rest import bodies as requests
from fleetplane.domains.proxies.rest import views
from fleetplane.domains.proxies.rest.common import (
    CREATED,
    NO_CONTENT,
    PAGING,
    STOP_LIMIT_SECONDS,
    ProxyCall,
    actor,
    changes,
    commander,
    done,
    if_match,
    shown,
)
from fleetplane.domains.proxies.rules.alerts import ALERT
from fleetplane.domains.proxies.rules.configuration import labels_of
from fleetplane.fleet import selectors
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import spelled
from fleetplane.rpc import Needs
from fleetplane.web.rest.pages import Listing, in_order, listing, paging
from fleetplane.web.rest.problems import Code, Problem, Rejected
from fleetplane.web.rest.routes import Answer, Query, Route, RouteGroup

ANY_STATE = "all"
_AGENTS = RouteGroup("Agents")
_ONE = "/agents/{agent_id}"
_OF_WORKSPACE = "/workspaces/{workspace_id}"
_MESSAGES = {
    AgentVerb.RELOAD: "Nginx reloaded successfully",
    AgentVerb.RESTART: "Nginx restarted successfully",
    AgentVerb.STOP: "Nginx stopped successfully",
    AgentVerb.STATUS: "Nginx status reported",
}


class AgentTokenView(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    agent_id: str
    expires_at: str


class CommandView(msgspec.Struct, frozen=True, kw_only=True):
    success: bool
    message: str
    timestamp: str
    output: str | UnsetType = UNSET


class AgentRoutes:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        agents: Agents,
        presence: AgentPresence,
        commander: CommandPort,
        access: Access,
    ) -> None:
        self._access = access
        self._store = store
        self._clock = clock
        self._agents = agents
        self._presence = presence
        self._commander = commander

    def routes(self) -> Sequence[Route]:
        return (*self._agent_routes(), *self._command_routes())

    def _agent_routes(self) -> Sequence[Route]:
        return (
            _AGENTS.get(
                f"{_OF_WORKSPACE}/agents",
                self.list,
                READ,
                query=(
                    *PAGING,
                    Query(
                        name="state",
                        summary="Only in this state",
                        default=ANY_STATE,
                        choices=(*AgentState, ANY_STATE),
                    ),
                    Query(name="label_selector", summary="Such as env=production,region=us-east"),
                ),
            ),
            _AGENTS.post(
                f"{_OF_WORKSPACE}/agents/tokens",
                self.enrol,
                OPERATE,
                body=requests.CreateAgentToken,
                status=CREATED,
            ),
            _AGENTS.get(_ONE, self.get, READ),
            _AGENTS.patch(_ONE, self.update, OPERATE, body=requests.UpdateAgent),
            _AGENTS.delete(_ONE, self.delete, ADMINISTER, status=NO_CONTENT),
        )

    def _command_routes(self) -> Sequence[Route]:
        return (
            _AGENTS.post(f"{_ONE}/reload", self.reload, OPERATE),
            _AGENTS.post(f"{_ONE}/restart", self.restart, OPERATE, body=requests.Restart, body_optional=True),
            _AGENTS.post(f"{_ONE}/stop", self.stop, OPERATE, body=requests.Stop, body_optional=True),
            _AGENTS.get(f"{_ONE}/status", self.status, READ, needs=Needs.WRITES),
        )

    # Agents.

    async def list(self, call: ProxyCall) -> Answer[Listing[views.AgentView]]:
        """List agents."""
        at = paging(call.query)
        state = call.query.get("state", ANY_STATE)
        if state not in (*AgentState, ANY_STATE):
            raise Rejected(
                Problem(field="state", message=f"Must be one of {', '.join((*AgentState, ANY_STATE))}")
            )
        text = call.query.get("label_selector", "")
        selector = selectors.parse(text) if text else None
        found = [
            agent
            for agent in in_order(self._store.list(AGENT, call.scope))
            if state in (ANY_STATE, views.agent_state(agent))
            and (selector is None or selector.matches(labels_of(agent)))
        ]
        return Answer(content=listing(found, at, self._summary))

    def _summary(self, agent: Agent) -> views.AgentView:
        return views.agent(agent, self._presence.sighting(agent.name))

    def _shown(self, agent: Agent) -> Answer[views.AgentView]:
        alerts = self._store.list(ALERT, agent_scope(agent.scope, agent.name))
        view = views.agent(agent, self._presence.sighting(agent.name), detailed=True, alerts=alerts)
        return shown(view, agent)

    async def enrol(self, call: ProxyCall) -> Answer[AgentTokenView]:
        """Create an agent and its registration token, which is returned once."""
        body: requests.CreateAgentToken = call.body
        answer = call.answering(enrolled)
        return answer(
            await self._agents.enrol(
                call.scope, body.name, body.labels, hours=body.expires_in_hours, actor=actor(call)
            )
        )

    async def get(self, call: ProxyCall) -> Answer[views.AgentView]:
        """Get an agent and its health."""
        return self._shown(self._agents.get(call.scope, call.path["agent_id"]))

    async def update(self, call: ProxyCall) -> Answer[views.AgentView]:
        """Rename or label an agent."""
        agent = await self._agents.update(
            call.scope,
            call.path["agent_id"],
            changes(call.body),
            if_match=if_match(call),
            actor=actor(call),
            raw=self._access.raw_right(call.caller, call.scope),
        )
        return self._shown(agent)

    async def delete(self, call: ProxyCall) -> Answer[None]:
        """Delete an agent; its token is revoked and its stream closed."""
        await self._agents.delete(
            call.scope, call.path["agent_id"], if_match=if_match(call), actor=actor(call)
        )
        return done()

    # Commands.

    async def reload(self, call: ProxyCall) -> Answer[CommandView]:
        """Reload NGINX."""
        return await self._order(call, AgentOrder(verb=AgentVerb.RELOAD))

    async def restart(self, call: ProxyCall) -> Answer[CommandView]:
        """Restart NGINX."""
        body: requests.Restart = call.body or requests.Restart()
        return await self._order(call, AgentOrder(verb=AgentVerb.RESTART, force=body.force))

    async def stop(self, call: ProxyCall) -> Answer[CommandView]:
        """Stop NGINX."""
        body: requests.Stop = call.body or requests.Stop()
        if not 0 <= body.timeout_seconds <= STOP_LIMIT_SECONDS:
            message = f"Must be between 0 and {STOP_LIMIT_SECONDS}"
            raise Rejected(Problem(field="timeout_seconds", message=message, code=Code.OUT_OF_RANGE))
        order = AgentOrder(verb=AgentVerb.STOP, graceful=body.graceful, timeout_seconds=body.timeout_seconds)
        return await self._order(call, order)

    async def status(self, call: ProxyCall) -> Answer[CommandView]:
        """Get NGINX's status from the agent."""
        return await self._order(call, AgentOrder(verb=AgentVerb.STATUS))

    async def _order(self, call: ProxyCall, order: AgentOrder) -> Answer[CommandView]:
        agent = self._agents.get(call.scope, call.path["agent_id"])
        result = await self._commander.order(agent, order, actor=commander(call))
        view = CommandView(
            success=result.success,
            message=result.message or (_MESSAGES[order.verb] if result.success else "The command failed"),
            timestamp=spelled(self._clock.now_ns()),
            output=result.output or UNSET,
        )
        return Answer(content=view)


def enrolled(made: AgentEnrolment) -> Answer[AgentTokenView]:
    """A new token, and where its agent is."""
    view = AgentTokenView(token=made.token, agent_id=made.agent.name, expires_at=spelled(made.expires_at_ns))
    return Answer(content=view, headers={"location": f"/v1/agents/{made.agent.name}"})
