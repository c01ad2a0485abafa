"""One update to 1,000 open watches, until the last has it, against a plain grpc.aio server.

Timed by the client, from just before it sends the update until the last watch's event has arrived.
Fleetplane makes the update durable and audited before it tells anyone; the reference does not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from bench import population, servers
from bench.figures import Effort, Row, alone
from bench.http2 import Connection, Crowd, crowd, files_for
from bench.servers import Server

WATCH = "/nvidia.device.v1alpha1.GpuService/WatchGpus"
UPDATE = "/nvidia.device.v1alpha1.ProviderService/UpdateGpuCondition"
GPUS = 8
WATCHES = 1000
CONNECTIONS = 100
MUST_SHARED = 2.5
MUST_SEPARATE = 2.0
WARM_UP_UPDATES = 3


class Audience:
    """Open watches, and how many events they have had."""

    def __init__(self, people: Crowd, *, watches: int, connections: int) -> None:
        self._people = people
        self._watches = watches
        self._events = 0
        self._answers = 0
        self._turn = 0
        self._provider = people.connect(self._answered)
        held = [people.connect(self._heard) for _ in range(connections)]
        for index in range(watches):
            held[index % connections].call(WATCH, b"")
        people.until(lambda: self._events == watches * GPUS)

    def _heard(self, connection: Connection, stream: int, message: bytes) -> None:
        self._events += 1

    def _answered(self, connection: Connection, stream: int, message: bytes) -> None:
        self._answers += 1

    def update(self) -> float:
        """Change one GPU; the seconds until every watch knew."""
        self._turn += 1
        request = population.change(3, self._turn)
        wanted = self._events + self._watches
        begun = time.perf_counter()
        self._provider.call(UPDATE, request)
        self._people.until(lambda: self._events >= wanted)
        seconds = time.perf_counter() - begun
        self._people.until(lambda: self._answers == self._turn)
        if self._events != wanted:
            raise RuntimeError("a watch was told of one update twice")
        return seconds


def _typical_seconds(server: Server, effort: Effort, watches: int, connections: int) -> tuple[float, float]:
    """The median of a round's updates; and the share of the time for which the client itself was busy."""
    with crowd(server) as people:
        audience = Audience(people, watches=watches, connections=connections)
        for _ in range(WARM_UP_UPDATES):
            audience.update()
        busy, begun = time.process_time(), time.perf_counter()
        seconds = [audience.update() for _ in range(effort.updates)]
        share = (time.process_time() - busy) / (time.perf_counter() - begun)
    return statistics.median(seconds), share


def _row(effort: Effort, *, watches: int, connections: int, must: float) -> Row:
    ours: list[tuple[float, float]] = []
    reference: list[tuple[float, float]] = []
    with (
        files_for(connections),
        servers.load_core() as core,
        servers.scratch() as directory,
        servers.fleetplane(directory / "data", core) as fleetplane,
        servers.grpc_aio(directory, core) as grpc_aio,
    ):
        for server in (fleetplane, grpc_aio):
            population.register(server, GPUS)
        for _ in range(effort.rounds):
            ours.append(_typical_seconds(fleetplane, effort, watches, connections))
            reference.append(_typical_seconds(grpc_aio, effort, watches, connections))
    (seconds, busy), (reference_seconds, reference_busy) = min(ours), min(reference)
    ratio = reference_seconds / seconds
    return Row(
        figure=f"One update to {watches:,} watches over {connections:,} connections",
        ours=f"{seconds * 1000:.1f} ms",
        reference=f"{reference_seconds * 1000:.1f} ms",
        ratio=ratio,
        must_reach=f"{must:g} ×",
        reached=ratio >= must,
        note=f"the client's core was busy {busy:.0%} of the time, with the reference {reference_busy:.0%}",
    )


def measure(effort: Effort) -> Sequence[Row]:
    watches = effort.watches or WATCHES
    return [
        _row(effort, watches=watches, connections=min(CONNECTIONS, watches // 2), must=MUST_SHARED),
        _row(effort, watches=watches, connections=watches, must=MUST_SEPARATE),
    ]


if __name__ == "__main__":
    alone(measure, __doc__)
