"""The half of the edge domain that holds daemons' streams, put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from fleetplane.domains.edge.identity.policy import ServerKey
from fleetplane.domains.edge.identity.tokens import NodeTokens
from fleetplane.domains.edge.nodes.config_layers import ConfigLayers
from fleetplane.domains.edge.nodes.last_heard import LastHeard
from fleetplane.domains.edge.settings import EdgeSettings
from fleetplane.domains.edge.streams.call_encoding import CHANNEL
from fleetplane.domains.edge.streams.connect_edge import EdgeStreams
from fleetplane.domains.edge.streams.controller import EdgeController, Pushes
from fleetplane.domains.edge.streams.live import DaemonPresences
from fleetplane.domains.edge.streams.sealing import StreamSealer
from fleetplane.domains.edge.streams.tool_calls import Dispatcher, DispatchPolicy
from fleetplane.domains.edge.streams.verification import SealPolicy, StreamVerifier
from fleetplane.fleet.freeze import Freezes
from fleetplane.fleet.streams.host import StreamPolicy
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import CommandLimits, keep_deadlines
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.presence import PresenceRegistry
from fleetplane.kernel.sessions import Sessions
from fleetplane.kernel.stalls import StallDetector
from fleetplane.kernel.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    stale_seconds: float = 90.0
    """Seconds without a message after which a connected daemon is unhealthy: three heartbeats of 30 s."""
    seal: SealPolicy = field(default_factory=SealPolicy)
    stream: StreamPolicy = field(default_factory=StreamPolicy)
    dispatch: DispatchPolicy = field(default_factory=DispatchPolicy)

    @classmethod
    def of(cls, settings: EdgeSettings) -> StreamOptions:
        return cls(
            stale_seconds=settings.stale_seconds,
            seal=SealPolicy(
                skew_seconds=settings.skew_seconds,
                strict=settings.strict,
                first_generation=settings.first_generation,
                output_checked=settings.output_checked,
            ),
            dispatch=DispatchPolicy(in_flight=settings.in_flight),
        )


class StreamSide:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        tokens: NodeTokens,
        key: ServerKey,
        revocations: Revocations,
        layers: ConfigLayers,
        options: StreamOptions | None = None,
        limits: CommandLimits | None = None,
        attention: StallDetector | None = None,
    ) -> None:
        options = options or StreamOptions()
        self._clock = clock
        self._attention = attention = attention or StallDetector(clock)
        self.sessions = Sessions(revocations)
        sealer = StreamSealer(key, tokens, clock)
        self.presences = DaemonPresences(sealer)
        self.verifier = StreamVerifier(tokens, store, clock, options.seal)
        self.whereabouts = PresenceRegistry(store, clock, channel=CHANNEL)
        self.dispatcher = Dispatcher(
            store,
            clock,
            presences=self.presences,
            sealer=sealer,
            policy=options.dispatch,
            limits=limits,
            whereabouts=self.whereabouts,
        )
        self.last_heard = LastHeard(store, clock, channel=CHANNEL)
        freezes = Freezes(store, clock)
        self.pushes = Pushes(self.presences, layers, clock, freezes)
        self.controller = EdgeController(
            store,
            clock,
            presences=self.presences,
            pushes=self.pushes,
            stale_seconds=options.stale_seconds,
            attention=attention,
            freezes=freezes,
            whereabouts=self.whereabouts,
            last_heard=self.last_heard,
        )
        self.streams = EdgeStreams(
            verifier=self.verifier,
            presences=self.presences,
            sessions=self.sessions,
            controller=self.controller,
            dispatcher=self.dispatcher,
            pushes=self.pushes,
            clock=clock,
            policy=options.stream,
            whereabouts=self.whereabouts,
        )

    def __repr__(self) -> str:
        return f"<StreamSide {self.presences!r}>"

    def is_connected(self, node_id: str) -> bool:
        """Whether a daemon has an open stream, on whichever server."""
        if self.whereabouts.shared:
            return self.whereabouts.is_anywhere(node_id)
        return self.presences.is_connected(node_id)

    def heard_at_ns(self, node_id: str) -> int | None:
        """When a daemon was last heard, by any server; None for what its record knows as well."""
        here = self.presences.last_heartbeat_at_ns(node_id)
        return here if here is not None else self.last_heard.at_ns(node_id)

    async def prepare_here(self) -> None:
        """Before streams are served."""
        self.dispatcher.ledger.recover()

    async def take_over(self) -> None:
        """Mark all daemons as disconnected, and end commands that an earlier process had sent.

        Among several servers, those daemons and commands whose session nobody has.
        """
        await self.dispatcher.ledger.all_lost()
        await self.controller.standings.start()

    async def run_here(self) -> None:
        """On every server, for those daemons whose streams are here, until cancelled."""
        ledger = self.dispatcher.ledger
        async with Boundary() as tasks:
            tasks.keep("edge/commands", ledger.run_here)
            tasks.keep("edge/controller", self.controller.run)
            tasks.keep("edge/places", partial(self.dispatcher.courier.run, ledger, self._attention))
            tasks.keep("edge/whereabouts", self.whereabouts.run_here)
            tasks.keep("edge/last-heard", self.last_heard.run_here)

    async def run_active(self) -> None:
        """On the server that does what one does for all, until cancelled."""
        ledger = self.dispatcher.ledger
        async with Boundary() as tasks:
            tasks.keep("edge/deadlines", partial(keep_deadlines, ledger, self._clock, self._attention))
            tasks.keep("edge/departures", partial(self.whereabouts.run_for_all, self._ended))

    async def _ended(self, node_id: str, session: int) -> None:
        """The server that had this session is gone, and the daemon came to no other in time."""
        await self.dispatcher.ended_elsewhere(node_id, session)
        await self.controller.standings.ended_elsewhere(node_id)

    def drain(self) -> None:
        self.streams.going_away()
