"""Who may stay connected: budgets of listeners and addresses, and connections that only cost.

The HTTP server accepts connections itself and knows one limit for each of its sockets. Everything
finer is done from beside it. About once a second the process's own TCP connections are looked at,
through their descriptors, in a thread: whose they are, and how many bytes came in on them according
to the system; what of that became requests is known from `doors`. Those that have to go are shut down,
which the HTTP server takes for the peer having left.

| cut because      | when                                                                                 |
|------------------|--------------------------------------------------------------------------------------|
| `address`        | one address holds more than its share of a listener; its quietest first              |
| `crowded`        | a listener is full but for its reserve; the quietest of whoever holds most           |
| `flood`          | megabytes came in that no request explains: PING, SETTINGS and other frames          |
| `slow_head`      | something trickles in for half a minute and never becomes a request                  |
| `silent`         | it has said nothing for a minute, and has never asked for anything                   |
| `tls`            | a request came over an older TLS than the listener speaks                            |
| `unknown`        | it goes on opening calls of unknown callers when it was refused hundreds of them     |

What this cannot do: refuse a connection before it is accepted, or see frames. IPv6 addresses count by
their network of 64 bits. Unix sockets are not looked at; who may reach them is decided by their mode.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.kernel.networks import network_of
from fleetplane.rpc.listening.doors import ListenerMiddleware, Strangers, Visit

_log = structlog.get_logger("fleetplane.rpc")

LOOK_SECONDS: Final = 1.0
CROWDED_LOOK_SECONDS: Final = 0.25
"""While a listener is nearly full."""
REST_FACTOR: Final = 25
"""Looking takes at most one part in so many of a core: 10,000 connections are 50 ms a look."""
FLOOD_ALLOWANCE_BYTES: Final = 8 * 1024 * 1024
"""What may lie unread in windows (4 MiB a connection) and buffers, twice over."""
FLOOD_RATE_BYTES: Final = 64 * 1024
"""A second, beyond what requests explain: 3,800 PING frames; a client's keepalive is one in ten seconds."""
REQUEST_BYTES: Final = 4096
"""Header fields and framing of one request, generously."""
BODY_FACTOR: Final = 4
"""Small messages, each in a frame and a TLS record of its own, arrive as several times their size."""
SENT_SHARE: Final = 4
"""A client that receives much sends window updates and measures the line with PINGs, far less than it gets.
What a flood of PINGs is answered with is as long as itself, and explains a quarter of it at most."""
HEAD_SECONDS: Final = 30.0
"""From the first byte of a request's head to its last, however steadily it trickles in."""
QUIET_SECONDS: Final = 60.0
"""Without a byte for so long, a connection is idle and what trickled before is forgotten."""
SILENT_SECONDS: Final = 60.0
"""Without a byte, on a connection that never had a request; one with keepalives is not silent."""
FRAME_BYTES: Final = 9
"""The smallest HTTP/2 frame; less at a time is no frame, but pieces of one."""
RECORD_BYTES: Final = 22
"""What a TLS record adds to it."""

_TCP_INFO_BYTES: Final = 136
_BYTES_ACKED: Final = 120
"""Where `tcpi_bytes_acked` lies in `struct tcp_info`, and after it `tcpi_bytes_received` (Linux 4.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one listening address may hold."""

    listener: str
    connections: int
    """But for the reserve, which is what lets a probe in when everything else is taken."""
    per_address: int
    tls: bool = False
    http1: bool = False
    """Accepts HTTP/1.1 as well: bytes without a request are part of a head."""

    @property
    def frame_bytes(self) -> int:
        return FRAME_BYTES + (RECORD_BYTES if self.tls else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenConnection:
    """One connection as the system shows it."""

    descriptor: int
    inode: int
    port: int
    """Of ours that it was accepted at."""
    peer: tuple[str, int]
    received_bytes: int | None
    """None where the system does not report it."""
    sent_bytes: int = 0
    """That the peer has acknowledged."""


@dataclass(slots=True)
class Tracked:
    """What is remembered of a connection between looks."""

    peer: tuple[str, int]
    since: float
    received_bytes: int = 0
    requests: int = 0
    unexplained_bytes: int = 0
    flooding: int = 0
    """Looks in a row at which it sent far more than its requests explain."""
    trickling_since: float | None = None
    grew_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CutConnection:
    seen: SeenConnection
    reason: str


@dataclass(slots=True)
class Rules:
    """Decides who goes. Knows no descriptor and no clock: facts and `now` in, reasons out."""

    budgets: Mapping[int, Budget]
    """By the port they are accepted at."""
    tracked: dict[int, Tracked] = field(default_factory=dict)
    """By inode."""

    def decide(
        self, found: Sequence[SeenConnection], visits: Mapping[tuple[str, int], Visit], *, now: float
    ) -> list[CutConnection]:
        """Everyone who has to go now. `visits` is what connections asked for, by peer."""
        self._forget(found)
        going: dict[int, str] = {}
        for seen in found:
            known = self.tracked.get(seen.inode)
            if known is None:
                known = self.tracked[seen.inode] = Tracked(peer=seen.peer, since=now, grew_at=now)
            reason = self._alone(seen, known, visits.get(seen.peer), now)
            if reason:
                going[seen.inode] = reason
        staying = [seen for seen in found if seen.inode not in going]
        for inode, reason in self._together(staying, visits):
            going.setdefault(inode, reason)
        return [CutConnection(seen=seen, reason=going[seen.inode]) for seen in found if seen.inode in going]

    def _forget(self, found: Sequence[SeenConnection]) -> None:
        present = {seen.inode: seen.peer for seen in found}
        for inode, known in tuple(self.tracked.items()):
            if present.get(inode) != known.peer:
                del self.tracked[inode]

    def _alone(self, seen: SeenConnection, known: Tracked, visit: Visit | None, now: float) -> str:
        """Why it goes for what it does itself, or nothing."""
        if visit is not None and visit.condemned:
            return visit.condemned
        if seen.received_bytes is None:
            return ""
        grown = seen.received_bytes - known.received_bytes
        known.received_bytes = seen.received_bytes
        requests = visit.requests if visit is not None else 0
        if not (grown or requests or known.requests) and now - known.grew_at > SILENT_SECONDS:
            return "silent"
        body = visit.body_bytes if visit is not None else 0
        explained = BODY_FACTOR * body + seen.sent_bytes // SENT_SHARE + requests * REQUEST_BYTES
        unexplained = max(0, seen.received_bytes - explained)
        sudden = unexplained - known.unexplained_bytes > FLOOD_RATE_BYTES
        known.unexplained_bytes = unexplained
        known.flooding = known.flooding + 1 if sudden else 0
        if unexplained > FLOOD_ALLOWANCE_BYTES and known.flooding:
            return "flood"
        asked = requests != known.requests or (visit is not None and visit.open > 0)
        known.requests = requests
        return _trickles(known, grown, now, self.budgets[seen.port], asked=asked)

    def _together(
        self, found: Sequence[SeenConnection], visits: Mapping[tuple[str, int], Visit]
    ) -> Iterator[tuple[int, str]]:
        """Those that are too many: of one address, then of a listener."""
        by_port: dict[int, dict[str, list[SeenConnection]]] = defaultdict(lambda: defaultdict(list))
        for seen in found:
            by_port[seen.port][network_of(seen.peer[0])].append(seen)
        for port, by_address in by_port.items():
            budget = self.budgets[port]
            for held in by_address.values():
                held.sort(key=lambda seen: self._liveliness(seen, visits))
                if (over := len(held) - budget.per_address) > 0:
                    yield from ((seen.inode, "address") for seen in held[:over])
                    del held[:over]
            over = sum(map(len, by_address.values())) - budget.connections
            while over > 0:
                most = max(by_address.values(), key=len)
                next_most = max((len(held) for held in by_address.values() if held is not most), default=0)
                going = most[: min(over, max(1, len(most) - next_most))]
                yield from ((seen.inode, "crowded") for seen in going)
                del most[: len(going)]
                over -= len(going)

    def _liveliness(
        self, seen: SeenConnection, visits: Mapping[tuple[str, int], Visit]
    ) -> tuple[bool, float, float]:
        """Quietest first: with nothing under way, then by when they last asked for something.

        Of those that never asked, the newest first: a crowd that has just come pushes out nobody.
        """
        visit = visits.get(seen.peer)
        if visit is None or not visit.requests:
            return (False, 0.0, -self.tracked[seen.inode].since)
        return (visit.open > 0, visit.active_at, 0.0)


def _trickles(known: Tracked, grown: int, now: float, budget: Budget, *, asked: bool) -> str:
    """Whether bytes keep coming of which no request comes; whole frames, such as keepalives, may."""
    if asked or (not grown and now - known.grew_at > QUIET_SECONDS):
        known.trickling_since = None
    elif grown and (budget.http1 or grown < budget.frame_bytes):
        if known.trickling_since is None:
            known.trickling_since = now
        elif now - known.trickling_since > HEAD_SECONDS:
            return "slow_head"
    if grown:
        known.grew_at = now
    return ""


class ConnectionLimiter:
    """Looks after the TCP connections of a process's listeners."""

    def __init__(self) -> None:
        self._rules = Rules({})
        self._visits: list[dict[tuple[str, int], Visit]] = []
        self.cut: Counter[tuple[str, str]] = Counter()
        """By listener and reason."""
        self.strangers = Strangers()
        self._refused = 0
        """Requests of unknown callers that were refused, as of the last look."""
        self.held: Counter[str] = Counter()
        """Connections by listener, as of the last look."""

    def __repr__(self) -> str:
        return f"<Warden held={self.held.total()} cut={self.cut.total()}>"

    def tend(self, budgets: Mapping[int, Budget], door: ListenerMiddleware) -> None:
        """Look after a listener from now on."""
        door.tended = True
        door.strangers = self.strangers
        self._rules.budgets = {**self._rules.budgets, **budgets}  # another one may be read in a thread
        self._visits.append(door.visits)

    async def run(self) -> NoReturn:
        """Look until cancelled."""
        while True:
            began = time.monotonic()
            crowded = await self.look()
            took = time.monotonic() - began
            wait = CROWDED_LOOK_SECONDS if crowded else LOOK_SECONDS
            await asyncio.sleep(max(wait, REST_FACTOR * took))

    async def look(self) -> bool:
        """Cut off who has to go; returns whether a listener is nearly full."""
        found = await asyncio.to_thread(connections_at, frozenset(self._rules.budgets))
        visits: dict[tuple[str, int], Visit] = {}
        peers = {seen.peer for seen in found}
        for kept in self._visits:
            for peer in tuple(kept):
                if peer in peers:
                    visits[peer] = kept[peer]
                elif not kept[peer].open:
                    del kept[peer]
        cuts = await asyncio.to_thread(self._decide_and_cut, found, visits)
        self._count(found, cuts)
        return any(
            self.held[budget.listener] > 0.8 * budget.connections for budget in self._rules.budgets.values()
        )

    def _decide_and_cut(
        self, found: Sequence[SeenConnection], visits: Mapping[tuple[str, int], Visit]
    ) -> list[CutConnection]:
        cuts = self._rules.decide(found, visits, now=time.monotonic())
        return [cut for cut in cuts if shut_down(cut.seen)]

    def _count(self, found: Sequence[SeenConnection], cuts: Sequence[CutConnection]) -> None:
        budgets = self._rules.budgets
        self.held = Counter(budgets[seen.port].listener for seen in found)
        if refused := self.strangers.refused - self._refused:
            self._refused += refused
            _log.warning("unknown_callers.refused", count=refused, open=self.strangers.open)
        now = Counter((budgets[cut.seen.port].listener, cut.reason) for cut in cuts)
        self.cut.update(now)
        for (listener, reason), count in now.items():
            addresses = sorted({cut.seen.peer[0] for cut in cuts if cut.reason == reason})[:8]
            _log.warning(
                "connections.cut", listener=listener, reason=reason, count=count, addresses=addresses
            )


def connections_at(ports: Collection[int]) -> list[SeenConnection]:
    """This process's TCP connections that were accepted at one of the ports."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  # ten thousand names, not ten thousand paths
        descriptor = int(name)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            seen = _seen(descriptor, status.st_ino, ports)
        except OSError:  # gone meanwhile, or not connected
            continue
        if seen is not None:
            found.append(seen)
    return found


def _seen(descriptor: int, inode: int, ports: Collection[int]) -> SeenConnection | None:
    found = socket.socket(fileno=descriptor)
    try:
        if found.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        port = found.getsockname()[1]
        if port not in ports:
            return None
        host, peer_port = found.getpeername()[:2]  # one that listens has none
        info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    finally:
        found.detach()  # it is the HTTP server's
    sent, received = 0, None
    if len(info) >= _TCP_INFO_BYTES:
        sent, received = struct.unpack_from("QQ", info, _BYTES_ACKED)
    return SeenConnection(
        descriptor=descriptor,
        inode=inode,
        port=port,
        peer=(host, peer_port),
        received_bytes=received,
        sent_bytes=sent,
    )


def shut_down(seen: SeenConnection) -> bool:
    """End a connection, if the descriptor is still that connection's."""
    try:
        with socket.socket(fileno=os.dup(seen.descriptor)) as found:
            if os.fstat(found.fileno()).st_ino != seen.inode:
                return False
            found.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


class ConnectionLimiterCollector(Collector):
    def __init__(self, warden: ConnectionLimiter) -> None:
        self._warden = warden

    def collect(self) -> Iterator[Metric]:
        held = GaugeMetricFamily("fleetplane_connections", "TCP connections open now", labels=["listener"])
        for listener, count in sorted(self._warden.held.items()):
            held.add_metric([listener], count)
        cut = CounterMetricFamily(
            "fleetplane_connections_cut", "TCP connections ended by the server", labels=["listener", "reason"]
        )
        for (listener, reason), count in sorted(self._warden.cut.items()):
            cut.add_metric([listener, reason], count)
        unknown = GaugeMetricFamily(
            "fleetplane_unknown_callers", "Requests under way whose callers are not known yet"
        )
        unknown.add_metric([], self._warden.strangers.open)
        refused = CounterMetricFamily(
            "fleetplane_unknown_callers_refused", "Requests refused because there were too many of these"
        )
        refused.add_metric([], self._warden.strangers.refused)
        yield from (held, cut, unknown, refused)
