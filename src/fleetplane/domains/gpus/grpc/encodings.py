"""One encoded copy per GPU version, shared by every reader and watcher of a dialect."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from fleetplane.domains.gpus import wire
from fleetplane.domains.gpus.grpc.generations import ListRange, continue_token
from fleetplane.domains.gpus.kinds import Gpu
from fleetplane.domains.gpus.registry import Gpus
from fleetplane.domains.gpus.wire import GpuDialect
from fleetplane.kernel.watch import Event, EventBatch
from fleetplane.rpc import Framed

SPARE_ENTRIES = 64
"""Encodings of deleted GPUs kept before the cache is swept; keeps sweeps rare."""
REQUESTS_KNOWN = 2048
"""Requests whose name is known by their bytes; twice as many as a large node has GPUs."""
REQUEST_BYTES_KNOWN = 1024
"""Larger ones are read anew each time; the longest name takes half of it. So under 4 MB in all."""


class Encodings:
    """The answers of one dialect, kept as the bytes that go out."""

    def __init__(self, gpus: Gpus, dialect: GpuDialect) -> None:
        self._gpus = gpus
        self._dialect = dialect
        self._items: dict[str, tuple[int, bytes]] = {}
        self._gets: dict[str, tuple[int, Framed]] = {}
        self._names: dict[bytes, str] = {}
        self._list: tuple[int, Framed] | None = None

    def __repr__(self) -> str:
        return f"<Encodings {self._dialect} gpus={len(self._items)}>"

    def item(self, gpu: Gpu) -> bytes:
        kept = self._items.get(gpu.name)
        if kept is not None and kept[0] == gpu.revision:
            return kept[1]
        self._sweep()
        encoded = wire.encode_gpu(gpu, self._dialect)
        self._items[gpu.name] = (gpu.revision, encoded)
        return encoded

    def get(self, gpu: Gpu) -> Framed:
        kept = self._gets.get(gpu.name)
        if kept is not None and kept[0] == gpu.revision:
            return kept[1]
        framed = Framed(wire.encode_get(self.item(gpu)))
        self._gets[gpu.name] = (gpu.revision, framed)
        return framed

    def get_at_once(self, request: bytes, fields: Mapping[bytes, bytes]) -> Framed | None:
        """The answer to a request for one GPU by its bytes alone, if it lies ready.

        None for everything else: a change being written, a wrong request, a wish for another
        dialect. Requests for GPUs that exist are few and each comes many times, so the name
        in one is read once.
        """
        name = self._names.get(request)
        if name is None:
            name = self._name_in(request)
        gpu, kept = self._gpus.peek(name), self._gets.get(name)
        if gpu is None or kept is None or kept[0] != gpu.revision or wire.DIALECT_FIELD in fields:
            return None
        return kept[1]

    def _name_in(self, request: bytes) -> str:
        name = wire.requested_name(request)
        if name in self._gets and len(request) <= REQUEST_BYTES_KNOWN:
            if len(self._names) >= REQUESTS_KNOWN:
                self._names.clear()
            self._names[request] = name
        return name

    def list(self) -> Framed:
        version = self._gpus.version
        if self._list is None or self._list[0] != version:
            items = [self.item(gpu) for gpu in self._gpus.all()]
            self._list = (version, Framed(wire.encode_list(items, version, self._dialect)))
        return self._list[1]

    def page(self, wanted: ListRange) -> Framed:
        """Part of the list. Every page tells the version of the first: a watch from there misses nothing."""
        gpus = self._gpus.all()
        version = self._gpus.version if wanted.version is None else wanted.version
        start = bisect_right(gpus, wanted.after, key=lambda gpu: gpu.name) if wanted.after else 0
        part = gpus[start : start + wanted.limit]
        more = ""
        if start + wanted.limit < len(gpus):
            more = continue_token(version, part[-1].name)
        items = [self.item(gpu) for gpu in part]
        return Framed(wire.encode_list(items, version, self._dialect, more=more))

    def list_at_once(self, request: bytes, fields: Mapping[bytes, bytes]) -> Framed | None:
        """The answer to a request for all GPUs that says nothing more, if nothing is being written."""
        if request or wire.DIALECT_FIELD in fields or not self._gpus.is_settled:
            return None
        return self.list()

    def added(self, gpu: Gpu) -> Framed:
        """The event that announces a present GPU at the start of a watch."""
        return Framed(wire.encode_event("ADDED", self.item(gpu)))

    def event(self, event: Event) -> Framed:
        framed = event.memo.get(self._dialect)
        if framed is None:
            gpu = event.resource
            # A deleted GPU's encoding is of no use to a later reader.
            body = wire.encode_gpu(gpu, self._dialect) if event.type == "DELETED" else self.item(gpu)
            framed = event.memo[self._dialect] = Framed(wire.encode_event(event.type, body))
        assert isinstance(framed, Framed)
        return framed

    def events(self, batch: EventBatch) -> Framed:
        """All events of a batch; watchers at the same place are given the same one."""
        framed = batch.memo.get(self._dialect)
        if framed is None:
            framed = Framed.join([self.event(event) for event in batch.events])
            batch.memo[self._dialect] = framed
        assert isinstance(framed, Framed)
        return framed

    def _sweep(self) -> None:
        """Drop everything once too much of it is of GPUs that are gone; it is cheap to make again."""
        if len(self._items) > self._gpus.count + SPARE_ENTRIES:
            self._items.clear()
            self._gets.clear()
