"""Who has a stream open here, and what is known of them since it opened: all of it in memory.

A daemon has at most one stream; a newer one takes the place of the older. What a stream carries
away with it when it ends is whatever hangs on its `Live`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fleetplane.domains.edge.calls import TAIL_BYTES
from fleetplane.domains.edge.kinds import Capabilities, Dialect
from fleetplane.domains.edge.sealing import Sealer
from fleetplane.domains.edge.states import Sighting
from fleetplane.domains.edge.verification import Seal
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.sessions import Session

STREAM = "edge"


class Tail:
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
class Flight:
    """A command that a daemon has."""

    sent_at_ns: int
    over_at_ns: int
    """Its deadline and some grace: after that the daemon is taken to be done with it, whatever it says."""
    stdout: Tail = field(default_factory=Tail)
    stderr: Tail = field(default_factory=Tail)
    live_bytes: int = 0
    """Passed on to those who look on."""
    recalled: bool = False


@dataclass(slots=True, kw_only=True)
class Live:
    """One open stream of one daemon."""

    seal: Seal
    session: Session[bytes]
    dialect: Dialect
    capabilities: Capabilities
    since_ns: int
    last_heartbeat_ns: int
    silent: bool = False
    flights: dict[str, Flight] = field(default_factory=dict)
    """By the command's id, as the ledger writes it."""
    unsaved: bool = False
    """Its capabilities changed since its record was written; the next heartbeat writes them."""
    draining: bool = False
    """It was told to drain."""
    drained: bool = False
    """It says that it has."""
    shutdown_by_ns: int | None = None
    """It was told to stop; if it is still there by then, its stream is ended."""
    credentials_until_ns: int | None = None
    """The key and token it came with were replaced, and are good on this stream until then."""
    closing: bool = False
    """It gets no new work, because its stream is about to be ended."""
    config_version: str = ""
    """Of the configuration that it said is in force."""
    config_pushed: str = ""
    """Of the one that was sent last on this stream."""
    config_refused: str = ""
    """Why it did not take that one."""

    @property
    def node_id(self) -> str:
        return self.seal.node_id

    @property
    def tenant(self) -> str:
        return self.seal.tenant

    @property
    def takes_work(self) -> bool:
        return not (self.draining or self.closing or self.shutdown_by_ns is not None)

    @property
    def idle(self) -> bool:
        return not self.flights

    def sighting(self) -> Sighting:
        return Sighting(
            stream_id=self.seal.stream_id,
            dialect=self.dialect,
            capabilities=self.capabilities,
            last_heartbeat_at_ns=self.last_heartbeat_ns,
            config_version=self.config_version,
            silent=self.silent,
        )


class Presences:
    """All daemons that have a stream open."""

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer
        self._live: dict[str, Live] = {}

    def __repr__(self) -> str:
        return f"<Presences {len(self._live)}>"

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Live]:
        return iter(tuple(self._live.values()))

    def get(self, node_id: str) -> Live | None:
        """Only while its stream is open."""
        live = self._live.get(node_id)
        return live if live is not None and live.session.is_open else None

    def came(self, live: Live) -> None:
        assert live.node_id not in self._live, "the older stream must be let go first"
        self._live[live.node_id] = live

    def gone(self, live: Live) -> bool:
        """Forget a stream; False if it had lost its place already, to a newer one."""
        if self._live.get(live.node_id) is not live:
            return False
        del self._live[live.node_id]
        return True

    def current(self, node_id: str) -> Live | None:
        """The stream that has the node's place, also when it is about to end."""
        return self._live.get(node_id)

    # What others ask.

    def is_connected(self, node_id: str) -> bool:
        return self.get(node_id) is not None

    def dialect(self, node_id: str) -> Dialect | None:
        live = self.get(node_id)
        return live.dialect if live is not None else None

    def in_flight(self, node_id: str) -> int:
        live = self.get(node_id)
        return len(live.flights) if live is not None else 0

    def last_heartbeat_at_ns(self, node_id: str) -> int | None:
        live = self.get(node_id)
        return live.last_heartbeat_ns if live is not None else None

    def connected(self, tenant: str) -> list[str]:
        return [
            live.node_id for live in self._live.values() if live.tenant == tenant and live.session.is_open
        ]

    def send(self, node_id: str, command: pb.EdgeCommand) -> bool:
        """Queue a command, sealed for the node's stream; False if nothing takes it."""
        live = self.get(node_id)
        return live is not None and self.put(live, command.SerializeToString())

    def put(self, live: Live, command: bytes) -> bool:
        """The same with a command that is serialized already."""
        sealed = self._sealer.seal(command, live.node_id, live.seal.stream_id, dialect=live.dialect)
        return live.session.offer(sealed)
