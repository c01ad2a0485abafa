"""ListGpus with 576 GPUs, against a plain grpc.aio server that builds the list for each call."""

from __future__ import annotations

from collections.abc import Sequence

from bench import population, unary
from bench.figures import Effort, Row, against, alone
from bench.servers import Server
from bench.unary import Served

METHOD = "/nvidia.device.v1alpha1.GpuService/ListGpus"
GPUS = 576
MUST = 20.0


def measure(effort: Effort) -> Sequence[Row]:
    gpus = effort.gpus or GPUS

    def load(server: Server) -> Served:
        answer = population.listed(server)
        if len(answer.gpu_list.items) != gpus:
            raise RuntimeError(f"{server.name} lists {len(answer.gpu_list.items)} GPUs, not {gpus}")
        return unary.under_load(server, METHOD, b"", answer.ByteSize(), effort.seconds)

    ours, reference = unary.in_turns(effort, gpus, load)
    return [
        against(
            figure=f"ListGpus with {gpus} GPUs",
            ours=ours.rate,
            reference=reference.rate,
            must=MUST,
            show=lambda rate: f"{rate:,.0f}/s",
            note=unary.processor_time(ours, reference),
        )
    ]


if __name__ == "__main__":
    alone(measure, __doc__)
