"""The GPUs that every figure is measured on: three conditions each, as a node's providers report them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from bench.servers import Server
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, gpu_pb2_grpc, provider_pb2, provider_pb2_grpc

PROVIDER = "bench"
CONDITIONS = (
    ("NVMLReady", "Initialized", "the driver answers for this GPU"),
    ("MemoryHealthy", "NoErrors", "no uncorrectable memory errors since the last reset"),
    ("ThermalHealthy", "InRange", "temperature and power are within their limits"),
)
REGISTRATIONS_AT_ONCE = 64
CALL_SECONDS = 60.0
SINCE_SECONDS = 1_760_000_000
MAX_ANSWER_BYTES = 16 * 1024 * 1024


def name(index: int) -> str:
    return f"gpu-{index:04}"


def condition(index: int, *, status: str, since_seconds: int = SINCE_SECONDS) -> gpu_pb2.Condition:
    kind, reason, message = CONDITIONS[index]
    made = gpu_pb2.Condition(type=kind, status=status, reason=reason, message=message)
    made.last_transition_time.seconds = since_seconds
    return made


def registration(index: int) -> provider_pb2.RegisterGpuRequest:
    return provider_pb2.RegisterGpuRequest(
        name=name(index),
        spec=gpu_pb2.GpuSpec(uuid=f"GPU-{index:08x}-5f1c-4a52-9d3e-{index * 7919:012x}"),
        provider_id=PROVIDER,
        initial_status=gpu_pb2.GpuStatus(
            conditions=[condition(number, status="True") for number in range(len(CONDITIONS))]
        ),
    )


def change(index: int, turn: int) -> bytes:
    """An encoded `UpdateGpuConditionRequest` that differs from the one of the turn before.

    Its size does not depend on the turn, so that every update costs the same on the wire.
    """
    status = ("True", "Fail")[turn % 2]
    request = provider_pb2.UpdateGpuConditionRequest(
        name=name(index),
        condition=condition(1, status=status, since_seconds=SINCE_SECONDS + turn),
        provider_id=PROVIDER,
    )
    return request.SerializeToString()


def question(index: int, turn: int) -> bytes:
    """An encoded `GetGpuRequest`."""
    return gpu_pb2.GetGpuRequest(name=name(index)).SerializeToString()


@contextmanager
def channel(server: Server) -> Iterator[grpc.Channel]:
    options = [("grpc.max_receive_message_length", MAX_ANSWER_BYTES)]
    with grpc.insecure_channel(server.authority, options=options) as made:
        yield made


def register(server: Server, count: int) -> None:
    with channel(server) as made:
        stub = provider_pb2_grpc.ProviderServiceStub(made)
        pending: deque[Any] = deque()
        for index in range(count):
            if len(pending) >= REGISTRATIONS_AT_ONCE:
                pending.popleft().result()
            pending.append(stub.RegisterGpu.future(registration(index), timeout=CALL_SECONDS))
        for answer in pending:
            if not answer.result().created:
                raise RuntimeError("a GPU was there already")


def get(server: Server, index: int) -> gpu_pb2.GetGpuResponse:
    with channel(server) as made:
        request = gpu_pb2.GetGpuRequest(name=name(index))
        answer: gpu_pb2.GetGpuResponse = gpu_pb2_grpc.GpuServiceStub(made).GetGpu(
            request, timeout=CALL_SECONDS
        )
        return answer


def listed(server: Server) -> gpu_pb2.ListGpusResponse:
    with channel(server) as made:
        answer: gpu_pb2.ListGpusResponse = gpu_pb2_grpc.GpuServiceStub(made).ListGpus(
            gpu_pb2.ListGpusRequest(), timeout=CALL_SECONDS
        )
        return answer
