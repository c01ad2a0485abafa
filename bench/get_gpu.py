"""GetGpu: 8 connections with 8 calls in flight each, against a plain grpc.aio server."""

from __future__ import annotations

from collections.abc import Sequence

from bench import population, unary
from bench.figures import Effort, Row, against, alone
from bench.servers import Server
from bench.unary import Served
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2

METHOD = "/nvidia.device.v1alpha1.GpuService/GetGpu"
GPUS = 8
MUST = 8.0


def measure(effort: Effort) -> Sequence[Row]:
    def load(server: Server) -> Served:
        request = gpu_pb2.GetGpuRequest(name=population.name(3)).SerializeToString()
        size = population.get(server, 3).ByteSize()
        return unary.under_load(server, METHOD, request, size, effort.seconds)

    ours, reference = unary.in_turns(effort, GPUS, load)
    return [
        against(
            figure="GetGpu, 8 connections × 8 streams",
            ours=ours.rate,
            reference=reference.rate,
            must=MUST,
            show=lambda rate: f"{rate:,.0f}/s",
            note=unary.processor_time(ours, reference),
        )
    ]


if __name__ == "__main__":
    alone(measure, __doc__)
