"""`nxmesh.agent.v1.AgentService`: what passes between the server and NGINX agents.

A stream begins with the agent's registration, which proves who it is by its token; every later
message must agree with that. One task reads, one writes: what is to be sent waits in the
session's queue. A newer stream of the same agent ends the older one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import structlog
from google.protobuf.message import Message

from fleetplane.domains.proxies import alerts, wire
from fleetplane.domains.proxies.commander import Commander
from fleetplane.domains.proxies.controller import AgentController, AgentPolicy
from fleetplane.domains.proxies.deployment import Serving
from fleetplane.domains.proxies.intake import Intake
from fleetplane.domains.proxies.kinds import Agent
from fleetplane.domains.proxies.presence import DELETED, STREAM, TIMED_OUT, Live, Presences
from fleetplane.domains.proxies.roster import Roster, actor
from fleetplane.domains.proxies.workspaces import Workspaces
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.access import Principal, Role
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    Conflict,
    FailedPrecondition,
    FleetplaneError,
    InvalidArgument,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from fleetplane.kernel.sessions import STOPPING, SUPERSEDED, Session, Sessions
from fleetplane.rpc import CallContext, Connection
from fleetplane.rpc.exchange import ClientGone
from fleetplane.rpc.framing import FramingError, MessageTooLarge

log = structlog.get_logger(__name__)

FIRST_MESSAGE_SECONDS = 10.0
QUEUE_LIMIT = 256
"""Messages waiting for one agent. Receipts beyond it are not sent: the agent asks again by resending."""
AGENT_ROLE = Role("proxies.agent")
BEARER = "bearer "

MISMATCH = "AGENT_ID_MISMATCH"
INVALID = "INVALID_MESSAGE"
TOO_LARGE = "TOO_LARGE"


@dataclass(slots=True)
class Visit:
    """One stream of one agent."""

    agent: Agent
    live: Live
    error: Exception | None = None
    """What was wrong with what the agent sent."""
    code: str = ""
    """The same, in the protocol's word for it."""

    @property
    def session(self) -> Session[pb.MasterMessage]:
        return self.live.session


class AgentService:
    def __init__(
        self,
        *,
        roster: Roster,
        presences: Presences,
        sessions: Sessions,
        controller: AgentController,
        commander: Commander,
        workspaces: Workspaces,
        intake: Intake,
        clock: Clock,
        policy: AgentPolicy,
    ) -> None:
        self._roster = roster
        self._presences = presences
        self._sessions = sessions
        self._controller = controller
        self._commander = commander
        self._workspaces = workspaces
        self._intake = intake
        self._clock = clock
        self._policy = policy

    def authenticate(self, connection: Connection) -> Principal:
        """Whose unary call it is: these messages do not say, so the token must."""
        agent = self._roster.holder(_bearer(connection) or "")
        if not self._roster.is_activated(agent):
            raise Unauthenticated("the token was not used to register yet", hint="open a stream first")
        return Principal(name=actor(agent.name), roles=frozenset({AGENT_ROLE}), scope=agent.scope)

    def going_away(self) -> None:
        """Tell all agents that the server is about to stop, and let them go."""
        farewell = self._error("GOING_AWAY", "the server is shutting down")
        for session in self._sessions:
            session.offer(farewell)
        self._sessions.close_all(STOPPING, flush=True)

    # The methods.

    async def Stream(self, requests: AsyncIterator[pb.AgentMessage], context: CallContext) -> None:
        visit = await self._welcome(requests, context)
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._listen(requests, visit))
                arrival = tasks.create_task(self._send_waiting(visit.agent.name))
                await self._speak(visit, context)
                reader.cancel()
                arrival.cancel()
        finally:
            visit.session.close()
            self._controller.look_at(visit.agent.name)
        await self._part(visit, context)

    async def ReportHealth(self, request: pb.HealthReport, context: CallContext) -> pb.Ack:
        agent, live = self._caller(context)
        if live is None:  # without a stream it is offline, and its health is nobody's business
            return pb.Ack(success=False, error_message="open a stream first")
        self._controller.heard_from(agent.name, live)
        await self._take_health(agent, live, request)
        return pb.Ack(success=True)

    async def ReportMetrics(self, request: pb.MetricsBatch, context: CallContext) -> pb.Ack:
        agent, live = self._caller(context)
        if live is not None:
            self._controller.heard_from(agent.name, live)
        await self._intake.metrics(agent, request, now_ns=self._clock.now_ns())
        return pb.Ack(message_id=str(request.timestamp), success=True)

    def _caller(self, context: CallContext) -> tuple[Agent, Live | None]:
        agent_id = context.principal.name.partition("/")[2]
        agent = self._roster.find(agent_id)
        if agent is None:
            raise Unauthenticated("the agent was deleted")
        return agent, self._presences.open(agent_id)

    # Beginning.

    async def _welcome(self, requests: AsyncIterator[pb.AgentMessage], context: CallContext) -> Visit:
        said, claimed = await self._first(requests, context)
        try:
            if claimed not in ("", self._roster.holder(said.token).name):
                raise Unauthenticated("the token belongs to another agent")
            registered = await self._roster.register(said)
        except FleetplaneError as error:
            await self._turn_away(context, error)
            raise
        agent = registered.agent
        session: Session[pb.MasterMessage] = self._sessions.open(
            agent.name, STREAM, limit=QUEUE_LIMIT, principal=actor(agent.name)
        )
        session.offer(
            self._message(
                registration_response=pb.RegistrationResponse(
                    agent_id=agent.name,
                    success=True,
                    heartbeat_interval_seconds=self._policy.heartbeat_seconds,
                )
            )
        )
        live = self._presences.came(agent.name, session, now_ns=self._clock.now_ns())
        self._controller.heard_from(agent.name, live)
        log.info("proxies.agent_connected", agent=agent.name, hostname=said.hostname, peer=context.peer())
        if registered.labels_changed and self._workspaces.newest(agent.scope) is not None:
            await self._redeploy(agent)
        self._controller.look_at(agent.name)
        return Visit(agent=agent, live=live)

    async def _redeploy(self, agent: Agent) -> None:
        """Other labels may mean another share of what the workspace serves."""
        try:
            await self._workspaces.redeploy(
                agent.scope, cause="agent.register", subject=agent.name, actor=actor(agent.name)
            )
        except FleetplaneError as error:  # the share is worked out anew at the next version anyway
            log.warning("proxies.redeploy_failed", agent=agent.name, error=error.message)

    async def _first(
        self, requests: AsyncIterator[pb.AgentMessage], context: CallContext
    ) -> tuple[wire.Introduction, str]:
        try:
            async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
                message = await anext(requests, None)
        except TimeoutError:
            message = None
        if message is None or message.WhichOneof("payload") != "registration":
            raise FailedPrecondition("the first message must be a registration")
        try:
            said = wire.introduction(message.registration, address=context.connection.address)
            shown = _bearer(context.connection)
            if shown is not None and shown != said.token:
                raise Unauthenticated("the token of the connection and of the registration differ")
        except FleetplaneError as error:
            await self._turn_away(context, error)
            raise
        return said, message.agent_id

    async def _turn_away(self, context: CallContext, error: FleetplaneError) -> None:
        response = pb.RegistrationResponse(success=False, error_message=error.message)
        await context.write(self._message(registration_response=response))

    async def _send_waiting(self, agent_id: str) -> None:
        try:
            await self._commander.ledger.arrived(agent_id)
        except FleetplaneError as error:  # they stay written down, and go out with the next session
            log.warning("proxies.commands_not_sent", agent=agent_id, error=error.message)

    async def _speak(self, visit: Visit, context: CallContext) -> None:
        """Write until the session ends; a connection that broke ends it."""
        try:
            async for message in visit.session:
                await context.write(message)
        except ClientGone:
            visit.session.close()

    # Reading.

    async def _listen(self, requests: AsyncIterator[pb.AgentMessage], visit: Visit) -> None:
        """Never raises: an error here ends the stream by way of its writer."""
        try:
            async for message in requests:
                self._controller.heard_from(visit.agent.name, visit.live)
                await self._take(message, visit)
        except ClientGone:
            pass  # its connection broke: nothing is wrong, and nobody is there to be told
        except (FleetplaneError, FramingError) as error:
            visit.error, visit.code = error, visit.code or INVALID
        except MessageTooLarge as error:
            visit.error, visit.code = error, TOO_LARGE
        except Exception as error:
            log.error("proxies.stream_failed", agent=visit.agent.name, exc_info=error)
            visit.error = FleetplaneError("the message could not be dealt with")
        finally:
            visit.session.close(flush=True)

    async def _take(self, message: pb.AgentMessage, visit: Visit) -> None:
        if message.agent_id not in ("", visit.agent.name):
            visit.code = MISMATCH
            raise PermissionDenied("agent_id is not that of the agent which registered")
        receipt = wire.receipt(message)
        failure = ""
        try:
            await self._take_payload(message, visit)
        except (Unavailable, InvalidArgument) as error:
            # About this message only: the agent is told, and the stream goes on.
            failure = error.message
            if receipt is None:
                visit.session.offer(self._error(INVALID, failure))
        if receipt is not None:
            ack = pb.Ack(message_id=receipt, success=not failure, error_message=failure)
            visit.session.offer(self._message(ack=ack))

    async def _take_payload(self, message: pb.AgentMessage, visit: Visit) -> None:
        agent, live, now_ns = visit.agent, visit.live, self._clock.now_ns()
        match message.WhichOneof("payload"):
            case "health":
                await self._take_health(agent, live, message.health)
            case "config_status":
                if not await self._roster.note_progress(agent, wire.progress(message.config_status)):
                    log.info("proxies.unknown_version", agent=agent.name)
                self._controller.look_at(agent.name)
            case "metrics":
                await self._intake.metrics(agent, message.metrics, now_ns=now_ns)
            case "logs":
                await self._intake.logs(agent, message.logs, now_ns=now_ns)
            case "event":
                await self._take_event(visit, message.event)
            case "registration":
                raise InvalidArgument("an agent registers once per stream")
            case _:
                raise InvalidArgument("a message without a payload")

    async def _take_health(self, agent: Agent, live: Live, report: pb.HealthReport) -> None:
        live.health = wire.health(report)
        live.nginx_down = live.health.nginx_status == "stopped"
        live.serving = Serving(
            version=report.config_version, checksum=report.config_checksum, at_ns=self._clock.now_ns()
        )
        open_ = self._roster.alerts(agent)
        changed = alerts.differences(open_, alerts.current(report, open_))
        if changed:
            await self._roster.note_alerts(agent, changed)
        self._controller.look_at(agent.name)

    async def _take_event(self, visit: Visit, event: pb.Event) -> None:
        if not visit.live.is_new_event(event.event_id):
            return
        agent = visit.agent.name
        if event.event_type == wire.COMMAND_RESULT:
            said = wire.answer(event)
            await self._commander.ledger.answered(
                agent, said.command, ok=said.success, detail=said.message, output=said.output
            )
        else:
            log.info("proxies.agent_event", agent=agent, event_type=event.event_type[:64])

    # Ending.

    async def _part(self, visit: Visit, context: CallContext) -> None:
        """Say why the stream ends, where it was not the agent who ended it."""
        code, error = visit.code, visit.error
        match visit.session.reason:
            case _ if error is not None:
                pass
            case reason if reason == SUPERSEDED:
                code, error = "SUPERSEDED", Conflict("superseded", hint="a newer stream was opened")
            case reason if reason == DELETED:
                code, error = "UNAUTHENTICATED", Unauthenticated("the agent was deleted")
            case reason if reason == TIMED_OUT:
                error = Unavailable("nothing was heard for too long")
            case reason if reason == STOPPING:
                error = Unavailable("the server is shutting down")
        if code:
            text = error.message if isinstance(error, FleetplaneError) else str(error)
            await context.write(self._error(code, text))
        if error is not None:
            raise error

    def _message(self, **payload: Message) -> pb.MasterMessage:
        return pb.MasterMessage(timestamp=wire.moment(self._clock.now_ns()), **payload)  # type: ignore[arg-type]

    def _error(self, code: str, text: str) -> pb.MasterMessage:
        return self._message(error=pb.Error(code=code, message=text))


def _bearer(connection: Connection) -> str | None:
    authorization = connection.authorization
    if authorization is None or not authorization.lower().startswith(BEARER):
        return None
    return authorization[len(BEARER) :].strip()
