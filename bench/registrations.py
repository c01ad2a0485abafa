"""20,000 GPUs registered one after the other: the last must not wait longer than the first.

The reference is the same server at its beginning. A writer that looks at everything there is before it
adds something becomes slower with each, and with it everybody else's writes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import grpc

from bench import population, servers
from bench.figures import Effort, Row, alone
from bench.servers import Server
from fleetplane.gen.nvidia.device.v1alpha1 import provider_pb2_grpc

GPUS = 20_000
SLICES = 10
MUST = 0.5
"""Of the first slice's rate. Linear growth keeps about all of it; quadratic growth leaves a tenth."""
AT_ONCE = 64
SETTINGS = (f"gpus.max_gpus={GPUS}",)


def _rates(server: Server, gpus: int) -> list[float]:
    """Registrations per second, slice by slice."""
    rates = []
    each = max(1, gpus // SLICES)
    with grpc.insecure_channel(server.authority) as channel:
        register = provider_pb2_grpc.ProviderServiceStub(channel).RegisterGpu
        for start in range(0, each * SLICES, each):
            begun = time.perf_counter()
            under_way: deque[Any] = deque()
            for index in range(start, start + each):
                if len(under_way) >= AT_ONCE:
                    under_way.popleft().result()
                request = population.registration(index)
                under_way.append(register.future(request, timeout=population.CALL_SECONDS))
            for one in under_way:
                one.result()
            rates.append(each / (time.perf_counter() - begun))
    return rates


def measure(effort: Effort) -> Sequence[Row]:
    gpus = min(GPUS, (effort.gpus or GPUS) * SLICES) if effort.gpus else GPUS
    with (
        servers.load_core() as core,
        servers.scratch() as directory,
        servers.fleetplane(directory / "data", core, SETTINGS) as server,
    ):
        begun = time.perf_counter()
        rates = _rates(server, gpus)
        seconds = time.perf_counter() - begun
    first, last = rates[0], rates[-1]
    return [
        Row(
            figure=f"Registering {gpus:,} GPUs, the last tenth against the first",
            ours=f"{last:,.0f}/s",
            reference=f"{first:,.0f}/s",
            ratio=last / first,
            must_reach=f"{MUST:g} ×",
            reached=last / first >= MUST,
            note=f"{seconds:.1f} s in all; tenths: {', '.join(f'{rate:,.0f}/s' for rate in rates)}",
        )
    ]


if __name__ == "__main__":
    alone(measure, __doc__)
