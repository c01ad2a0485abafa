"""The half of the edge domain that holds daemons' streams, put together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from fleetplane.domains.edge.identity.server_key import ServerKey
from fleetplane.domains.edge.identity.tokens import NodeTokens
from fleetplane.domains.edge.nodes.config_layers import ConfigLayers
from fleetplane.domains.edge.streams.connect_edge import EdgeStreams
from fleetplane.domains.edge.streams.controller import EdgeController
from fleetplane.domains.edge.streams.instructions import Pushes
from fleetplane.domains.edge.streams.live import DaemonPresences
from fleetplane.domains.edge.streams.sealing import Sealer
from fleetplane.domains.edge.streams.tool_calls import Dispatcher, DispatchPolicy
from fleetplane.domains.edge.streams.verification import SealPolicy, Verifier
from fleetplane.fleet.freeze import Freezes
from fleetplane.fleet.streams.host import StreamPolicy
from fleetplane.kernel.attention import Attention
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import CommandLimits, run
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.sessions.sessions import Sessions
from fleetplane.kernel.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    stale_seconds: float = 90.0
    """Seconds without a message after which a connected daemon is unhealthy: three heartbeats of 30 s."""
    seal: SealPolicy = field(default_factory=SealPolicy)
    stream: StreamPolicy = field(default_factory=StreamPolicy)
    dispatch: DispatchPolicy = field(default_factory=DispatchPolicy)


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
        attention: Attention | None = None,
    ) -> None:
        options = options or StreamOptions()
        self._clock = clock
        self._attention = attention = attention or Attention(clock)
        self.sessions = Sessions(revocations)
        sealer = Sealer(key, tokens, clock)
        self.presences = DaemonPresences(sealer)
        self.verifier = Verifier(tokens, store, clock, options.seal)
        self.dispatcher = Dispatcher(
            store, clock, presences=self.presences, sealer=sealer, policy=options.dispatch, limits=limits
        )
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
        )

    def __repr__(self) -> str:
        return f"<StreamSide {self.presences!r}>"

    async def prepare(self) -> None:
        """Mark all daemons as disconnected, and end commands that an earlier process had sent."""
        self.dispatcher.ledger.recover()
        await self.dispatcher.ledger.all_lost()
        await self.controller.standings.start()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.controller.run(), name="edge/controller")
            tasks.create_task(run(self.dispatcher.ledger, self._clock, self._attention), name="edge/commands")
            places = self.dispatcher.courier.run(self.dispatcher.ledger, self._attention)
            tasks.create_task(places, name="edge/places")

    def drain(self) -> None:
        self.streams.going_away()
