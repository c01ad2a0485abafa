"""A device API in memory, on the official gRPC server: what clients and providers are tested against.

It keeps the contract's rules that a caller can see (versions, condition merge, snapshot, resume)
and lets a test stop it, start it again, empty it, and make it refuse.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, gpu_pb2_grpc, provider_pb2, provider_pb2_grpc


class DeviceApiDouble(gpu_pb2_grpc.GpuServiceServicer, provider_pb2_grpc.ProviderServiceServicer):
    def __init__(self, socket: Path) -> None:
        self.address = f"unix://{socket}"
        self._socket = socket
        self._changed = threading.Condition()
        self._server: grpc.Server | None = None
        self.gpus: dict[str, gpu_pb2.Gpu] = {}
        self.version = 0
        self.oldest_kept = 0
        """Watches from before this version are refused."""
        self.log: list[tuple[int, str, gpu_pb2.Gpu]] = []
        self.calls: list[tuple[str, Any]] = []
        self.refusals: dict[str, grpc.StatusCode] = {}
        """By method name."""
        self.has_leases = True

    def start(self) -> None:
        self._workers = ThreadPoolExecutor(max_workers=16)
        self._server = grpc.server(self._workers)
        gpu_pb2_grpc.add_GpuServiceServicer_to_server(self, self._server)
        provider_pb2_grpc.add_ProviderServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()

    def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            with self._changed:
                self._changed.notify_all()
            server.stop(0).wait(60)
            self._workers.shutdown()  # a call that was under way is not noted later
            self._socket.unlink(missing_ok=True)

    def forget(self) -> None:
        with self._changed:
            self.gpus.clear()
            self.log.clear()

    def calls_of(self, method: str) -> list[Any]:
        return [request for name, request in list(self.calls) if name == method]

    def condition(self, name: str, kind: str = "NVMLReady") -> gpu_pb2.Condition | None:
        gpu = self.gpus.get(name)
        held = gpu.status.conditions if gpu is not None else []
        return next((condition for condition in held if condition.type == kind), None)

    def put(self, name: str, *conditions: gpu_pb2.Condition) -> None:
        """Place a GPU as another provider would have."""
        with self._changed:
            gpu = gpu_pb2.Gpu(metadata=gpu_pb2.ObjectMeta(name=name), name=name)
            gpu.status.conditions.extend(conditions)
            self._commit("MODIFIED" if name in self.gpus else "ADDED", gpu)

    def remove(self, name: str) -> None:
        with self._changed:
            self._commit("DELETED", self.gpus[name])

    def GetGpu(self, request: gpu_pb2.GetGpuRequest, context: grpc.ServicerContext) -> gpu_pb2.GetGpuResponse:
        self._receive("GetGpu", request, context)
        return gpu_pb2.GetGpuResponse(gpu=self._find(request.name, context))

    def ListGpus(
        self, request: gpu_pb2.ListGpusRequest, context: grpc.ServicerContext
    ) -> gpu_pb2.ListGpusResponse:
        self._receive("ListGpus", request, context)
        with self._changed:
            listed = gpu_pb2.GpuList(items=[self.gpus[name] for name in sorted(self.gpus)])
            listed.metadata.resource_version = str(self.version)
        return gpu_pb2.ListGpusResponse(gpu_list=listed)

    def WatchGpus(
        self, request: gpu_pb2.WatchGpusRequest, context: grpc.ServicerContext
    ) -> Iterator[gpu_pb2.WatchGpusResponse]:
        self._receive("WatchGpus", request, context)
        after = int(request.opts.resource_version or 0)
        if after and (after < self.oldest_kept or after > self.version):
            context.abort(grpc.StatusCode.OUT_OF_RANGE, f"version {after} is not kept")
        with self._changed:
            snapshot = [] if after else list(self.gpus.values())
            after = after or self.version
        for gpu in snapshot:
            yield gpu_pb2.WatchGpusResponse(type="ADDED", object=gpu)
        while self._server is not None and context.is_active():
            with self._changed:
                fresh = [entry for entry in self.log if entry[0] > after]
                if not fresh:
                    self._changed.wait(0.05)
            for version, kind, gpu in fresh:
                after = version
                yield gpu_pb2.WatchGpusResponse(type=kind, object=gpu)

    def RegisterGpu(
        self, request: provider_pb2.RegisterGpuRequest, context: grpc.ServicerContext
    ) -> provider_pb2.RegisterGpuResponse:
        self._receive("RegisterGpu", request, context)
        with self._changed:
            present = self.gpus.get(request.name)
            if present is not None:
                return provider_pb2.RegisterGpuResponse(resource_version=present.resource_version)
            gpu = gpu_pb2.Gpu(
                metadata=gpu_pb2.ObjectMeta(name=request.name),
                name=request.name,
                spec=request.spec,
                status=request.initial_status if request.HasField("initial_status") else None,
            )
            self._commit("ADDED", gpu)
            return provider_pb2.RegisterGpuResponse(created=True, resource_version=self.version)

    def UnregisterGpu(
        self, request: provider_pb2.UnregisterGpuRequest, context: grpc.ServicerContext
    ) -> provider_pb2.UnregisterGpuResponse:
        self._receive("UnregisterGpu", request, context)
        with self._changed:
            found = request.name in self.gpus
            if found:
                self._commit("DELETED", self.gpus[request.name])
        return provider_pb2.UnregisterGpuResponse(deleted=found)

    def UpdateGpuCondition(
        self, request: provider_pb2.UpdateGpuConditionRequest, context: grpc.ServicerContext
    ) -> provider_pb2.UpdateGpuConditionResponse:
        self._receive("UpdateGpuCondition", request, context)
        with self._changed:
            gpu = gpu_pb2.Gpu()
            gpu.CopyFrom(self._find(request.name, context))
            held = [entry for entry in gpu.status.conditions if entry.type == request.condition.type]
            (held[0] if held else gpu.status.conditions.add()).CopyFrom(request.condition)
            if request.HasField("recommended_action"):
                gpu.status.recommended_action = request.recommended_action
            self._commit("MODIFIED", gpu)
        return provider_pb2.UpdateGpuConditionResponse(resource_version=self.version)

    def Heartbeat(
        self, request: provider_pb2.HeartbeatRequest, context: grpc.ServicerContext
    ) -> provider_pb2.HeartbeatResponse:
        self._receive("Heartbeat", request, context)
        if not self.has_leases:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "heartbeat not yet implemented")
        return provider_pb2.HeartbeatResponse(acknowledged=True)

    def _receive(self, method: str, request: Any, context: grpc.ServicerContext) -> None:
        self.calls.append((method, request))
        if method in self.refusals:
            context.abort(self.refusals[method], f"{method} is refused")

    def _find(self, name: str, context: grpc.ServicerContext) -> gpu_pb2.Gpu:
        if name not in self.gpus:
            context.abort(grpc.StatusCode.NOT_FOUND, "gpu not found")
        return self.gpus[name]

    def _commit(self, kind: str, gpu: gpu_pb2.Gpu) -> None:
        committed = gpu_pb2.Gpu()
        committed.CopyFrom(gpu)
        self.version += 1
        committed.resource_version = self.version
        if kind == "DELETED":
            del self.gpus[gpu.metadata.name]
        else:
            self.gpus[gpu.metadata.name] = committed
        self.log.append((self.version, kind, committed))
        self._changed.notify_all()


def eventually(met: Callable[[], object], what: str = "", *, within_seconds: float = 60.0) -> None:
    """Wait, in a thread that may block, until the condition holds."""
    deadline = time.monotonic() + within_seconds
    while not met():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_seconds} s: {what or met}")
        time.sleep(0.01)
