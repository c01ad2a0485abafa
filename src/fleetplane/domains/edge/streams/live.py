"""The streams that are open here, what is known of them, and the state of a daemon that follows from it.

A daemon has at most one stream; a newer one takes the place of the older. What `Live` holds is in memory
and ends with the stream.

    REVOKED        operators revoked it; holds whatever else is so
    DISCONNECTED   it has no stream
    DRAINING       it has one, and was told to take no new work
    UNHEALTHY      it has one, and has said nothing on it for too long
    CONNECTED      otherwise

A daemon that drains may stop its heartbeats, so silence does not make it unhealthy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from fleetplane.domains.edge.kinds import (
    Capabilities,
    Desired,
    NodeSpec,
    NodeState,
    NodeStatus,
    PayloadDialect,
)
from fleetplane.domains.edge.streams.call_encoding import TAIL_BYTES
from fleetplane.domains.edge.streams.sealing import StreamSealer
from fleetplane.domains.edge.streams.verification import Seal
from fleetplane.fleet.streams.presence import Flight, Live, Presences
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb

_SEEN = (
    "stream_id",
    "dialect",
    "capabilities",
    "config_version",
    "config_refused",
    "config_refused_version",
    "config_refused_at_ns",
    "hello_ms",
)


class DaemonSighting(msgspec.Struct, frozen=True, kw_only=True):
    """What the open stream of a daemon says about it."""

    stream_id: str
    dialect: PayloadDialect
    capabilities: Capabilities
    last_heartbeat_at_ns: int
    config_version: str
    config_refused: str = ""
    config_refused_version: str = ""
    config_refused_at_ns: int = 0
    hello_ms: int = 0
    silent: bool = False
    """Nothing was heard of it for longer than its heartbeats allow."""


def sighting_of(status: NodeStatus) -> DaemonSighting:
    """What the server that has a daemon's stream wrote down of it."""
    return DaemonSighting(
        **{name: getattr(status, name) for name in _SEEN},
        last_heartbeat_at_ns=status.last_heartbeat_at_ns or status.since_ns,
        silent=status.state is NodeState.UNHEALTHY,
    )


def state_of(spec: NodeSpec, seen: DaemonSighting | None) -> NodeState:
    if spec.revoked_at_ns is not None:
        return NodeState.REVOKED
    if seen is None:
        return NodeState.DISCONNECTED
    if spec.desired is not Desired.ACTIVE:
        return NodeState.DRAINING
    return NodeState.UNHEALTHY if seen.silent else NodeState.CONNECTED


def status_after(
    spec: NodeSpec,
    before: NodeStatus | None,
    seen: DaemonSighting | None,
    *,
    heard_at_ns: int | None = None,
    now_ns: int,
) -> NodeStatus:
    """The status worth writing down; equal to the one before unless something of note changed.

    Heartbeats alone are not of note: the moment of the last one (`heard_at_ns`, for a stream that
    has ended) is written when something else is.
    """
    state = state_of(spec, seen)
    if before is None:
        before = NodeStatus(state=state, since_ns=now_ns)
    changed: dict[str, object] = {}
    if state is not before.state:
        changed |= {"state": state, "since_ns": now_ns}
    if seen is not None:
        heard_at_ns = seen.last_heartbeat_at_ns
        for name in _SEEN:
            if getattr(seen, name) != getattr(before, name):
                changed[name] = getattr(seen, name)
    if not changed:
        return before
    if heard_at_ns is not None:
        changed["last_heartbeat_at_ns"] = heard_at_ns
    return msgspec.structs.replace(before, **changed)


STREAM = "edge"


class StreamTail:
    """The end of a stream of bytes."""

    __slots__ = ("_kept", "dropped")

    def __init__(self) -> None:
        self._kept = b""
        self.dropped = 0
        """Bytes that came before what is kept."""

    def add(self, more: bytes) -> None:
        self.dropped += max(0, len(self._kept) + len(more) - TAIL_BYTES)
        self._kept = (self._kept + more[-TAIL_BYTES:])[-TAIL_BYTES:]

    def __bytes__(self) -> bytes:
        return self._kept


@dataclass(slots=True, kw_only=True)
class ToolFlight(Flight):
    """A command that a daemon has, and what it has said of it."""

    stdout: StreamTail = field(default_factory=StreamTail)
    stderr: StreamTail = field(default_factory=StreamTail)
    live_bytes: int = 0
    """Passed on to those who look on."""


@dataclass(slots=True, kw_only=True, eq=False)
class LiveDaemon(Live[bytes, ToolFlight]):
    """One open stream of one daemon."""

    seal: Seal
    dialect: PayloadDialect
    states_dialect: bool = False
    """The daemon has declared its dialect."""
    capabilities: Capabilities
    silent: bool = False
    unsaved: bool = False
    """Its capabilities changed since its record was written; the next heartbeat writes them."""
    draining: bool = False
    """The daemon has been sent a drain."""
    drained: bool = False
    """It says that it has."""
    shutdown_by_ns: int | None = None
    """The daemon has been sent a shutdown; its stream is ended at this time."""
    credentials_until_ns: int | None = None
    """The key and token it came with were replaced, and are good on this stream until then."""
    closing: bool = False
    """It gets no new work, because its stream is about to be ended."""
    config_version: str = ""
    """Of the configuration that it said is in force, on this stream: daemons in the field never say."""
    config_pushed: str = ""
    """Of the one that was sent last on this stream."""
    config_refused: str = ""
    """Why it did not take that one."""
    config_refused_ns: int = 0
    """When it said so."""
    held: bool = False
    """A freeze held back an instruction at the last check."""

    @property
    def node_id(self) -> str:
        return self.agent

    @property
    def tenant(self) -> str:
        return self.seal.tenant

    @property
    def takes_work(self) -> bool:
        return not (self.draining or self.closing or self.shutdown_by_ns is not None)

    @property
    def idle(self) -> bool:
        return not self.flights

    def sighting(self) -> DaemonSighting:
        return DaemonSighting(
            stream_id=self.seal.stream_id,
            dialect=self.dialect,
            capabilities=self.capabilities,
            last_heartbeat_at_ns=self.heard_ns,
            config_version=self.config_version,
            config_refused=self.config_refused,
            config_refused_version=self.config_pushed if self.config_refused else "",
            config_refused_at_ns=self.config_refused_ns if self.config_refused else 0,
            hello_ms=self.seal.hello_ms,
            silent=self.silent,
        )


class DaemonPresences(Presences[LiveDaemon]):
    """All daemons that have a stream open."""

    def __init__(self, sealer: StreamSealer) -> None:
        super().__init__()
        self._sealer = sealer

    # What others ask.

    def is_connected(self, node_id: str) -> bool:
        return self.get(node_id) is not None

    def dialect(self, node_id: str) -> PayloadDialect | None:
        live = self.get(node_id)
        return live.dialect if live is not None else None

    def in_flight(self, node_id: str) -> int:
        live = self.get(node_id)
        return len(live.flights) if live is not None else 0

    def last_heartbeat_at_ns(self, node_id: str) -> int | None:
        live = self.get(node_id)
        return live.heard_ns if live is not None else None

    def connected(self, tenant: str) -> list[str]:
        return [
            live.node_id for live in self._live.values() if live.tenant == tenant and live.session.is_open
        ]

    def send(self, node_id: str, command: pb.EdgeCommand) -> bool:
        """Queue a command, sealed for the node's stream; False if nothing takes it."""
        live = self.get(node_id)
        return live is not None and self.put(live, command.SerializeToString())

    def put(self, live: LiveDaemon, command: bytes) -> bool:
        """Queue a command that is serialized already."""
        return live.session.offer(self.sealed(live, command))

    def sealed(self, live: LiveDaemon, command: bytes) -> bytes:
        """A serialized command, signed for this stream of this node."""
        return self._sealer.seal(command, live.node_id, live.seal.stream_id)
