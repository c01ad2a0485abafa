"""REST: which machine an agent is on, and what to do about another one that says it is the agent."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetplane.domains.proxies.access import ADMINISTER, READ
from fleetplane.domains.proxies.agents.machines import Machines
from fleetplane.domains.proxies.agents.registry import Agents
from fleetplane.domains.proxies.kinds.records import AgentTokenStatus, Contender
from fleetplane.domains.proxies.rest import bodies as requests
from fleetplane.domains.proxies.rest.agents import AgentTokenView, enrolled
from fleetplane.domains.proxies.rest.common import CREATED, ProxyCall, actor
from fleetplane.kernel.values.times import spelled, spelled_or_null
from fleetplane.web.rest.routes import Answer, Route, RouteGroup

_ROUTES = RouteGroup("Agents")
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
            _ROUTES.get(f"{_ONE}/machine", self.get, READ),
            _ROUTES.post(f"{_ONE}/machine/approve", self.approve, ADMINISTER, body=requests.DecideMachine),
            _ROUTES.post(f"{_ONE}/machine/dismiss", self.dismiss, ADMINISTER, body=requests.DecideMachine),
            _ROUTES.post(
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
