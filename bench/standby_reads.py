"""GetGpu on a server that stands by, against the same on the active one, both on one PostgreSQL.

The active server answers from memory, by the short way; one that stands by asks the database first where the
log ends. What is compared is the processor time of the servers per call, 8 connections with 8 calls in flight
each: calls that wait share a question. The database's own time is not counted; the note has the rates.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench import population, unary
from bench.figures import Effort, Row, alone
from bench.get_gpu import GPUS, METHOD
from bench.servers import Server
from bench.unary import Served
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2
from tools.run_cluster import Cluster, Ports

MUST = 0.2
"""A read that asks first may take five times what one from memory takes."""


def measure(effort: Effort) -> Sequence[Row]:
    with tempfile.TemporaryDirectory(prefix="fleetplane-bench-") as folder, contextlib.ExitStack() as stack:
        ports = Ports(0)
        cluster = Cluster(Path(folder), ports, stack)
        cluster.start()
        cluster.until(lambda: cluster.active() is not None, "an active server")
        first = cluster.active()
        assert first is not None
        second = next(n for n in range(len(cluster.servers)) if n != first)
        cluster.until(lambda: cluster.is_ready(ports.web[second], "/readyz/reads"), "a standby")
        found = [
            Server(
                name=f"server-{n + 1}",
                pid=cluster.servers[n].pid,
                host="127.0.0.1",
                port=ports.device[n],
                started_seconds=0.0,
            )
            for n in (first, second)
        ]
        population.register(found[0], GPUS)
        request = gpu_pb2.GetGpuRequest(name=population.name(3)).SerializeToString()
        size = population.get(found[0], 3).ByteSize()
        rounds: list[tuple[Served, Served]] = []
        for _ in range(effort.rounds):
            active, standby = (unary.under_load(one, METHOD, request, size, effort.seconds) for one in found)
            rounds.append((active, standby))
    active = min((one for one, _ in rounds), key=lambda one: one.cpu_us)
    standby = min((one for _, one in rounds), key=lambda one: one.cpu_us)
    ratio = active.cpu_us / standby.cpu_us
    return [
        Row(
            figure="GetGpu on a standby server, processor time",
            ours=f"{standby.cpu_us:,.0f} µs",
            reference=f"{active.cpu_us:,.0f} µs",
            ratio=ratio,
            must_reach=f"{MUST:g} ×",
            reached=ratio >= MUST,
            note=f"{standby.rate:,.0f}/s against {active.rate:,.0f}/s on the active server",
        )
    ]


if __name__ == "__main__":
    alone(measure, __doc__)
