"""`ConnectEdge`: what `fleet/streams` leaves to the protocol of daemons.

The hello proves who it is, before any header is sent back: a daemon that is turned away then waits
longer each time, while one whose stream ends later comes back at once. Every further event is
verified on its own, from its bytes, and the first that is not believed ends the stream. What an
ended stream had to do counts as lost.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncIterator

import structlog
from google.protobuf.message import DecodeError

from fleetplane.domains.edge.kinds import Desired, EdgeNode, PayloadDialect, credential_name
from fleetplane.domains.edge.streams import tool_calls
from fleetplane.domains.edge.streams.controller import ROTATED, UNDRAINED, EdgeController, Pushes
from fleetplane.domains.edge.streams.live import STREAM, DaemonPresences, LiveDaemon
from fleetplane.domains.edge.streams.tool_calls import Dispatcher
from fleetplane.domains.edge.streams.verification import RejectionCause, SealForm, StreamVerifier, refusal
from fleetplane.domains.edge.wire import messages as wire
from fleetplane.domains.edge.wire.envelope import EventKind
from fleetplane.fleet.streams.host import STUCK, Entrance, StreamEnding, StreamHost, StreamPolicy
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
from fleetplane.kernel.presence import PresenceRegistry, ReplayedHello
from fleetplane.kernel.sessions import REVOKED, STOPPING, SUPERSEDED, Session, Sessions
from fleetplane.rpc import CallContext
from fleetplane.rpc.serving.framing import CutMessage

log = structlog.get_logger(__name__)

BEARER = b"bearer "
MS = 1_000_000


class EdgeStreams:
    def __init__(
        self,
        *,
        verifier: StreamVerifier,
        presences: DaemonPresences,
        sessions: Sessions,
        controller: EdgeController,
        dispatcher: Dispatcher,
        pushes: Pushes,
        clock: Clock,
        policy: StreamPolicy,
        whereabouts: PresenceRegistry | None = None,
    ) -> None:
        self._verifier = verifier
        self._controller = controller
        self._dispatcher = dispatcher
        self._pushes = pushes
        self._clock = clock
        self._host: StreamHost[bytes, bytes, LiveDaemon] = StreamHost(
            self,
            stream=STREAM,
            presences=presences,
            sessions=sessions,
            clock=clock,
            policy=policy,
            whereabouts=whereabouts,
        )
        self.heartbeats: Counter[str] = Counter()
        """By tenant."""
        self.stream_seconds = 0.0
        """Of streams that have ended."""
        self.oversized = 0
        """Events that were too large and no results."""

    def __repr__(self) -> str:
        return f"<EdgeStreams {self._host!r}>"

    async def connect(self, requests: AsyncIterator[bytes], context: CallContext) -> None:
        await self._host.serve(requests, context)

    def going_away(self) -> None:
        """The server is about to stop: let all daemons go."""
        self._host.stop()

    # Beginning.

    async def admit(
        self, first: bytes | None, context: CallContext, enter: Entrance[bytes, LiveDaemon]
    ) -> LiveDaemon:
        hello = _hello(first)
        bearer = _bearer(context)
        node, seal = self._verifier.hello(hello, bearer)
        context.recognise()
        if node.spec.desired is Desired.SHUTDOWN:
            raise FailedPrecondition("this daemon is told to be shut down")
        said = wire.decode_capabilities(hello.capabilities)
        capabilities = wire.capabilities_of(said)
        stated = wire.stated_dialect(_text(context, wire.DIALECT_FIELD.encode()))
        shown = wire.dialect_of_hello(bearer=bearer is not None, short_form=seal.form is SealForm.SHORT)

        dialect = stated or shown or _last_dialect(node)

        async def settle() -> None:
            try:
                await self._dispatcher.settle(seal.node_id, dialect)
            except FleetplaneError as error:  # they stay written down, and go out with the next stream
                log.warning("edge.commands_not_sent", node=seal.node_id, error=error.message)

        def live(session: Session[bytes]) -> LiveDaemon:
            now_ns = self._clock.now_ns()
            return LiveDaemon(
                agent=seal.node_id,
                session=session,
                seal=seal,
                dialect=dialect,
                states_dialect=stated is not None,
                capabilities=capabilities,
                since_ns=now_ns,
                heard_ns=now_ns,
                config_version=said.config_version,
            )

        principal = credential_name(seal.tenant, seal.node_id)
        try:
            found = await enter(
                seal.node_id,
                live,
                principal=principal,
                settle=settle,
                hello_at_ns=seal.hello_ms * MS,
                digest=hashlib.sha256(hello.envelope.payload).digest(),
            )
        except ReplayedHello as error:
            raise self._verifier.replayed() from error
        log.info(
            "edge.connected",
            node=found.node_id,
            tenant=found.tenant,
            dialect=found.dialect,
            peer=context.peer(),
        )
        return found

    def opened(self, live: LiveDaemon) -> None:
        self._controller.arrived(live)

    async def arrived(self, live: LiveDaemon) -> None:
        try:
            await self._dispatcher.arrived(live)
        except FleetplaneError as error:  # they stay written down, and go out with the next stream
            log.warning("edge.commands_not_sent", node=live.node_id, error=error.message)

    # Reading.

    async def take(self, live: LiveDaemon, message: bytes) -> None:
        if isinstance(message, CutMessage):
            await self._take_cut(live, message)
            return
        event = _parsed(message)
        match event.WhichOneof("event"):
            case "heartbeat":
                self._verifier.event(live.seal, EventKind.HEARTBEAT, event.heartbeat)
                self.heartbeats[live.tenant] += 1
                self._controller.heard(live, heartbeat=True)
            case "command_progress":
                self._verifier.output(live.seal, event.command_progress)
                self._controller.heard(live)
                self._take_progress(live, event.command_progress)
            case "command_result":
                self._verifier.event(live.seal, EventKind.COMMAND_RESULT, event.command_result)
                self._controller.heard(live)
                self._learn(live, await self._dispatcher.result(live, event.command_result), certain=True)
                if live.idle:
                    self._controller.look(live)
            case "capability_update":
                self._verifier.event(live.seal, EventKind.CAPABILITY_UPDATE, event.capability_update)
                self._controller.heard(live)
                said = wire.decode_capabilities(event.capability_update.capabilities)
                live.capabilities, live.unsaved = wire.capabilities_of(said), True
                self._pushes.heard(live, said)
            case "hello":
                raise refusal(RejectionCause.SECOND_HELLO)
            case _:
                raise refusal(RejectionCause.MALFORMED, "the message is of no kind that is known")

    async def _take_cut(self, live: LiveDaemon, raw: CutMessage) -> None:
        """An event that was too large to be taken as a whole. Only a result tells something by its beginning;
        of anything else the signature is out of reach, so it counts as not said."""
        found = tool_calls.read(raw, raw.size)
        if found is None:
            self.oversized += 1
            log.warning("edge.event_too_large", node=live.node_id, bytes=raw.size)
            return
        self._verifier.event(live.seal, EventKind.COMMAND_RESULT, found.event)
        self._controller.heard(live)
        log.info("edge.result_cut", node=live.node_id, command=found.event.command_id, bytes=raw.size)
        self._learn(live, await self._dispatcher.result(live, found.event, cut=found), certain=True)
        if live.idle:
            self._controller.look(live)

    def _take_progress(self, live: LiveDaemon, event: tolerant_pb2.CommandProgress) -> None:
        said, dialect = wire.decode_progress(event)
        if self._pushes.told(live, event.command_id, said.status):
            self._controller.told(live)
        else:
            self._dispatcher.progress(live, event.command_id, said)
            self._learn(live, dialect)

    def _learn(self, live: LiveDaemon, dialect: PayloadDialect | None, *, certain: bool = False) -> None:
        """Which dialect it speaks, if it did not say so itself.

        The shape of a result is certain. Output in the one dialect may look like a message of the other,
        so it shows only that a daemon does not send messages.
        """
        if dialect is None or live.states_dialect:
            return
        if certain or dialect is PayloadDialect.LEGACY:
            live.dialect = dialect

    # Ending.

    async def left(self, live: LiveDaemon) -> None:
        try:
            await self._dispatcher.lost(live.node_id, live.dialect, session=live.place)
        except FleetplaneError as error:  # their deadlines end them then
            log.warning("edge.commands_not_ended", node=live.node_id, error=error.message)
        self.stream_seconds += (self._clock.now_ns() - live.since_ns) / 1e9
        self._controller.left(live)
        happened = "edge.moved" if live.moved else "edge.disconnected"
        log.info(happened, node=live.node_id, tenant=live.tenant, reason=live.session.reason)

    def ending(self, _live: LiveDaemon, reason: str, error: Exception | None) -> StreamEnding[bytes]:
        """A status alone: daemons know no message that says why."""
        return StreamEnding(error=error if error is not None else _status(reason))


def _status(reason: str) -> Exception | None:
    match reason:
        case _ if reason == SUPERSEDED:
            return Conflict("superseded", hint="a newer stream of the same node was opened")
        case _ if reason == REVOKED:
            return refusal(RejectionCause.REVOKED)
        case _ if reason == ROTATED:
            return Unauthenticated("the key was replaced", hint="come back with the new one")
        case _ if reason == STUCK:
            return ResourceExhausted("what was sent is not being read")
        case _ if reason == UNDRAINED:
            return Unavailable("no longer to be drained", hint="come back to take work again")
        case _ if reason == STOPPING:
            return Unavailable("the server is shutting down")
    return None


def _hello(raw: bytes | None) -> tolerant_pb2.Hello:
    if raw is None:
        raise refusal(RejectionCause.NOT_HELLO, "no hello came in time")
    event = _parsed(raw)
    if event.WhichOneof("event") != "hello":
        raise refusal(RejectionCause.NOT_HELLO)
    return event.hello


def _parsed(raw: bytes) -> tolerant_pb2.EdgeEvent:
    try:
        return tolerant_pb2.EdgeEvent.FromString(raw)
    except DecodeError as error:
        raise refusal(RejectionCause.MALFORMED) from error


def _bearer(context: CallContext) -> str | None:
    shown = context.field(b"authorization")
    if shown is None:
        return None
    if shown[: len(BEARER)].lower() != BEARER:
        raise refusal(RejectionCause.BEARER, "authorization must be a bearer token")
    return shown[len(BEARER) :].strip().decode("ascii", "replace")


def _text(context: CallContext, name: bytes) -> str | None:
    value = context.field(name)
    return value.decode("ascii", "replace") if value is not None else None


def _last_dialect(node: EdgeNode) -> PayloadDialect:
    """What it spoke the last time, if nothing better is known."""
    return node.status.dialect if node.status is not None else PayloadDialect.DOCUMENTED
