"""The device API as the command line uses it: one channel, calls with deadlines, a watch that lasts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import grpc

from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, gpu_pb2_grpc, provider_pb2, provider_pb2_grpc
from fleetplane.kernel.backoff import Backoff

CHANNEL_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),  # a proxy from the environment is meant for other traffic
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 20_000),  # a watch notices a peer that vanished without a word
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),  # a list of 4,096 GPUs with long messages
)

RECONNECT = Backoff(first_seconds=0.2, ceiling_seconds=5.0)

PASSING_CODES = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)
"""How a stream ends when its server or the way to it goes; another attempt may find it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    kind: str
    """ADDED, MODIFIED or DELETED."""
    gpu: gpu_pb2.Gpu


def name_of(gpu: gpu_pb2.Gpu) -> str:
    return gpu.metadata.name or gpu.name


class DeviceClient:
    """One caller's connection; a context manager."""

    def __init__(self, address: str, *, call_seconds: float) -> None:
        self.address = address
        self._call_seconds = call_seconds
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._gpus = gpu_pb2_grpc.GpuServiceStub(self._channel)
        self._provider = provider_pb2_grpc.ProviderServiceStub(self._channel)

    def __repr__(self) -> str:
        return f"<DeviceClient {self.address}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def get(self, name: str) -> gpu_pb2.Gpu:
        request = gpu_pb2.GetGpuRequest(name=name)
        answer: gpu_pb2.GetGpuResponse = self._gpus.GetGpu(request, timeout=self._call_seconds)
        return answer.gpu

    def list(self) -> gpu_pb2.GpuList:
        request = gpu_pb2.ListGpusRequest()
        answer: gpu_pb2.ListGpusResponse = self._gpus.ListGpus(request, timeout=self._call_seconds)
        return answer.gpu_list

    def stream(self, after: str, *, seconds: float | None) -> Iterator[gpu_pb2.WatchGpusResponse]:
        """Changes after that version; all there is first when the version is empty."""
        request = gpu_pb2.WatchGpusRequest(opts=gpu_pb2.ListOptions(resource_version=after))
        yield from self._gpus.WatchGpus(request, timeout=seconds)

    def set_condition(self, name: str, condition: gpu_pb2.Condition, provider_id: str) -> int:
        request = provider_pb2.UpdateGpuConditionRequest(
            name=name, condition=condition, provider_id=provider_id
        )
        return int(self._provider.UpdateGpuCondition(request, timeout=self._call_seconds).resource_version)

    def register(self, name: str, uuid: str, provider_id: str) -> bool:
        request = provider_pb2.RegisterGpuRequest(
            name=name, spec=gpu_pb2.GpuSpec(uuid=uuid), provider_id=provider_id
        )
        return bool(self._provider.RegisterGpu(request, timeout=self._call_seconds).created)

    def unregister(self, name: str) -> bool:
        request = provider_pb2.UnregisterGpuRequest(name=name)
        return bool(self._provider.UnregisterGpu(request, timeout=self._call_seconds).deleted)


class Watch:
    """What a watcher knows: the GPUs, and the version it has seen everything up to.

    Pure: it turns lists and stream events into changes and never calls anyone.
    """

    def __init__(self) -> None:
        self.gpus: dict[str, gpu_pb2.Gpu] = {}
        self.version = ""

    def on_list(self, listed: gpu_pb2.GpuList) -> Iterator[Change]:
        """Every difference between what we knew and what is there now."""
        present = {name_of(gpu): gpu for gpu in listed.items}
        self.version = listed.metadata.resource_version
        for name in sorted(self.gpus.keys() - present.keys()):
            yield Change(kind="DELETED", gpu=self.gpus.pop(name))
        for name, gpu in present.items():
            known = self.gpus.get(name)
            self.gpus[name] = gpu
            if known is None:
                yield Change(kind="ADDED", gpu=gpu)
            elif known.resource_version != gpu.resource_version:
                yield Change(kind="MODIFIED", gpu=gpu)

    def on_event(self, event: gpu_pb2.WatchGpusResponse) -> Iterator[Change]:
        gpu, name = event.object, name_of(event.object)
        self.version = str(gpu.resource_version)
        known = self.gpus.get(name)
        if event.type == "DELETED":
            if self.gpus.pop(name, None) is not None:
                yield Change(kind="DELETED", gpu=gpu)
        elif known is None or known.resource_version != gpu.resource_version:
            self.gpus[name] = gpu
            yield Change(kind="ADDED" if known is None else "MODIFIED", gpu=gpu)


def follow(
    client: DeviceClient,
    watch: Watch,
    *,
    seconds: float | None,
    on_gap: Callable[[str, float], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Change]:
    """All GPUs, then every change, over any number of connections, until the time is up.

    Picks up where it was; when the server no longer knows that place, by a new list. The first
    connection must succeed: a wrong address is an error, not something to wait for.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    yield from watch.on_list(client.list())
    attempt = 0
    while True:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return
        try:
            if not watch.version:
                yield from watch.on_list(client.list())
            for event in client.stream(watch.version, seconds=left):
                attempt = 0
                yield from watch.on_event(event)
            reason = "the server ended the stream"
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.OUT_OF_RANGE:
                watch.version = ""
            elif code not in PASSING_CODES:
                raise
            reason = error.details() or code.name
            if deadline is not None and time.monotonic() >= deadline:
                return
        delay = RECONNECT.delay_seconds(attempt, jitter=random.random())  # noqa: S311  # jitter
        attempt += 1
        if watch.version:
            on_gap(reason, delay)
        sleep(delay if deadline is None else min(delay, max(0.0, deadline - time.monotonic())))
