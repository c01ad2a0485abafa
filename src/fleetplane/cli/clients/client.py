"""The device API as the command line uses it: one channel, calls with deadlines, a watch that lasts.

gRPC is never called on the main thread. That is where Ctrl-C is raised, at any instruction, and
gRPC's own bookkeeping does not survive it there: closing the channel can then wait for ever.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, TypeVar

import grpc

from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, gpu_pb2_grpc, provider_pb2, provider_pb2_grpc
from fleetplane.kernel.clock import Backoff

CHANNEL_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),  # a proxy from the environment is meant for other traffic
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 20_000),  # a watch notices a peer that vanished without a word
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),  # a list of 4,096 GPUs with long messages
)

PAGE = 1000
"""GPUs asked for at once; some 300 KB."""
STREAM_EVENTS_LIMIT = 256
"""Events read ahead of the printer. Beyond it the stream waits, and the server coalesces."""

WAIT_SLICE_SECONDS = 0.25

T = TypeVar("T")

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
class GpuChange:
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
        away(self._channel.close)

    def get(self, name: str) -> gpu_pb2.Gpu:
        request = gpu_pb2.GetGpuRequest(name=name)
        answer: gpu_pb2.GetGpuResponse = self._call(self._gpus.GetGpu, request)
        return answer.gpu

    def list(self) -> gpu_pb2.GpuList:
        """All GPUs, a page at a time: an answer with twenty thousand of them is more than a client takes."""
        found = gpu_pb2.GpuList()
        token = ""
        while True:
            options = gpu_pb2.ListOptions(limit=PAGE, continue_token=token)
            request = gpu_pb2.ListGpusRequest(opts=options)
            answer: gpu_pb2.ListGpusResponse = self._call(self._gpus.ListGpus, request)
            found.items.extend(answer.gpu_list.items)
            token = answer.gpu_list.metadata.continue_token
            if not token:
                found.metadata.resource_version = answer.gpu_list.metadata.resource_version
                return found

    def stream(self, after: str, *, seconds: float | None) -> Iterator[gpu_pb2.WatchGpusResponse]:
        """Changes after that version; all there is first when the version is empty."""
        request = gpu_pb2.WatchGpusRequest(opts=gpu_pb2.ListOptions(resource_version=after))
        call = away(lambda: self._gpus.WatchGpus(request, timeout=seconds))
        events: queue.Queue[gpu_pb2.WatchGpusResponse | grpc.RpcError | None]
        events = queue.Queue(STREAM_EVENTS_LIMIT)

        def read() -> None:
            try:
                for event in call:
                    events.put(event)
                events.put(None)
            except grpc.RpcError as error:
                events.put(error)

        threading.Thread(target=read, name="device-api-watch", daemon=True).start()
        try:
            while (event := _take(events)) is not None:
                if isinstance(event, grpc.RpcError):
                    raise event
                yield event
        finally:
            away(call.cancel)

    def set_condition(self, name: str, condition: gpu_pb2.Condition, provider_id: str) -> int:
        request = provider_pb2.UpdateGpuConditionRequest(
            name=name, condition=condition, provider_id=provider_id
        )
        answer: provider_pb2.UpdateGpuConditionResponse = self._call(
            self._provider.UpdateGpuCondition, request
        )
        return answer.resource_version

    def register(self, name: str, uuid: str, provider_id: str) -> bool:
        request = provider_pb2.RegisterGpuRequest(
            name=name, spec=gpu_pb2.GpuSpec(uuid=uuid), provider_id=provider_id
        )
        answer: provider_pb2.RegisterGpuResponse = self._call(self._provider.RegisterGpu, request)
        return answer.created

    def unregister(self, name: str) -> bool:
        request = provider_pb2.UnregisterGpuRequest(name=name)
        answer: provider_pb2.UnregisterGpuResponse = self._call(self._provider.UnregisterGpu, request)
        return answer.deleted

    def _call(self, method: Callable[..., T], request: object) -> T:
        return away(lambda: method(request, timeout=self._call_seconds))


def away(call: Callable[[], T]) -> T:
    """Make a blocking call on a thread of its own and wait for it in an interruptible way."""
    outcome: queue.Queue[tuple[T | None, Exception | None]] = queue.Queue(1)

    def work() -> None:
        try:
            outcome.put((call(), None))
        except Exception as error:
            outcome.put((None, error))

    threading.Thread(target=work, name="device-api-call", daemon=True).start()
    result, error = _take(outcome)
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _take(source: queue.Queue[T]) -> T:
    """Wait in slices: an interrupt that the system gave to another thread is seen at the next one."""
    while True:
        with suppress(queue.Empty):
            return source.get(timeout=WAIT_SLICE_SECONDS)


class GpuWatch:
    """What a watcher knows: the GPUs, and the version it has seen everything up to.

    Pure: it turns lists and stream events into changes and never calls anyone.
    """

    def __init__(self) -> None:
        self.gpus: dict[str, gpu_pb2.Gpu] = {}
        self.version = ""

    def on_list(self, listed: gpu_pb2.GpuList) -> Iterator[GpuChange]:
        """Every difference between what we knew and what is there now."""
        present = {name_of(gpu): gpu for gpu in listed.items}
        self.version = listed.metadata.resource_version
        for name in sorted(self.gpus.keys() - present.keys()):
            yield GpuChange(kind="DELETED", gpu=self.gpus.pop(name))
        for name, gpu in present.items():
            known = self.gpus.get(name)
            self.gpus[name] = gpu
            if known is None:
                yield GpuChange(kind="ADDED", gpu=gpu)
            elif known.resource_version != gpu.resource_version:
                yield GpuChange(kind="MODIFIED", gpu=gpu)

    def on_event(self, event: gpu_pb2.WatchGpusResponse) -> Iterator[GpuChange]:
        gpu, name = event.object, name_of(event.object)
        self.version = str(gpu.resource_version)
        known = self.gpus.get(name)
        if event.type == "DELETED":
            if self.gpus.pop(name, None) is not None:
                yield GpuChange(kind="DELETED", gpu=gpu)
        elif known is None or known.resource_version != gpu.resource_version:
            self.gpus[name] = gpu
            yield GpuChange(kind="ADDED" if known is None else "MODIFIED", gpu=gpu)


def follow(
    client: DeviceClient,
    watch: GpuWatch,
    *,
    seconds: float | None,
    on_gap: Callable[[str, float], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[GpuChange]:
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
