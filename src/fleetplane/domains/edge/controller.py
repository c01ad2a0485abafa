"""Keeping streams as they should be, and their daemons' records true.

Is told when a stream opens, says something and ends; watches records, configurations and the
clock. Silent daemons become unhealthy, revoked ones are cut off, those whose credentials were
replaced are let go when the overlap is over, and whoever should be told something is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from fleetplane.domains.edge.config_layers import CONFIG_LAYER
from fleetplane.domains.edge.dispatch import Dispatcher
from fleetplane.domains.edge.kinds import EDGE_NODE, tenant_of, tenant_scope
from fleetplane.domains.edge.presence import Live, Presences
from fleetplane.domains.edge.pushes import Pushes
from fleetplane.domains.edge.standings import Standings
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.liveness import AgentId, Liveness, LivenessPolicy, LivenessTracker
from fleetplane.kernel.sessions import REVOKED
from fleetplane.kernel.store import Store

log = structlog.get_logger(__name__)

TICK_SECONDS = 1.0
"""How late silence, or the end of an overlap, is noticed at most; both are counted in many seconds."""
BATCH = 256
"""Streams looked at in one turn of the event loop."""
NS = 1_000_000_000

ROTATED = "rotated"
SHUT_DOWN = "shut down"


class EdgeController:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        presences: Presences,
        dispatcher: Dispatcher,
        pushes: Pushes,
        stale_seconds: float,
    ) -> None:
        self._store = store
        self._clock = clock
        self._presences = presences
        self._dispatcher = dispatcher
        self._pushes = pushes
        self.standings = Standings(store, clock, presences)
        self._liveness = LivenessTracker(
            LivenessPolicy(stale_after_seconds=stale_seconds, dead_after_seconds=stale_seconds)
        )
        self._leaving: dict[str, Live] = {}
        """Those with replaced credentials, or told to stop: to be let go in time."""

    def __repr__(self) -> str:
        return f"<EdgeController {self._presences!r} leaving={len(self._leaving)}>"

    # What streams tell.

    def arrived(self, live: Live) -> None:
        self._revive(live)
        self.standings.note(live)
        self.look(live)

    def heard(self, live: Live, *, heartbeat: bool = False) -> None:
        """Something it said was believed. Any word shows that it lives."""
        live.last_heartbeat_ns = self._clock.now_ns()
        self._revive(live)
        if heartbeat and live.unsaved:
            live.unsaved = False
            self.standings.note(live)

    def left(self, live: Live) -> None:
        self._liveness.forget(AgentId(live.node_id))
        if self._leaving.get(live.node_id) is live:
            del self._leaving[live.node_id]
        self.standings.note(live)

    def _revive(self, live: Live) -> None:
        for _ in self._liveness.heard_from(AgentId(live.node_id), now=self._clock.monotonic()):
            if live.silent:
                live.silent = False
                self.standings.note(live)

    # Looking.

    def look(self, live: Live) -> None:
        """Tell a daemon what it should know, and let it go if it should not be here."""
        node = self._store.get(EDGE_NODE, tenant_scope(live.tenant), live.node_id)
        if node is None or node.spec.revoked_at_ns is not None:
            live.session.close(REVOKED)
            return
        if not live.session.is_open:
            return
        self._pushes.look(live, node)
        outdated = live.seal.token_id == node.spec.previous_token_id != node.spec.token_id
        live.credentials_until_ns = node.spec.previous_key_until_ns if outdated else None
        if outdated or live.shutdown_by_ns is not None:
            self._leaving[live.node_id] = live
        else:
            self._leaving.pop(live.node_id, None)

    async def _look_at(self, concerned: Callable[[Live], bool]) -> None:
        for number, live in enumerate(self._presences, 1):
            if concerned(live):
                self.look(live)
            if number % BATCH == 0:
                await asyncio.sleep(0)

    # Watching.

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.standings.run(), name="edge/standings")
            tasks.create_task(self._follow_records(), name="edge/records")
            tasks.create_task(self._follow_layers(), name="edge/layers")
            tasks.create_task(self._keep_time(), name="edge/time")

    async def _follow_records(self) -> None:
        async with self._store.watch(EDGE_NODE) as watch:
            async for batch in watch:
                for event in batch.events:
                    live = self._presences.get(event.resource.name)
                    if live is not None and tenant_of(event.resource.scope) == live.tenant:
                        self.look(live)
                        self.standings.compare(live, event.resource)

    async def _follow_layers(self) -> None:
        async with self._store.watch(CONFIG_LAYER) as watch:
            async for batch in watch:
                scopes = {event.resource.scope for event in batch.events}
                everyone = "" in scopes
                await self._look_at(lambda live: everyone or tenant_scope(live.tenant) in scopes)  # noqa: B023

    async def _keep_time(self) -> None:
        while True:
            await self._clock.sleep(TICK_SECONDS)
            self._notice_silence()
            self._let_go()
            try:
                await self._dispatcher.expire()
            except FleetplaneError as error:  # nothing is lost: the ledger tries again by itself
                log.warning("edge.commands_not_sent", error=error.message)

    def _notice_silence(self) -> None:
        for change in self._liveness.tick(now=self._clock.monotonic()):
            live = self._presences.get(change.agent)
            if change.after is Liveness.STALE and live is not None:
                live.silent = True
                self.standings.note(live)

    def _let_go(self) -> None:
        now_ns = self._clock.now_ns()
        for live in tuple(self._leaving.values()):
            if live.shutdown_by_ns is not None and now_ns >= live.shutdown_by_ns:
                live.session.close(SHUT_DOWN, flush=True)
            elif live.credentials_until_ns is not None:
                self._outgrow(live, live.credentials_until_ns, now_ns)

    def _outgrow(self, live: Live, until_ns: int, now_ns: int) -> None:
        """The overlap ends: now if the daemon has nothing to do, else when it has done that.

        Decided a little early, so that nothing it says about its work is refused meanwhile.
        """
        if now_ns < until_ns - round(2 * TICK_SECONDS * NS):
            return
        live.closing = True
        last_ns = max((flight.over_at_ns for flight in live.flights.values()), default=0)
        live.seal.extended_until_ns = last_ns
        if now_ns >= max(until_ns, last_ns):
            live.session.close(ROTATED)
