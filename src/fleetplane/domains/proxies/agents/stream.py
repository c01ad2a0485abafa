"""An agent's stream: what `fleet/streams` leaves to the protocol of `nxmesh.agent.v1`.

A stream begins with the agent's registration, which proves who it is by its token or certificate;
every later message must agree with that. What is wrong with one message is told in its receipt and
the stream goes on; what is wrong with the agent ends the stream, after a message that says why.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import structlog
from google.protobuf.message import Message

from fleetplane.domains.proxies import wire
from fleetplane.domains.proxies.agents import events as agent_events
from fleetplane.domains.proxies.agents import machines
from fleetplane.domains.proxies.agents.commands import AgentCommander
from fleetplane.domains.proxies.agents.controller import AgentController, AgentPolicy
from fleetplane.domains.proxies.agents.identity import AgentAuthenticator, Certified
from fleetplane.domains.proxies.agents.live import (
    DELETED,
    EVENTS_PER_MINUTE,
    TIMED_OUT,
    AgentPresences,
    LiveAgent,
)
from fleetplane.domains.proxies.agents.machines import Approach, Machines, MachineVerdict
from fleetplane.domains.proxies.agents.records import AgentRoster, RegisteredAgent, actor
from fleetplane.domains.proxies.agents.registry import token_digest
from fleetplane.domains.proxies.agents.telemetry import Intake
from fleetplane.domains.proxies.kinds.records import Agent
from fleetplane.domains.proxies.rules import alerts
from fleetplane.domains.proxies.rules.deployment import ServedVersion
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.fleet.streams.host import STUCK, Entrance, StreamEnding, StreamPolicy
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    Conflict,
    FailedPrecondition,
    FleetplaneError,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from fleetplane.kernel.sessions import REVOKED, STOPPING, SUPERSEDED, Session
from fleetplane.rpc import CallContext, Connection, Rate
from fleetplane.rpc.serving.framing import FramingError, MessageTooLarge

log = structlog.get_logger(__name__)

STREAM_POLICY = StreamPolicy(
    # Messages waiting for one agent. Receipts beyond it are not sent: the agent asks again by resending.
    queue_limit=256,
    # An agent says a few things in ten seconds, and a few hundred when it comes back from being away.
    pace=Rate(per_second=200.0, burst=2000),
)
BEARER = "bearer "
HOSTS_LOGGED = 20
"""Hosts named in one line of the log."""

GOING_AWAY = "GOING_AWAY"
INVALID = "INVALID_MESSAGE"
MISMATCH = "AGENT_ID_MISMATCH"
TOO_LARGE = "TOO_LARGE"
UNAUTHENTICATED = "UNAUTHENTICATED"


class AgentIdMismatch(PermissionDenied):
    """A message in another agent's name."""


class AgentStreams:
    """The `StreamProtocol` of agents."""

    def __init__(
        self,
        *,
        roster: AgentRoster,
        machines: Machines,
        door: AgentAuthenticator,
        presences: AgentPresences,
        controller: AgentController,
        commander: AgentCommander,
        workspaces: Workspaces,
        intake: Intake,
        clock: Clock,
        policy: AgentPolicy,
        lineage: str = "",
    ) -> None:
        """`lineage` is the store's: agents that know another one take versions from the beginning."""
        self._lineage = lineage
        self._roster = roster
        self._machines = machines
        self._door = door
        self._presences = presences
        self._controller = controller
        self._commander = commander
        self._workspaces = workspaces
        self._intake = intake
        self._clock = clock
        self._policy = policy

    # Beginning.

    async def admit(
        self,
        first: pb.AgentMessage | None,
        context: CallContext,
        enter: Entrance[pb.MasterMessage, LiveAgent],
    ) -> LiveAgent:
        if first is None or first.WhichOneof("payload") != "registration":
            raise FailedPrecondition("the first message must be a registration")
        try:
            live = await self._registered(first, context, enter)
        except Unavailable:  # says nothing about the agent, which should soon come again
            raise
        except FleetplaneError as error:
            response = pb.RegistrationResponse(success=False, error_message=error.message)
            await context.write(self._message(registration_response=response))
            raise
        agent = live.record
        self._controller.heard_from(agent.name, live)
        log.info("proxies.agent_connected", agent=agent.name, hostname=live.hostname, peer=context.peer())
        if names := self._workspaces.placed_otherwise(agent):
            log.warning(
                "proxies.reported_labels_ignored",
                agent=agent.name,
                name=agent.spec.name,
                hosts=names[:HOSTS_LOGGED],
                hint="only labels that operators set place hosts; give the agent those it is to have",
            )
        self._controller.look_at(agent.name)
        return live

    async def _registered(
        self, first: pb.AgentMessage, context: CallContext, enter: Entrance[pb.MasterMessage, LiveAgent]
    ) -> LiveAgent:
        said = wire.introduction(first.registration, address=context.connection.address)
        shown = bearer(context.connection)
        if shown is not None and shown != said.token:
            raise Unauthenticated("the token of the connection and of the registration differ")
        certified = self._door.certified(context.connection)
        agent = certified.agent if certified is not None else self._roster.holder(said.token)
        if first.agent_id not in ("", agent.name):
            raise Unauthenticated("the token belongs to another agent")
        context.recognise()
        approach = _approach(said, context.connection, certified)
        registered = await self._register(agent, said, approach)

        def live(session: Session[pb.MasterMessage]) -> LiveAgent:
            session.offer(self._welcome(registered.agent))
            now_ns = self._clock.now_ns()
            return LiveAgent(
                agent=agent.name,
                session=session,
                since_ns=now_ns,
                heard_ns=now_ns,
                stirred_ns=now_ns,
                record=registered.agent,
                peer=approach.peer,
                address=approach.address,
                hostname=approach.hostname,
                digest=token_digest(said.token),
                key=approach.key,
            )

        def check(_older: LiveAgent) -> None:
            if not registered.took_over and self._contends(agent, approach):
                raise machines.contended()

        return await enter(
            agent.name,
            live,
            principal=actor(agent.name),
            serial=certified.serial if certified is not None else None,
            check=check,
            settle=lambda: self._settle(agent.name),
        )

    async def _settle(self, agent_id: str) -> None:
        try:
            await self._commander.settle(agent_id)
        except FleetplaneError as error:  # they stay written down, and go out with the next session
            log.warning("proxies.commands_not_sent", agent=agent_id, error=error.message)

    def _contends(self, agent: Agent, approach: Approach) -> bool:
        """Whether another machine's stream, which is open now, keeps this one out."""
        found = machines.verdict(
            approach,
            self._machines.binding(agent),
            self._presences.holder(agent, approach, now_ns=self._clock.now_ns()),
            heartbeat_seconds=float(self._policy.heartbeat_seconds),
            now_ns=self._clock.now_ns(),
        )
        return found is MachineVerdict.CONTENDS

    def _welcome(self, agent: Agent) -> pb.MasterMessage:
        return self._message(
            registration_response=pb.RegistrationResponse(
                agent_id=agent.name,
                success=True,
                heartbeat_interval_seconds=self._policy.heartbeat_seconds,
                lineage=self._lineage,
                log_columns=True,
            )
        )

    async def _register(self, agent: Agent, said: wire.Introduction, approach: Approach) -> RegisteredAgent:
        """Write down who came; raises for a machine that contends with another one for being the agent."""
        heartbeat = float(self._policy.heartbeat_seconds)
        if not self._policy.reported_labels:
            said = replace(said, labels={})
        registered = await self._roster.register(
            agent,
            said,
            approach,
            holder=self._presences.holder(agent, approach, now_ns=self._clock.now_ns()),
            is_back=self._presences.is_back(agent.name, approach),
            heartbeat_seconds=heartbeat,
        )
        if registered is not None and not registered.took_over:
            # Of two that came at the same moment, the one whose stream is open by now stays.
            registered = None if self._contends(agent, approach) else registered
        if registered is None:
            log.warning(
                "proxies.machine_refused",
                agent=agent.name,
                hostname=approach.hostname,
                address=approach.address,
            )
            await self._machines.note_contender(agent, approach)
            raise machines.contended()
        return registered

    def opened(self, live: LiveAgent) -> None:
        """The answer to its registration waits in its queue already."""

    async def arrived(self, live: LiveAgent) -> None:
        try:
            await self._commander.arrived(live)
        except FleetplaneError as error:  # they stay written down, and go out with the next session
            log.warning("proxies.commands_not_sent", agent=live.agent, error=error.message)

    # Reading.

    async def take(self, live: LiveAgent, message: pb.AgentMessage) -> None:
        self._controller.heard_from(live.agent, live)
        if message.agent_id not in ("", live.agent):
            raise AgentIdMismatch("agent_id is not that of the agent which registered")
        receipt = wire.receipt(message)
        failure = ""
        try:
            await self._take_payload(message, live)
        except (Unavailable, InvalidArgument) as error:
            # About this message only: the agent is told, and the stream goes on.
            failure = error.message
            if receipt is None:
                live.session.offer(self._error(INVALID, failure))
        if receipt is not None:
            ack = pb.Ack(message_id=receipt, success=not failure, error_message=failure)
            live.session.offer(self._message(ack=ack))

    async def _take_payload(self, message: pb.AgentMessage, live: LiveAgent) -> None:
        agent, now_ns = live.record, self._clock.now_ns()
        match message.WhichOneof("payload"):
            case "health":
                await self.take_health(live, message.health)
            case "config_status":
                if not await self._roster.note_progress(live, wire.progress(message.config_status)):
                    log.info("proxies.unknown_version", agent=agent.name)
                self._controller.look_at(agent.name)
            case "metrics":
                live.measures = True
                await self._intake.metrics(agent, message.metrics, now_ns=now_ns)
            case "logs":
                await self._intake.logs(agent, message.logs, now_ns=now_ns)
            case "event":
                await self._take_event(live, message.event)
            case "registration":
                raise InvalidArgument("an agent registers once per stream")
            case _:
                raise InvalidArgument("a message without a payload")

    async def take_health(self, live: LiveAgent, report: pb.HealthReport) -> None:
        agent, now_ns = live.record, self._clock.now_ns()
        live.health = wire.health(report)
        was_down, live.nginx_down = live.nginx_down, live.health.nginx_status == "stopped"
        live.serving = ServedVersion(
            version=report.config_version, checksum=report.config_checksum, at_ns=now_ns
        )
        live.observed = wire.observed(report)
        await self._roster.note_observed(live, live.observed)
        await self._roster.note_served(live, live.serving)
        await self._roster.note_health(live)
        open_ = self._roster.alerts(agent)
        found = alerts.current(report, open_, policy=self._policy.alerts, heights=live.heights, now_ns=now_ns)
        changed = alerts.differences(open_, found)
        if changed:
            await self._roster.note_alerts(agent, changed, live)
        if (was_down and not live.nginx_down) or None in changed.values():
            live.stirred_ns = now_ns
        self._controller.look_at(agent.name)
        if not live.measures and report.HasField("nginx"):
            with suppress(Unavailable):  # the next report says the same, a little later
                said = wire.measured(report, moment=wire.moment(now_ns))
                await self._intake.metrics(agent, said, now_ns=now_ns)

    async def _take_event(self, live: LiveAgent, event: pb.Event) -> None:
        if not live.is_new_event(event.event_id):
            return
        agent, now_ns = live.agent, self._clock.now_ns()
        if wire.is_answer(event):
            await self._commander.answered(live, wire.answer(event))
            return
        found = agent_events.read(event, now_ns=now_ns)
        if live.has_room_for_event(now_ns):
            log.info("proxies.agent_event", agent=agent, event_type=found.event_type)
            await self._roster.events.note(live.record, found, actor=actor(agent))
            return
        live.events_dropped += 1
        self._presences.events_dropped += 1
        if live.events_dropped % EVENTS_PER_MINUTE == 1:  # who floods us must not flood the log
            log.warning("proxies.agent_event_dropped", agent=agent, dropped=live.events_dropped)

    # Ending.

    async def left(self, live: LiveAgent) -> None:
        """Nothing is settled here: the agent may answer its commands on the next stream."""
        self._controller.look_at(live.agent)

    def ending(self, live: LiveAgent, reason: str, error: Exception | None) -> StreamEnding[pb.MasterMessage]:
        if error is not None:
            return self._broken(live, error)
        match reason:
            case _ if reason == SUPERSEDED:
                return self._told("SUPERSEDED", Conflict("superseded", hint="a newer stream was opened"))
            case _ if reason == DELETED:
                return self._told(UNAUTHENTICATED, Unauthenticated("the agent was deleted"))
            case _ if reason == REVOKED:
                return self._told(UNAUTHENTICATED, Unauthenticated("the agent's credential was revoked"))
            case _ if reason == TIMED_OUT:
                return StreamEnding(error=Unavailable("nothing was heard for too long"))
            case _ if reason == STUCK:
                return StreamEnding(error=ResourceExhausted("what was sent is not being read"))
            case _ if reason == STOPPING:
                return StreamEnding(error=Unavailable("the server is shutting down"))
        return StreamEnding()

    def _broken(self, live: LiveAgent, error: Exception) -> StreamEnding[pb.MasterMessage]:
        """What was wrong with what the agent sent, or with us."""
        match error:
            case AgentIdMismatch():
                return self._told(MISMATCH, error)
            case MessageTooLarge():
                return self._told(TOO_LARGE, error)
            case FleetplaneError() | FramingError():
                return self._told(INVALID, error)
        log.error("proxies.stream_failed", agent=live.agent, exc_info=error)
        return StreamEnding(error=FleetplaneError("the message could not be dealt with"))

    def _told(self, code: str, error: Exception) -> StreamEnding[pb.MasterMessage]:
        text = error.message if isinstance(error, FleetplaneError) else str(error)
        return StreamEnding(last=self._error(code, text), error=error)

    def going_away(self, _live: LiveAgent) -> pb.MasterMessage:
        """The last message before the server stops."""
        return self._error(GOING_AWAY, "the server is shutting down")

    def _message(self, **payload: Message) -> pb.MasterMessage:
        return pb.MasterMessage(timestamp=wire.moment(self._clock.now_ns()), **payload)  # type: ignore[arg-type]

    def _error(self, code: str, text: str) -> pb.MasterMessage:
        return self._message(error=pb.Error(code=code, message=text))


def _approach(said: wire.Introduction, connection: Connection, certified: Certified | None) -> Approach:
    return Approach(
        hostname=said.hostname,
        address=connection.address,
        peer=machines.connection_of(connection),
        key=certified.key if certified is not None else "",
    )


def bearer(connection: Connection) -> str | None:
    """The token that the connection shows, if it shows one."""
    authorization = connection.authorization
    if authorization is None or not authorization.lower().startswith(BEARER):
        return None
    return authorization[len(BEARER) :].strip()
