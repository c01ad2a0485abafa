"""Durable UpdateGpuCondition from 64 callers, against the same server with one commit per write.

Every caller changes a GPU of its own and waits for the answer before it goes on. The client checks
that each answer stands for a write: the versions it is given are all different.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench import population, servers
from bench.figures import Effort, Row, against, alone
from bench.http2 import Connection, crowd
from bench.servers import Server
from fleetplane.gen.nvidia.device.v1alpha1 import provider_pb2

UPDATE = "/nvidia.device.v1alpha1.ProviderService/UpdateGpuCondition"
CONNECTIONS = 8
STREAMS = 8
MUST = 5.0
ONE_COMMIT_PER_WRITE = "store.group_limit=1"


class Callers:
    """64 providers that never rest."""

    def __init__(self) -> None:
        self._by_stream: dict[tuple[int, int], int] = {}
        self._turns = [0] * (CONNECTIONS * STREAMS)
        self.answers: list[bytes] = []

    def begin(self, connection: Connection, caller: int) -> None:
        self._turns[caller] += 1
        stream = connection.call(UPDATE, population.change(caller, self._turns[caller]))
        self._by_stream[id(connection), stream] = caller

    def answered(self, connection: Connection, stream: int, message: bytes) -> None:
        self.answers.append(message)
        self.begin(connection, self._by_stream.pop((id(connection), stream)))


def _writes_per_second(server: Server, seconds: float) -> float:
    callers = Callers()
    with crowd(server) as people:
        held = [people.connect(callers.answered) for _ in range(CONNECTIONS)]
        for caller in range(CONNECTIONS * STREAMS):
            callers.begin(held[caller % CONNECTIONS], caller)
        begun = time.perf_counter()
        people.until(lambda: time.perf_counter() - begun >= seconds)
        elapsed, answers = time.perf_counter() - begun, callers.answers
    response = provider_pb2.UpdateGpuConditionResponse
    versions = {response.FromString(answer).resource_version for answer in answers}
    if len(versions) != len(answers):
        raise RuntimeError("some answers do not stand for a write of their own")
    return len(answers) / elapsed


def measure(effort: Effort) -> Sequence[Row]:
    ours: list[float] = []
    reference: list[float] = []
    with (
        servers.load_core() as core,
        servers.scratch() as directory,
        servers.fleetplane(directory / "grouped", core) as grouped,
        servers.fleetplane(directory / "single", core, [ONE_COMMIT_PER_WRITE]) as single,
    ):
        for server in (grouped, single):
            population.register(server, CONNECTIONS * STREAMS)
        for _ in range(effort.rounds):
            ours.append(_writes_per_second(grouped, effort.seconds))
            reference.append(_writes_per_second(single, effort.seconds))
    return [
        against(
            figure="Durable UpdateGpuCondition, 64 callers",
            ours=max(ours),
            reference=max(reference),
            must=MUST,
            show=lambda rate: f"{rate:,.0f}/s",
        )
    ]


if __name__ == "__main__":
    alone(measure, __doc__)
