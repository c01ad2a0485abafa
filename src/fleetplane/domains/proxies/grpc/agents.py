"""`nxmesh.agent.v1.AgentService`: what passes between the server and NGINX agents.

How a stream lives is `fleet/streams`' and `agents/stream.py`'s; reports may also come as calls of their own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from fleetplane.domains.proxies.agents.controller import AgentController
from fleetplane.domains.proxies.agents.identity import AgentAuthenticator
from fleetplane.domains.proxies.agents.live import AgentPresences, LiveAgent
from fleetplane.domains.proxies.agents.machines import Machines
from fleetplane.domains.proxies.agents.records import AgentRoster, actor
from fleetplane.domains.proxies.agents.stream import AgentStreams, bearer
from fleetplane.domains.proxies.agents.telemetry import Intake
from fleetplane.domains.proxies.kinds.records import Agent
from fleetplane.fleet.streams.host import StreamHost
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.access import Principal, Role
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Unauthenticated
from fleetplane.rpc import CallContext, Connection

AGENT_ROLE = Role("proxies.agent")


class AgentService:
    def __init__(
        self,
        *,
        streams: AgentStreams,
        host: StreamHost[pb.AgentMessage, pb.MasterMessage, LiveAgent],
        roster: AgentRoster,
        machines: Machines,
        door: AgentAuthenticator,
        presences: AgentPresences,
        controller: AgentController,
        intake: Intake,
        clock: Clock,
    ) -> None:
        self._streams = streams
        self._host = host
        self._roster = roster
        self._machines = machines
        self._door = door
        self._presences = presences
        self._controller = controller
        self._intake = intake
        self._clock = clock

    def authenticate(self, connection: Connection) -> Principal:
        """Whose unary call it is: these messages do not say, so the certificate or the token must."""
        certified = self._door.certified(connection)
        agent = certified.agent if certified is not None else self._roster.holder(bearer(connection) or "")
        binding = self._machines.binding(agent)
        if binding is None:
            raise Unauthenticated("the token was not used to register yet", hint="open a stream first")
        if certified is None and binding.key:
            raise Unauthenticated("the agent is bound to a key", hint="show its certificate")
        return Principal(name=actor(agent.name), roles=frozenset({AGENT_ROLE}), scope=agent.scope)

    async def Stream(self, requests: AsyncIterator[pb.AgentMessage], context: CallContext) -> None:
        await self._host.serve(requests, context)

    async def ReportHealth(self, request: pb.HealthReport, context: CallContext) -> pb.Ack:
        agent, live = self._caller(context)
        if live is None:  # without a stream it is offline, and its health is nobody's business
            message = "open a stream first"
            if self._presences.is_present(agent.name):
                message = "report on the stream: it is at another server"
            return pb.Ack(success=False, error_message=message)
        self._controller.heard_from(agent.name, live)
        await self._streams.take_health(live, request)
        return pb.Ack(success=True)

    async def ReportMetrics(self, request: pb.MetricsBatch, context: CallContext) -> pb.Ack:
        agent, live = self._caller(context)
        if live is not None:
            live.measures = True
            self._controller.heard_from(agent.name, live)
        await self._intake.metrics(agent, request, now_ns=self._clock.now_ns())
        return pb.Ack(message_id=str(request.timestamp), success=True)

    def _caller(self, context: CallContext) -> tuple[Agent, LiveAgent | None]:
        agent_id = context.principal.name.partition("/")[2]
        agent = self._roster.find(agent_id)
        if agent is None:
            raise Unauthenticated("the agent was deleted")
        return agent, self._presences.get(agent_id)
