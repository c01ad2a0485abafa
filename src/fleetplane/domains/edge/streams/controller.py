"""Keeping streams as they should be, and their daemons' records true.

Is told when a stream opens, says something and ends; watches records, configurations and the
clock. Silent daemons become unhealthy, revoked ones are cut off, and those whose credentials were
replaced are let go when the overlap is over.

`Instructions` tells a connected daemon its configuration, to drain and to stop. It compares what is
wanted with what this stream was told and what the daemon said, and sends what is missing; looking again
does no harm. A daemon confirms by a progress report about a word of ours instead of a command, or by its
capabilities:

    command id           state            message
    (the version)        config-applied   the version
    (the version)        config-refused   why
    drain                drained          (empty)

Daemons in the field confirm nothing: they are told once per stream.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial

import structlog

from fleetplane.domains.edge.kinds import (
    EDGE_NODE,
    Desired,
    EdgeNode,
    NodeSpec,
    PayloadDialect,
    daemon_scope,
    tenant_of,
    tenant_scope,
)
from fleetplane.domains.edge.nodes.config_layers import CONFIG_LAYER, ConfigLayers, MergedConfig, version_of
from fleetplane.domains.edge.nodes.last_heard import LastHeard
from fleetplane.domains.edge.nodes.standings import Standings
from fleetplane.domains.edge.streams.live import DaemonPresences, LiveDaemon
from fleetplane.domains.edge.wire import messages as wire
from fleetplane.domains.edge.wire.messages import ReportedStatus
from fleetplane.fleet.freeze import Freezes
from fleetplane.fleet.rollouts.records import HOLD
from fleetplane.fleet.streams.silence import SilenceWatch
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.boundary import Boundary, contained
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.liveness import LivenessChanged, LivenessPolicy
from fleetplane.kernel.presence import PresenceRegistry
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.sessions import REVOKED
from fleetplane.kernel.stalls import StallDetector
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import NS

log = structlog.get_logger(__name__)

DRAIN = "drain"
CONFIG_APPLIED = "config-applied"
CONFIG_REFUSED = "config-refused"
DRAINED = "drained"
DRAINING = "draining"
UNDRAINED = "undrained"
"""Why a stream is ended: nothing on the wire takes a drain back, but a new stream begins without."""
SHUTDOWN_MARGIN_SECONDS = 5.0
"""Seconds beyond its grace period after which the stream of a daemon that should stop is ended."""
REASON_LIMIT = 512

_NOTHING = MergedConfig(content=b"{}", version=version_of(b"{}"))


class Pushes:
    def __init__(
        self, presences: DaemonPresences, layers: ConfigLayers, clock: Clock, freezes: Freezes
    ) -> None:
        self._freezes = freezes
        self._presences = presences
        self._layers = layers
        self._clock = clock

    # Telling.

    def look(self, live: LiveDaemon, node: EdgeNode) -> None:
        """Send what is missing, configuration first: it holds for whatever is asked next."""
        live.held = self._freezes.holding("edge", daemon_scope(node.scope, node.name)) is not None
        if live.held:
            return
        if node.spec.desired is Desired.SHUTDOWN:
            self._shut_down(live, node.spec)
            return
        if node.spec.config_again_at_ns > live.config_refused_ns:
            self.configure_again(live)
        self._configure(live)
        if node.spec.desired is Desired.DRAINING and not live.draining:
            live.draining = self._presences.put(live, wire.drain().SerializeToString())
        elif node.spec.desired is Desired.ACTIVE and live.draining and live.idle:
            live.session.close(UNDRAINED, flush=True)

    def _configure(self, live: LiveDaemon) -> None:
        wanted = self._layers.merged(live.tenant, live.node_id)
        if wanted is None:
            if not (live.config_version or live.config_pushed):
                return
            wanted = _NOTHING  # what was set before is to go
        refused = bool(live.config_refused)
        if refused and wanted.version == live.config_pushed:
            return  # not again on this stream, unless something else is wanted in between
        if wanted.version == (
            live.config_pushed if live.config_pushed and not refused else live.config_version
        ):
            if refused:
                live.config_pushed, live.config_refused = "", ""
            return
        if live.dialect is PayloadDialect.LEGACY and not live.idle:
            return  # it does not read while it works; sent as soon as it has answered
        command = wire.push_config(live.dialect, version=wanted.version, document=wanted.content)
        if self._presences.put(live, command.SerializeToString()):
            live.config_pushed, live.config_refused = wanted.version, ""

    def configure_again(self, live: LiveDaemon) -> None:
        """Have a configuration that the daemon refused sent once more."""
        if live.config_refused:
            live.config_pushed, live.config_refused = "", ""

    def _shut_down(self, live: LiveDaemon, spec: NodeSpec) -> None:
        if live.shutdown_by_ns is not None:
            return
        grace = spec.shutdown_grace_seconds
        if self._presences.put(live, wire.shutdown(grace).SerializeToString()):
            seconds = grace + SHUTDOWN_MARGIN_SECONDS
            live.shutdown_by_ns = self._clock.now_ns() + round(seconds * 1e9)

    # Being told.

    def told(self, live: LiveDaemon, about: str, status: ReportedStatus | None) -> bool:
        """Take a daemon's word that it did as told; False if that was about something else."""
        match status:
            case ReportedStatus(state="config-applied") if about == live.config_pushed:
                live.config_version, live.unsaved = about, True
            case ReportedStatus(state="config-refused") if about == live.config_pushed:
                live.config_refused = status.message[:REASON_LIMIT] or "it did not say why"
                live.config_refused_ns, live.unsaved = self._clock.now_ns(), True
                log.warning("edge.config_refused", node=live.node_id, version=about, reason=status.message)
            case ReportedStatus(state="drained") if about == DRAIN:
                live.drained = True
            case ReportedStatus(state="draining") if about == DRAIN:
                pass
            case _:
                return False
        return True

    def heard(self, live: LiveDaemon, said: pb.EdgeCapabilities) -> None:
        """Take acknowledgements from the capabilities of a daemon that reports them in their fields."""
        if said.config_version and said.config_version in (live.config_pushed, live.config_version):
            live.config_version, live.unsaved = said.config_version, True
        live.drained = live.drained or (said.draining and live.draining)


TICK_SECONDS = 1.0
"""How late the end of an overlap is noticed at most; it is counted in many seconds."""
BATCH = 256
"""Streams looked at in one turn of the event loop."""

ROTATED = "rotated"
SHUT_DOWN = "shut down"


class EdgeController:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        presences: DaemonPresences,
        pushes: Pushes,
        stale_seconds: float,
        attention: StallDetector | None = None,
        freezes: Freezes | None = None,
        whereabouts: PresenceRegistry | None = None,
        last_heard: LastHeard | None = None,
    ) -> None:
        self._last_heard = last_heard
        self._attention = attention or StallDetector(clock)
        self._store = store
        self._clock = clock
        self._presences = presences
        self._pushes = pushes
        self._freezes = freezes or Freezes(store, clock)
        self.standings = Standings(store, clock, presences, whereabouts)
        # A silent daemon is unhealthy for as long as its stream is open: there is no second stage.
        lasting = LivenessPolicy(stale_after_seconds=stale_seconds, dead_after_seconds=math.inf)
        self._watch = SilenceWatch(clock, lasting, self._attention)
        self._leaving: dict[str, LiveDaemon] = {}
        """Daemons with replaced credentials or a pending shutdown, whose streams are ended in time."""
        self._held: dict[str, LiveDaemon] = {}
        """Daemons with instructions held back by a freeze."""

    def __repr__(self) -> str:
        return f"<EdgeController {self._presences!r} leaving={len(self._leaving)}>"

    # What streams tell.

    def arrived(self, live: LiveDaemon) -> None:
        self._revive(live)
        if self._last_heard is not None:
            self._last_heard.note(live.node_id)
        self.standings.note(live)
        self.look(live)

    def heard(self, live: LiveDaemon, *, heartbeat: bool = False) -> None:
        """Record a verified message of a daemon: any message is a sign of life."""
        live.heard_ns = self._clock.now_ns()
        self._revive(live)
        if heartbeat and self._last_heard is not None:
            self._last_heard.note(live.node_id)
        if heartbeat and live.unsaved:
            live.unsaved = False
            self.standings.note(live)

    def told(self, live: LiveDaemon) -> None:
        """A daemon acknowledged an instruction; a rollout may wait for that, so it is written at once."""
        if live.unsaved:
            live.unsaved = False
            self.standings.note(live)

    def left(self, live: LiveDaemon) -> None:
        self._watch.forget(live.node_id)
        if self._leaving.get(live.node_id) is live:
            del self._leaving[live.node_id]
        if not live.moved:
            self.standings.note(live)

    def _revive(self, live: LiveDaemon) -> None:
        if self._watch.heard(live.node_id) and live.silent:
            live.silent = False
            self.standings.note(live)

    # Looking.

    def look(self, live: LiveDaemon) -> None:
        """Tell a daemon what it should know, and let it go if it should not be here."""
        node = self._store.get(EDGE_NODE, tenant_scope(live.tenant), live.node_id)
        if node is None or node.spec.revoked_at_ns is not None:
            live.session.close(REVOKED)
            return
        if not live.session.is_open:
            return
        refused = live.config_refused
        with contained("edge/push", about=live.node_id):
            self._pushes.look(live, node)
        if refused and not live.config_refused and self.standings.is_shared:
            self.standings.note(live)  # a rollout on another server waits for another answer
        if live.held:
            self._held[live.node_id] = live
        else:
            self._held.pop(live.node_id, None)
        token_id = live.seal.token_id
        former = node.spec.former(token_id) if token_id != node.spec.token_id else None
        live.credentials_until_ns = former.until_ns if former is not None else None
        if former is not None or live.shutdown_by_ns is not None:
            self._leaving[live.node_id] = live
        else:
            self._leaving.pop(live.node_id, None)

    async def _look_at(self, concerned: Callable[[LiveDaemon], bool]) -> None:
        for number, live in enumerate(self._presences, 1):
            if concerned(live):
                self.look(live)
            if number % BATCH == 0:
                await asyncio.sleep(0)

    # Watching.

    async def run(self) -> None:
        """Until cancelled."""
        async with Boundary() as tasks:
            tasks.keep("edge/standings", self.standings.run)
            tasks.keep("edge/records", self._follow_records)
            for kind in (CONFIG_LAYER, HOLD):
                tasks.keep(f"edge/{kind.name}", partial(self._follow_layers, kind))
            tasks.keep("edge/silence", partial(self._watch.run, self._fell_silent))
            tasks.keep("edge/freezes", partial(self._freezes.follow, self._thaw))
            tasks.keep("edge/time", self._keep_time)

    async def _follow_records(self) -> None:
        async with self._store.watch(EDGE_NODE) as watch:
            await self._look_at(lambda _live: True)  # who came, and what was written, before we listened
            async for batch in watch:
                for event in batch.events:
                    live = self._presences.get(event.resource.name)
                    if live is not None and tenant_of(event.resource.scope) == live.tenant:
                        with contained("edge/records", about=live.node_id):
                            self.look(live)
                            self.standings.compare(live, event.resource)

    async def _follow_layers(self, kind: AnyKind) -> None:
        """A layer was written, or a rollout wants daemons at another version of theirs."""
        async with self._store.watch(kind) as watch:
            await self._look_at(lambda _live: True)
            async for batch in watch:
                scopes = {event.resource.scope for event in batch.events}
                everyone = "" in scopes
                await self._look_at(lambda live: everyone or tenant_scope(live.tenant) in scopes)  # noqa: B023

    async def _thaw(self, _scope: str) -> None:
        """A freeze was set or lifted."""
        await self._look_at(lambda _live: True)

    async def _keep_time(self) -> None:
        while True:
            await self._clock.sleep(TICK_SECONDS)
            self._held = {node_id: live for node_id, live in self._held.items() if live.session.is_open}
            for live in tuple(self._held.values()):  # the freeze may have ended by itself
                self.look(live)
            self._let_go()

    def _fell_silent(self, change: LivenessChanged) -> None:
        live = self._presences.get(change.agent)
        if live is not None:
            live.silent = True
            self.standings.note(live)

    def _let_go(self) -> None:
        now_ns = self._clock.now_ns()
        for live in tuple(self._leaving.values()):
            if live.shutdown_by_ns is not None and now_ns >= live.shutdown_by_ns:
                live.session.close(SHUT_DOWN, flush=True)
            elif live.credentials_until_ns is not None:
                self._outgrow(live, live.credentials_until_ns, now_ns)

    def _outgrow(self, live: LiveDaemon, until_ns: int, now_ns: int) -> None:
        """The overlap ends: now if the daemon has nothing to do, else when it has done that.

        Decided a little early, so that nothing it says about its work is refused meanwhile.
        """
        if now_ns < until_ns - round(2 * TICK_SECONDS * NS):
            return
        self.look(live)
        if live.credentials_until_ns is None:  # it has changed to its new ones on this stream
            live.closing = False
            return
        live.closing = True
        last_ns = max((flight.over_at_ns for flight in live.flights.values()), default=0)
        live.seal.extended_until_ns = last_ns
        if now_ns >= max(until_ns, last_ns):
            live.session.close(ROTATED)
