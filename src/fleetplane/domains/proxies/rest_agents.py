"""REST: agents, their registration tokens, commands to them, and what they reported."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.proxies import requests, selectors, views
from fleetplane.domains.proxies.access import ADMINISTER, OPERATE, READ
from fleetplane.domains.proxies.agents import Agents, Enrolment
from fleetplane.domains.proxies.configuration import labels_of
from fleetplane.domains.proxies.kinds import AGENT, Agent
from fleetplane.domains.proxies.ports import (
    AccessLogEntry,
    Commander,
    LogQuery,
    Order,
    Presence,
    Records,
    Verb,
)
from fleetplane.domains.proxies.rest import (
    CREATED,
    NO_CONTENT,
    NS_PER_DAY,
    PAGING,
    WINDOW,
    ProxyCall,
    actor,
    changes,
    commander,
    done,
    if_match,
    shown,
    window,
)
from fleetplane.domains.proxies.values import AgentState
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.store import Store
from fleetplane.web.paging import Listing, in_order, listing, number, paging
from fleetplane.web.problems import Code, Problem, Rejected
from fleetplane.web.routes import Answer, Query, Route
from fleetplane.web.times import spelled

METRICS_LONGEST_NS = 31 * NS_PER_DAY
LOGS_LONGEST_NS = 7 * NS_PER_DAY
LOGS = 100
LOGS_LIMIT = 1000
STOP_LIMIT_SECONDS = 600
ANY_STATE = "all"
_AGENTS, _RECORDS = "Agents", "Metrics and logs"
_ONE = "/agents/{agent_id}"
_OF_WORKSPACE = "/workspaces/{workspace_id}"
_MESSAGES = {
    Verb.RELOAD: "Nginx reloaded successfully",
    Verb.RESTART: "Nginx restarted successfully",
    Verb.STOP: "Nginx stopped successfully",
    Verb.STATUS: "Nginx status reported",
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


class Bandwidth(msgspec.Struct, frozen=True, kw_only=True):
    in_bytes: int
    out_bytes: int


class MetricsView(msgspec.Struct, frozen=True, kw_only=True):
    requests_total: int
    requests_per_second: float
    error_rate: float
    active_connections: int
    bandwidth: Bandwidth
    status_codes: dict[str, int]
    """Requests by class: `2xx`, `3xx`, `4xx`, `5xx`."""


class LogMeta(msgspec.Struct, frozen=True, kw_only=True):
    total: int
    limit: int
    cursor: str | UnsetType = UNSET


class LogListing(msgspec.Struct, frozen=True, kw_only=True):
    data: Sequence[AccessLogEntry]
    meta: LogMeta


class AgentRoutes:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        agents: Agents,
        presence: Presence,
        commander: Commander,
        records: Records,
    ) -> None:
        self._store = store
        self._clock = clock
        self._agents = agents
        self._presence = presence
        self._commander = commander
        self._records = records

    def routes(self) -> Sequence[Route]:
        return (*self._agent_routes(), *self._command_routes(), *self._record_routes())

    def _agent_routes(self) -> Sequence[Route]:
        return (
            Route(
                method="GET", path=f"{_OF_WORKSPACE}/agents", handler=self.list, summary="List agents",
                tag=_AGENTS, permission=READ, answer=Listing[views.AgentView],
                query=(
                    *PAGING,
                    Query(name="state", summary="Only in this state", default=ANY_STATE,
                          choices=(*AgentState, ANY_STATE)),
                    Query(name="label_selector", summary="Such as env=production,region=us-east"),
                ),
            ),
            Route(
                method="POST", path=f"{_OF_WORKSPACE}/agents/tokens", handler=self.enrol, tag=_AGENTS,
                summary="Create an agent and its registration token; the token is shown this once",
                permission=OPERATE, body=requests.CreateAgentToken, answer=AgentTokenView, status=CREATED,
            ),
            Route(
                method="GET", path=_ONE, handler=self.get, summary="Get an agent and its health",
                tag=_AGENTS, permission=READ, answer=views.AgentView,
            ),
            Route(
                method="PATCH", path=_ONE, handler=self.update, summary="Rename or label an agent",
                tag=_AGENTS, permission=OPERATE, body=requests.UpdateAgent, answer=views.AgentView,
            ),
            Route(
                method="DELETE", path=_ONE, handler=self.delete, tag=_AGENTS,
                summary="Delete an agent; its token is revoked and its stream closed",
                permission=ADMINISTER, status=NO_CONTENT,
            ),
        )  # fmt: skip

    def _command_routes(self) -> Sequence[Route]:
        return (
            Route(
                method="POST", path=f"{_ONE}/reload", handler=self.reload, summary="Reload NGINX",
                tag=_AGENTS, permission=OPERATE, answer=CommandView,
            ),
            Route(
                method="POST", path=f"{_ONE}/restart", handler=self.restart, summary="Restart NGINX",
                tag=_AGENTS, permission=OPERATE, body=requests.Restart, body_optional=True,
                answer=CommandView,
            ),
            Route(
                method="POST", path=f"{_ONE}/stop", handler=self.stop, summary="Stop NGINX", tag=_AGENTS,
                permission=OPERATE, body=requests.Stop, body_optional=True, answer=CommandView,
            ),
            Route(
                method="GET", path=f"{_ONE}/status", handler=self.status, tag=_AGENTS,
                summary="Ask the agent how NGINX is", permission=READ, answer=CommandView,
            ),
        )  # fmt: skip

    def _record_routes(self) -> Sequence[Route]:
        return (
            Route(
                method="GET", path=f"{_OF_WORKSPACE}/metrics", handler=self.workspace_metrics,
                summary="Traffic of a workspace", tag=_RECORDS, permission=READ, answer=MetricsView,
                query=WINDOW,
            ),
            Route(
                method="GET", path=f"{_ONE}/metrics", handler=self.agent_metrics, tag=_RECORDS,
                summary="Traffic of an agent", permission=READ, answer=MetricsView, query=WINDOW,
            ),
            Route(
                method="GET", path=f"{_OF_WORKSPACE}/access-logs", handler=self.access_logs, tag=_RECORDS,
                summary="Requests, newest first", permission=READ, answer=LogListing,
                query=(
                    *WINDOW,
                    Query(name="status_code", summary="A status such as 500, or a class such as 5xx"),
                    Query(name="limit", summary="Rows", kind="integer", default=LOGS, low=1, high=LOGS_LIMIT),
                    Query(name="agent_id", summary="Only of this agent"),
                    Query(name="host", summary="Only for this host"),
                    Query(name="method", summary="Only with this method"),
                    Query(name="cursor", summary="From the page before"),
                ),
            ),
        )  # fmt: skip

    # Agents.

    async def list(self, call: ProxyCall) -> Answer[Listing[views.AgentView]]:
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
        view = views.agent(agent, self._presence.sighting(agent.name), detailed=True)
        return shown(view, agent)

    async def enrol(self, call: ProxyCall) -> Answer[AgentTokenView]:
        body: requests.CreateAgentToken = call.body
        answer = call.answering(_enrolled)
        return answer(
            await self._agents.enrol(
                call.scope, body.name, body.labels, hours=body.expires_in_hours, actor=actor(call)
            )
        )

    async def get(self, call: ProxyCall) -> Answer[views.AgentView]:
        return self._shown(self._agents.get(call.scope, call.path["agent_id"]))

    async def update(self, call: ProxyCall) -> Answer[views.AgentView]:
        agent = await self._agents.update(
            call.scope, call.path["agent_id"], changes(call.body), if_match=if_match(call), actor=actor(call)
        )
        return self._shown(agent)

    async def delete(self, call: ProxyCall) -> Answer[None]:
        await self._agents.delete(
            call.scope, call.path["agent_id"], if_match=if_match(call), actor=actor(call)
        )
        return done()

    # Commands.

    async def reload(self, call: ProxyCall) -> Answer[CommandView]:
        return await self._order(call, Order(verb=Verb.RELOAD))

    async def restart(self, call: ProxyCall) -> Answer[CommandView]:
        body: requests.Restart = call.body or requests.Restart()
        return await self._order(call, Order(verb=Verb.RESTART, force=body.force))

    async def stop(self, call: ProxyCall) -> Answer[CommandView]:
        body: requests.Stop = call.body or requests.Stop()
        if not 0 <= body.timeout_seconds <= STOP_LIMIT_SECONDS:
            message = f"Must be between 0 and {STOP_LIMIT_SECONDS}"
            raise Rejected(Problem(field="timeout_seconds", message=message, code=Code.OUT_OF_RANGE))
        order = Order(verb=Verb.STOP, graceful=body.graceful, timeout_seconds=body.timeout_seconds)
        return await self._order(call, order)

    async def status(self, call: ProxyCall) -> Answer[CommandView]:
        return await self._order(call, Order(verb=Verb.STATUS))

    async def _order(self, call: ProxyCall, order: Order) -> Answer[CommandView]:
        agent = self._agents.get(call.scope, call.path["agent_id"])
        result = await self._commander.order(agent, order, actor=commander(call))
        view = CommandView(
            success=result.success,
            message=result.message or (_MESSAGES[order.verb] if result.success else "The command failed"),
            timestamp=spelled(self._clock.now_ns()),
            output=result.output or UNSET,
        )
        return Answer(content=view)

    # Records.

    async def workspace_metrics(self, call: ProxyCall) -> Answer[MetricsView]:
        agents = {agent.name for agent in self._store.list(AGENT, call.scope)}
        return await self._metrics(call, agents)

    async def agent_metrics(self, call: ProxyCall) -> Answer[MetricsView]:
        return await self._metrics(call, {call.path["agent_id"]})

    async def _metrics(self, call: ProxyCall, agents: Collection[str]) -> Answer[MetricsView]:
        from_ns, to_ns = window(call.query, now_ns=self._clock.now_ns(), longest_ns=METRICS_LONGEST_NS)
        found = await self._records.traffic(call.scope, agents, from_ns=from_ns, to_ns=to_ns)
        view = MetricsView(
            requests_total=found.requests_total,
            requests_per_second=found.requests_per_second,
            error_rate=found.error_rate,
            active_connections=found.active_connections,
            bandwidth=Bandwidth(in_bytes=found.in_bytes, out_bytes=found.out_bytes),
            status_codes={
                "2xx": found.status_2xx,
                "3xx": found.status_3xx,
                "4xx": found.status_4xx,
                "5xx": found.status_5xx,
            },
        )
        return Answer(content=view)

    async def access_logs(self, call: ProxyCall) -> Answer[LogListing]:
        query = call.query
        from_ns, to_ns = window(query, now_ns=self._clock.now_ns(), longest_ns=LOGS_LONGEST_NS)
        problems: list[Problem] = []
        limit = number(query, "limit", LOGS, low=1, high=LOGS_LIMIT, problems=problems)
        low, high = _statuses(query.get("status_code"), problems)
        if problems:
            raise Rejected(*problems)
        page = await self._records.access_log(
            call.scope,
            LogQuery(
                from_ns=from_ns, to_ns=to_ns, limit=limit, status_low=low, status_high=high,
                agent_id=query.get("agent_id", ""), host=query.get("host", ""),
                method=query.get("method", ""), cursor=query.get("cursor", ""),
            ),
        )  # fmt: skip
        meta = LogMeta(total=page.total, limit=limit, cursor=page.cursor or UNSET)
        return Answer(content=LogListing(data=page.entries, meta=meta))


def _enrolled(made: Enrolment) -> Answer[AgentTokenView]:
    view = AgentTokenView(token=made.token, agent_id=made.agent.name, expires_at=spelled(made.expires_at_ns))
    return Answer(content=view, headers={"location": f"/v1/agents/{made.agent.name}"})


def _statuses(text: str | None, problems: list[Problem]) -> tuple[int, int]:
    """The lowest and highest status that is asked for."""
    if text is None:
        return 0, 999
    if len(text) == 3 and text[0] in "12345" and text[1:] == "xx":
        return int(text[0]) * 100, int(text[0]) * 100 + 99
    if len(text) == 3 and text.isascii() and text.isdecimal():
        return int(text), int(text)
    problems.append(Problem(field="status_code", message="Must be a status such as 500, or 5xx"))
    return 0, 999
