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

from fleetplane.domains.edge import wire
from fleetplane.domains.edge.config_layers import ConfigLayers, Merged, version_of
from fleetplane.domains.edge.kinds import Desired, Dialect, EdgeNode, NodeSpec
from fleetplane.domains.edge.presence import Live, Presences
from fleetplane.domains.edge.wire import Status
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
"""Beyond its grace, before the stream of a daemon that was told to stop is ended for it."""
REASON_LIMIT = 512

_NOTHING = Merged(content=b"{}", version=version_of(b"{}"))


class Pushes:
    def __init__(self, presences: Presences, layers: ConfigLayers, clock: Clock) -> None:
        self._presences = presences
        self._layers = layers
        self._clock = clock

    # Telling.

    def look(self, live: Live, node: EdgeNode) -> None:
        """Send what is missing, configuration first: it holds for whatever is asked next."""
        if node.spec.desired is Desired.SHUTDOWN:
            self._shut_down(live, node.spec)
            return
        self._configure(live)
        if node.spec.desired is Desired.DRAINING and not live.draining:
            live.draining = self._presences.put(live, wire.drain().SerializeToString())
        elif node.spec.desired is Desired.ACTIVE and live.draining and live.idle:
            live.session.close(UNDRAINED, flush=True)

    def _configure(self, live: Live) -> None:
        wanted = self._layers.merged(live.tenant, live.node_id)
        if wanted is None:
            if not (live.config_version or live.config_pushed):
                return
            wanted = _NOTHING  # what was set before is to go
        if wanted.version in (live.config_version, live.config_pushed):
            return
        if live.dialect is Dialect.LEGACY and not live.idle:
            return  # it does not read while it works; sent as soon as it has answered
        command = wire.push_config(live.dialect, version=wanted.version, document=wanted.content)
        if self._presences.put(live, command.SerializeToString()):
            live.config_pushed, live.config_refused = wanted.version, ""

    def _shut_down(self, live: Live, spec: NodeSpec) -> None:
        if live.shutdown_by_ns is not None:
            return
        grace = spec.shutdown_grace_seconds
        if self._presences.put(live, wire.shutdown(grace).SerializeToString()):
            seconds = grace + SHUTDOWN_MARGIN_SECONDS
            live.shutdown_by_ns = self._clock.now_ns() + round(seconds * 1e9)

    # Being told.

    def told(self, live: Live, about: str, status: Status | None) -> bool:
        """Take a daemon's word that it did as told; False if that was about something else."""
        match status:
            case Status(state="config-applied") if about == live.config_pushed:
                live.config_version, live.unsaved = about, True
            case Status(state="config-refused") if about == live.config_pushed:
                live.config_refused = status.message[:REASON_LIMIT]
                log.warning("edge.config_refused", node=live.node_id, version=about, reason=status.message)
            case Status(state="drained") if about == DRAIN:
                live.drained = True
            case Status(state="draining") if about == DRAIN:
                pass
            case _:
                return False
        return True

    def heard(self, live: Live, said: pb.EdgeCapabilities) -> None:
        """The same from the capabilities of a daemon that uses their fields for it."""
        if said.config_version and said.config_version in (live.config_pushed, live.config_version):
            live.config_version, live.unsaved = said.config_version, True
        live.drained = live.drained or (said.draining and live.draining)
