"""The half of the edge domain that holds daemons' streams, put together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from fleetplane.domains.edge.config_layers import ConfigLayers
from fleetplane.domains.edge.controller import EdgeController
from fleetplane.domains.edge.dispatch import Dispatcher, DispatchPolicy
from fleetplane.domains.edge.presence import Presences
from fleetplane.domains.edge.pushes import Pushes
from fleetplane.domains.edge.sealing import Sealer
from fleetplane.domains.edge.server_key import ServerKey
from fleetplane.domains.edge.streams import EdgeStreams, StreamPolicy
from fleetplane.domains.edge.tokens import NodeTokens
from fleetplane.domains.edge.verification import SealPolicy, Verifier
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import CommandLimits, run
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.sessions import Sessions
from fleetplane.kernel.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    stale_seconds: float = 90.0
    """Without a word for so long, a connected daemon is unhealthy: three heartbeats of 30 s."""
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
    ) -> None:
        options = options or StreamOptions()
        self._clock = clock
        self.sessions = Sessions(revocations)
        sealer = Sealer(key, tokens, clock)
        self.presences = Presences(sealer)
        self.verifier = Verifier(tokens, store, clock, options.seal)
        self.dispatcher = Dispatcher(
            store, clock, presences=self.presences, sealer=sealer, policy=options.dispatch, limits=limits
        )
        self.pushes = Pushes(self.presences, layers, clock)
        self.controller = EdgeController(
            store, clock, presences=self.presences, dispatcher=self.dispatcher, pushes=self.pushes,
            stale_seconds=options.stale_seconds,
        )  # fmt: skip
        self.streams = EdgeStreams(
            verifier=self.verifier, presences=self.presences, sessions=self.sessions,
            controller=self.controller, dispatcher=self.dispatcher, pushes=self.pushes, clock=clock,
            policy=options.stream,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<StreamSide {self.presences!r}>"

    async def prepare(self) -> None:
        """Nobody is connected yet, and nobody will answer for what an earlier run had sent."""
        self.dispatcher.ledger.recover()
        await self.dispatcher.ledger.all_lost()
        await self.controller.standings.start()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.controller.run(), name="edge/controller")
            tasks.create_task(run(self.dispatcher.ledger, self._clock), name="edge/commands")

    def drain(self) -> None:
        self.streams.going_away()
