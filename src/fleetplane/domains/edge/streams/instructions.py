"""What a connected daemon should be told beside tool calls: its configuration, to drain, to stop.

Level-triggered: compares what is wanted with what this stream was told and what the daemon said,
and sends what is missing. Looking again does no harm. A daemon says that it did as told by a
progress report about a word of ours instead of a command, or by its capabilities:

    command id           state            message
    (the version)        config-applied   the version
    (the version)        config-refused   why
    drain                drained          (empty)

Daemons in the field say nothing of the kind: they are told once per stream.
"""

from __future__ import annotations

import structlog

from fleetplane.domains.edge.kinds import Desired, EdgeNode, NodeSpec, PayloadDialect, daemon_scope
from fleetplane.domains.edge.nodes.config_layers import ConfigLayers, MergedConfig, version_of
from fleetplane.domains.edge.streams.live import DaemonPresences, LiveDaemon
from fleetplane.domains.edge.wire import messages as wire
from fleetplane.domains.edge.wire.messages import ReportedStatus
from fleetplane.fleet.freeze import Freezes
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.clock import Clock

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
