"""The reference: the same device API on a plain grpc.aio server, as one writes it with generated code.

GPUs are messages in a dictionary, in memory only: it never waits for a disk. Get and List build
their answer for each call. A watch has a bounded queue of its own; an update builds its event
once and puts it in every queue, and grpc.aio serialises it for each watch.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, gpu_pb2_grpc, provider_pb2, provider_pb2_grpc

QUEUE_EVENTS = 1024
"""Per watch; twice what any figure here leaves unread."""

Context = Any


class Gpus:
    """All GPUs, the one version counter, and those who watch."""

    def __init__(self) -> None:
        self.by_name: dict[str, gpu_pb2.Gpu] = {}
        self.version = 0
        self.queues: set[asyncio.Queue[gpu_pb2.WatchGpusResponse]] = set()

    def put(self, gpu: gpu_pb2.Gpu, event: str) -> int:
        self.version += 1
        gpu.resource_version = self.version
        gpu.metadata.resource_version = str(self.version)
        self.by_name[gpu.name] = gpu
        response = gpu_pb2.WatchGpusResponse(type=event, object=gpu)
        for queue in self.queues:
            queue.put_nowait(response)
        return self.version


class GpuService(gpu_pb2_grpc.GpuServiceServicer):
    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus

    async def GetGpu(self, request: gpu_pb2.GetGpuRequest, context: Context) -> gpu_pb2.GetGpuResponse:
        gpu = self._gpus.by_name.get(request.name)
        if gpu is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "gpu not found")
        return gpu_pb2.GetGpuResponse(gpu=gpu)

    async def ListGpus(self, request: gpu_pb2.ListGpusRequest, context: Context) -> gpu_pb2.ListGpusResponse:
        return gpu_pb2.ListGpusResponse(
            gpu_list=gpu_pb2.GpuList(
                metadata=gpu_pb2.ListMeta(resource_version=str(self._gpus.version)),
                items=self._gpus.by_name.values(),
            )
        )

    async def WatchGpus(
        self, request: gpu_pb2.WatchGpusRequest, context: Context
    ) -> AsyncIterator[gpu_pb2.WatchGpusResponse]:
        queue: asyncio.Queue[gpu_pb2.WatchGpusResponse] = asyncio.Queue(QUEUE_EVENTS)
        self._gpus.queues.add(queue)
        try:
            for gpu in list(self._gpus.by_name.values()):
                yield gpu_pb2.WatchGpusResponse(type="ADDED", object=gpu)
            while True:
                yield await queue.get()
        finally:
            self._gpus.queues.discard(queue)


class ProviderService(provider_pb2_grpc.ProviderServiceServicer):
    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus

    async def RegisterGpu(
        self, request: provider_pb2.RegisterGpuRequest, context: Context
    ) -> provider_pb2.RegisterGpuResponse:
        gpu = gpu_pb2.Gpu(
            metadata=gpu_pb2.ObjectMeta(name=request.name),
            spec=request.spec,
            status=request.initial_status,
            name=request.name,
        )
        return provider_pb2.RegisterGpuResponse(created=True, resource_version=self._gpus.put(gpu, "ADDED"))

    async def UpdateGpuCondition(
        self, request: provider_pb2.UpdateGpuConditionRequest, context: Context
    ) -> provider_pb2.UpdateGpuConditionResponse:
        present = self._gpus.by_name.get(request.name)
        if present is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "gpu not found")
        assert present is not None
        gpu = gpu_pb2.Gpu()
        gpu.CopyFrom(present)
        for condition in gpu.status.conditions:
            if condition.type == request.condition.type:
                condition.CopyFrom(request.condition)
        return provider_pb2.UpdateGpuConditionResponse(resource_version=self._gpus.put(gpu, "MODIFIED"))


async def serve(ready: Path) -> None:
    gpus = Gpus()
    server = grpc.aio.server()
    gpu_pb2_grpc.add_GpuServiceServicer_to_server(GpuService(gpus), server)
    provider_pb2_grpc.add_ProviderServiceServicer_to_server(ProviderService(gpus), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    staging = ready.with_suffix(f".{os.getpid()}")
    staging.write_text(json.dumps({"listeners": {"device-api": [f"http://127.0.0.1:{port}"]}}))
    staging.replace(ready)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.stop(grace=0)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
