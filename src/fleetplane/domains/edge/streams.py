"""`ConnectEdge`: one stream of one daemon, from its hello to its end.

The hello proves who it is, before any header is sent back: a daemon that is turned away then waits
longer each time, while one whose stream ends later comes back at once. Every further event is
verified on its own. One task reads, one writes: commands wait in the session's bounded queue. A
newer stream of the same daemon ends the older one, and what that one had to do counts as lost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

import structlog
from google.protobuf.message import DecodeError

from fleetplane.domains.edge import wire
from fleetplane.domains.edge.controller import ROTATED, EdgeController
from fleetplane.domains.edge.dispatch import Dispatcher
from fleetplane.domains.edge.envelope import EventKind
from fleetplane.domains.edge.kinds import Desired, Dialect, EdgeNode, principal_name
from fleetplane.domains.edge.presence import STREAM, Live, Presences
from fleetplane.domains.edge.pushes import UNDRAINED, Pushes
from fleetplane.domains.edge.verification import Cause, Seal, Verifier, refusal
from fleetplane.gen.fleetplane.edge.v1 import tolerant_pb2
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    Conflict,
    FailedPrecondition,
    FleetplaneError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from fleetplane.kernel.sessions import REVOKED, STOPPING, SUPERSEDED, Session, Sessions
from fleetplane.rpc import CallContext, Rate
from fleetplane.rpc.admission import Bucket
from fleetplane.rpc.exchange import ClientGone

log = structlog.get_logger(__name__)

BEARER = b"bearer "
EVENTS = Rate(per_second=1000.0, burst=10_000)
"""At about 100 microseconds each, a tenth of a core for the most talkative daemon."""
STUCK = "stuck"
"""Why a stream is ended: its daemon does not read what it is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPolicy:
    hello_seconds: float = 10.0
    """Between opening a stream and saying who one is."""
    queue_limit: int = 64
    """Commands waiting to be written; a daemon has at most 16 at once, each with its cancellation."""
    write_seconds: float = 60.0
    """For one command to leave: small ones fit into what HTTP/2 lets us send ahead of the reader."""
    events: Rate = EVENTS
    """Verified per stream: a daemon that prints faster is read more slowly."""


@dataclass(slots=True)
class Visit:
    """One stream while it lasts."""

    live: Live
    pace: Bucket
    states_dialect: bool
    """Its dialect was told and need not be guessed."""
    error: Exception | None = None
    """What was wrong with what the daemon sent."""


class EdgeStreams:
    def __init__(
        self,
        *,
        verifier: Verifier,
        presences: Presences,
        sessions: Sessions,
        controller: EdgeController,
        dispatcher: Dispatcher,
        pushes: Pushes,
        clock: Clock,
        policy: StreamPolicy,
    ) -> None:
        self._verifier = verifier
        self._presences = presences
        self._sessions = sessions
        self._controller = controller
        self._dispatcher = dispatcher
        self._pushes = pushes
        self._clock = clock
        self._policy = policy
        self.heartbeats: Counter[str] = Counter()
        """By tenant."""
        self.stream_seconds = 0.0
        """Of streams that have ended."""

    def __repr__(self) -> str:
        return f"<EdgeStreams {self._presences!r}>"

    async def connect(self, requests: AsyncIterator[bytes], context: CallContext) -> None:
        visit = await self._welcome(requests, context)
        live = visit.live
        try:
            await context.send_initial_metadata(())
            self._controller.arrived(live)
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._listen(requests, visit))
                arrival = tasks.create_task(self._send_waiting(live))
                await self._speak(live, context)
                reader.cancel()
                arrival.cancel()
        finally:
            live.session.close()
            await self._part(live)
        self._explain(visit)

    # Beginning.

    async def _welcome(self, requests: AsyncIterator[bytes], context: CallContext) -> Visit:
        hello = await self._first(requests)
        node, seal = self._verifier.hello(hello, _bearer(context))
        if node.spec.desired is Desired.SHUTDOWN:
            raise FailedPrecondition("this daemon is told to be shut down")
        said = wire.decode_capabilities(hello.capabilities)
        capabilities = wire.capabilities_of(said)
        stated = _text(context, wire.DIALECT_FIELD.encode())
        dialect = wire.dialect_of_caller(stated, _text(context, b"user-agent"))
        await self._make_way(seal)
        session: Session[bytes] = self._sessions.open(
            seal.node_id, STREAM, limit=self._policy.queue_limit, principal=principal_name(seal.node_id)
        )
        now_ns = self._clock.now_ns()
        live = Live(
            seal=seal,
            session=session,
            dialect=dialect or _last_dialect(node),
            capabilities=capabilities,
            since_ns=now_ns,
            last_heartbeat_ns=now_ns,
            config_version=said.config_version if stated else _last_config(node),
        )
        self._presences.came(live)
        log.info(
            "edge.connected", node=live.node_id, tenant=live.tenant, dialect=live.dialect, peer=context.peer()
        )
        pace = Bucket(tokens=float(self._policy.events.burst), filled_at=self._clock.monotonic())
        return Visit(live=live, pace=pace, states_dialect=dialect is not None)

    async def _first(self, requests: AsyncIterator[bytes]) -> tolerant_pb2.Hello:
        try:
            async with asyncio.timeout(self._policy.hello_seconds):
                raw = await anext(requests, None)
        except TimeoutError as error:
            raise refusal(Cause.NOT_HELLO, "no hello came in time") from error
        event = _parsed(raw) if raw is not None else None
        if event is None or event.WhichOneof("event") != "hello":
            raise refusal(Cause.NOT_HELLO)
        return event.hello

    async def _make_way(self, seal: Seal) -> None:
        """End the stream that the daemon had. What it was doing there is settled before the new one
        can be given anything, so that the two are not taken for each other."""
        while (older := self._presences.current(seal.node_id)) is not None:
            older.session.close(SUPERSEDED)
            await self._part(older)

    async def _send_waiting(self, live: Live) -> None:
        try:
            await self._dispatcher.arrived(live)
        except FleetplaneError as error:  # they stay written down, and go out with the next stream
            log.warning("edge.commands_not_sent", node=live.node_id, error=error.message)

    # Writing.

    async def _speak(self, live: Live, context: CallContext) -> None:
        """Write until the session ends; a connection that broke, or is not read, ends it."""
        try:
            async for command in live.session:
                waiting = context.push(command)
                if waiting is not None:  # the transport has no room for it yet
                    async with asyncio.timeout(self._policy.write_seconds):
                        await waiting
        except ClientGone:
            live.session.close()
        except TimeoutError:
            live.session.close(STUCK)

    # Reading.

    async def _listen(self, requests: AsyncIterator[bytes], visit: Visit) -> None:
        """Never raises: an error here ends the stream by way of its writer."""
        try:
            async for raw in requests:
                while wait := visit.pace.take(self._policy.events, self._clock.monotonic()):
                    await self._clock.sleep(wait)
                await self._take(visit, _parsed(raw))
        except ClientGone:
            pass  # its connection broke: nothing is wrong, and nobody is there to be told
        except Exception as error:
            visit.error = error
        finally:
            visit.live.session.close(flush=True)

    async def _take(self, visit: Visit, event: tolerant_pb2.EdgeEvent) -> None:
        live = visit.live
        match event.WhichOneof("event"):
            case "heartbeat":
                self._verifier.event(live.seal, EventKind.HEARTBEAT, event.heartbeat)
                self.heartbeats[live.tenant] += 1
                self._controller.heard(live, heartbeat=True)
            case "command_progress":
                self._verifier.event(live.seal, EventKind.COMMAND_PROGRESS, event.command_progress)
                self._controller.heard(live)
                self._take_progress(visit, event.command_progress)
            case "command_result":
                self._verifier.event(live.seal, EventKind.COMMAND_RESULT, event.command_result)
                self._controller.heard(live)
                self._learn(visit, await self._dispatcher.result(live, event.command_result))
                if live.idle:
                    self._controller.look(live)
            case "capability_update":
                self._verifier.event(live.seal, EventKind.CAPABILITY_UPDATE, event.capability_update)
                self._controller.heard(live)
                said = wire.decode_capabilities(event.capability_update.capabilities)
                live.capabilities, live.unsaved = wire.capabilities_of(said), True
                self._pushes.heard(live, said)
            case "hello":
                raise refusal(Cause.SECOND_HELLO)
            case _:
                raise refusal(Cause.MALFORMED, "the message is of no kind that is known")

    def _take_progress(self, visit: Visit, event: tolerant_pb2.CommandProgress) -> None:
        said, dialect = wire.decode_progress(event)
        if not self._pushes.told(visit.live, event.command_id, said.status):
            self._dispatcher.progress(visit.live, event.command_id, said)
            self._learn(visit, dialect)

    def _learn(self, visit: Visit, dialect: Dialect | None) -> None:
        """Which dialect it speaks, if it did not say so itself."""
        if dialect is Dialect.LEGACY and not visit.states_dialect:
            visit.live.dialect = dialect

    # Ending.

    async def _part(self, live: Live) -> None:
        """Only the stream that still has its daemon's place takes its work with it."""
        if not self._presences.gone(live):
            return
        self.stream_seconds += (self._clock.now_ns() - live.since_ns) / 1e9
        self._controller.left(live)
        log.info("edge.disconnected", node=live.node_id, tenant=live.tenant, reason=live.session.reason)
        try:
            await self._dispatcher.lost(live)
        except FleetplaneError as error:  # their deadlines end them then
            log.warning("edge.commands_not_ended", node=live.node_id, error=error.message)

    def _explain(self, visit: Visit) -> None:
        """Say why the stream ends, where it was not the daemon who ended it."""
        if visit.error is not None:
            raise visit.error
        match visit.live.session.reason:
            case reason if reason == SUPERSEDED:
                raise Conflict("superseded", hint="a newer stream of the same node was opened")
            case reason if reason == REVOKED:
                raise refusal(Cause.REVOKED)
            case reason if reason == ROTATED:
                raise Unauthenticated("the key was replaced", hint="come back with the new one")
            case reason if reason == STUCK:
                raise ResourceExhausted("what was sent is not being read")
            case reason if reason == UNDRAINED:
                raise Unavailable("no longer to be drained", hint="come back to take work again")
            case reason if reason == STOPPING:
                raise Unavailable("the server is shutting down")

    def going_away(self) -> None:
        """The server is about to stop: let all daemons go."""
        self._sessions.close_all(STOPPING, flush=True)


def _parsed(raw: bytes) -> tolerant_pb2.EdgeEvent:
    try:
        return tolerant_pb2.EdgeEvent.FromString(raw)
    except DecodeError as error:
        raise refusal(Cause.MALFORMED) from error


def _bearer(context: CallContext) -> str | None:
    shown = context.field(b"authorization")
    if shown is None:
        return None
    if shown[: len(BEARER)].lower() != BEARER:
        raise refusal(Cause.BEARER, "authorization must be a bearer token")
    return shown[len(BEARER) :].strip().decode("ascii", "replace")


def _text(context: CallContext, name: bytes) -> str | None:
    value = context.field(name)
    return value.decode("ascii", "replace") if value is not None else None


def _last_dialect(node: EdgeNode) -> Dialect:
    """What it spoke the last time, if nothing better is known."""
    return node.status.dialect if node.status is not None else Dialect.DOCUMENTED


def _last_config(node: EdgeNode) -> str:
    return node.status.config_version if node.status is not None else ""
