"""Durable UpdateGpuCondition from 64 callers, against the same server with one commit per write.

Every caller changes a GPU of its own and waits for the answer before it goes on. The client checks
that each answer stands for a write: the versions it is given are all different. Then the processor time
of such a write, with 16 and with 64 callers, and of a read by as many callers of the same client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from bench import population, servers
from bench.figures import Effort, Row, against, alone
from bench.http2 import Connection, crowd
from bench.servers import Server
from bench.unary import Served, best
from fleetplane.gen.nvidia.device.v1alpha1 import provider_pb2

UPDATE = "/nvidia.device.v1alpha1.ProviderService/UpdateGpuCondition"
READ = "/nvidia.device.v1alpha1.GpuService/GetGpu"
CONNECTIONS = 8
CALLERS = 64
MUST = 5.0
MUST_TAKE_US = {16: 151.0, 64: 53.0}
"""By number of callers: a third of what it took when every statement was a call of the database's thread."""
MUST_TAKE_OF_A_READ = 3.0
ONE_COMMIT_PER_WRITE = "store.group_limit=1"


class Callers:
    """They never rest."""

    def __init__(self, method: str, request: Callable[[int, int], bytes], callers: int) -> None:
        self._method = method
        self._request = request
        self._by_stream: dict[tuple[int, int], int] = {}
        self._turns = [0] * callers
        self.answers: list[bytes] = []

    @property
    def count(self) -> int:
        return len(self._turns)

    def begin(self, connection: Connection, caller: int) -> None:
        self._turns[caller] += 1
        stream = connection.call(self._method, self._request(caller, self._turns[caller]))
        self._by_stream[id(connection), stream] = caller

    def answered(self, connection: Connection, stream: int, message: bytes) -> None:
        self.answers.append(message)
        self.begin(connection, self._by_stream.pop((id(connection), stream)))


def _served(server: Server, callers: Callers, seconds: float) -> Served:
    with crowd(server) as people:
        held = [people.connect(callers.answered) for _ in range(CONNECTIONS)]
        for caller in range(callers.count):
            callers.begin(held[caller % CONNECTIONS], caller)
        before, begun = server.cpu_seconds(), time.perf_counter()
        people.until(lambda: time.perf_counter() - begun >= seconds)
        elapsed, answers = time.perf_counter() - begun, len(callers.answers)
        used = server.cpu_seconds() - before
    if not answers:
        raise RuntimeError(f"nothing was answered within {seconds:g} s")
    return Served(rate=answers / elapsed, cpu_us=used / answers * 1e6)


def _written(server: Server, callers: int, seconds: float) -> Served:
    crowd_of = Callers(UPDATE, population.change, callers)
    found = _served(server, crowd_of, seconds)
    response = provider_pb2.UpdateGpuConditionResponse
    versions = {response.FromString(answer).resource_version for answer in crowd_of.answers}
    if len(versions) != len(crowd_of.answers):
        raise RuntimeError("some answers do not stand for a write of their own")
    return found


def _read(server: Server, callers: int, seconds: float) -> Served:
    return _served(server, Callers(READ, population.question, callers), seconds)


def _efforts(callers: int, written: Served, read: Served) -> Sequence[Row]:
    figure = f"Processor time of a durable UpdateGpuCondition, {callers} callers"
    ratio = written.cpu_us / read.cpu_us
    bound = MUST_TAKE_US[callers]
    return [
        Row(
            figure=figure,
            ours=f"{written.cpu_us:.0f} µs",
            reference="",
            ratio=None,
            must_reach=f"at most {bound:g} µs",
            reached=written.cpu_us <= bound,
            note=f"{written.rate:,.0f}/s",
        ),
        Row(
            figure=f"{figure}, against GetGpu",
            ours=f"{written.cpu_us:.0f} µs",
            reference=f"{read.cpu_us:.0f} µs",
            ratio=ratio,
            must_reach=f"at most {MUST_TAKE_OF_A_READ:g} ×",
            reached=ratio <= MUST_TAKE_OF_A_READ,
            note=f"{read.rate:,.0f} reads/s",
        ),
    ]


def measure(effort: Effort) -> Sequence[Row]:
    ours: dict[int, list[Served]] = {callers: [] for callers in MUST_TAKE_US}
    reads: dict[int, list[Served]] = {callers: [] for callers in MUST_TAKE_US}
    reference: list[Served] = []
    with (
        servers.load_core() as core,
        servers.scratch() as directory,
        servers.fleetplane(directory / "grouped", core) as grouped,
        servers.fleetplane(directory / "single", core, [ONE_COMMIT_PER_WRITE]) as single,
    ):
        for server in (grouped, single):
            population.register(server, CALLERS)
        for _ in range(effort.rounds):
            for callers in MUST_TAKE_US:
                ours[callers].append(_written(grouped, callers, effort.seconds))
                reads[callers].append(_read(grouped, callers, effort.seconds))
            reference.append(_written(single, CALLERS, effort.seconds))
    rows = [
        against(
            figure=f"Durable UpdateGpuCondition, {CALLERS} callers",
            ours=best(ours[CALLERS]).rate,
            reference=best(reference).rate,
            must=MUST,
            show=lambda rate: f"{rate:,.0f}/s",
        )
    ]
    for callers in MUST_TAKE_US:
        rows += _efforts(callers, best(ours[callers]), best(reads[callers]))
    return rows


if __name__ == "__main__":
    alone(measure, __doc__)
