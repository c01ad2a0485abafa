"""The gRPC services of the device API: parse, call, answer.

Reads are answered with bytes that were encoded once per GPU version. The servicers serve
every dialect; which one an answer speaks is chosen per call by request metadata, else by the
listener's setting.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from google.protobuf.empty_pb2 import Empty

from fleetplane.domains.gpus import wire
from fleetplane.domains.gpus.grpc import generations, patches
from fleetplane.domains.gpus.grpc.encodings import Encodings
from fleetplane.domains.gpus.grpc.generations import Generation, ListRange
from fleetplane.domains.gpus.kinds import GPU, SCOPE, Gpu, Replacement
from fleetplane.domains.gpus.provider_settings.delivery import ProviderSettings
from fleetplane.domains.gpus.providers import ProviderLeases
from fleetplane.domains.gpus.registry import Gpus
from fleetplane.domains.gpus.releases import check_provider
from fleetplane.domains.gpus.wire import GpuDialect
from fleetplane.gen.fleetplane.device.v1 import provider_settings_pb2 as settings_pb2
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, provider_pb2
from fleetplane.gen.nvidia.nvsentinel.v1alpha1 import gpu_pb2 as first_pb2
from fleetplane.kernel.errors import AlreadyExists, Compacted, InvalidArgument, NotFound, Unavailable
from fleetplane.kernel.store import Store
from fleetplane.kernel.watch import Audience, EventBatch, Watch
from fleetplane.rpc import CallContext, Framed, ImmediateAnswer, Shared

SETTINGS_SERVICE = settings_pb2.DESCRIPTOR.services_by_name["ProviderSettingsService"]
SNAPSHOT_CHUNK = 64
"""GPUs announced per write at the start of a watch; 64 of about 1 KB fill a large frame."""


class Listeners(Audience):
    """The watches of one dialect, who are all sent the same bytes."""

    def __init__(self, encodings: Encodings, sent: Counter[str]) -> None:
        self._encodings = encodings
        self._sent = sent

    def prepare(self, batch: EventBatch) -> Shared:
        return Shared(self._encodings.events(batch))

    def told(self, batch: EventBatch, sinks: int) -> None:
        for event in batch.events:
            self._sent[event.type] += sinks


class GpuReader:
    """What both generations of the consumer's service have in common."""

    def __init__(self, store: Store, gpus: Gpus) -> None:
        self._store = store
        self._gpus = gpus
        self._encodings = {dialect: Encodings(gpus, dialect) for dialect in GpuDialect}
        self.events_sent: Counter[str] = Counter()
        self._audiences = {
            dialect: Listeners(encodings, self.events_sent) for dialect, encodings in self._encodings.items()
        }
        self._watches: set[Watch] = set()
        self._ordered: tuple[Sequence[Gpu], Sequence[Gpu]] = ((), ())

    @property
    def open_watches(self) -> int:
        return len(self._watches)

    def close(self) -> None:
        """End every watch now; their streams tell the clients to come back later."""
        for watch in list(self._watches):
            watch.close()

    async def get(self, name: str, dialect: GpuDialect) -> Framed:
        gpu = self._gpus.peek(name) or await self._gpus.get(name)
        return self._encodings[dialect].get(gpu)

    def at_once(self, dialect: GpuDialect) -> Mapping[str, ImmediateAnswer]:
        """The short ways to the same answers, for callers who ask for no other dialect."""
        encodings = self._encodings[dialect]
        return {"GetGpu": encodings.get_at_once, "ListGpus": encodings.list_at_once}

    async def list(self, dialect: GpuDialect, page: ListRange | None = None) -> Framed:
        await self._gpus.settled()
        encodings = self._encodings[dialect]
        return encodings.list() if page is None else encodings.page(page)

    def encoded(self, gpu: Gpu, dialect: GpuDialect) -> bytes:
        return self._encodings[dialect].item(gpu)

    def _in_order(self, snapshot: Sequence[Gpu]) -> Sequence[Gpu]:
        """Sorted by version: a client that is cut off in between resumes after the last one it received."""
        if self._ordered[0] is not snapshot:  # the same object until something changes
            self._ordered = (snapshot, sorted(snapshot, key=lambda gpu: gpu.revision))
        return self._ordered[1]

    async def watch(
        self,
        after: int | None,
        dialect: GpuDialect,
        context: CallContext,
        *,
        initial_events: bool = False,
        timeout_seconds: float = 0.0,
    ) -> AsyncIterator[Framed]:
        """Everything that is, then everything that changes; only the latter after a version.

        With `initial_events` it begins with everything, and a bookmark says where that ends.
        """
        await context.send_initial_metadata(())
        encodings, audience = self._encodings[dialect], self._audiences[dialect]
        await self._gpus.settled()
        snapshot: Sequence[Gpu] = ()
        revision = 0 if after is None else await self._resume_from(after)
        if after is None or initial_events:
            revision, snapshot = self._store.snapshot(GPU, SCOPE)
            snapshot = self._in_order(snapshot)
        with self._store.watch(GPU, SCOPE, after=revision) as watch:
            self._watches.add(watch)
            ending = (
                asyncio.get_running_loop().call_later(timeout_seconds, watch.close)
                if timeout_seconds
                else None
            )
            try:
                for start in range(0, len(snapshot), SNAPSHOT_CHUNK):
                    chunk = snapshot[start : start + SNAPSHOT_CHUNK]
                    self.events_sent["ADDED"] += len(chunk)
                    yield Framed.join([encodings.added(gpu) for gpu in chunk])
                if initial_events:
                    yield Framed(wire.initial_events_end(revision))
                watch.push_to(context.push_shared, audience)
                async for batch in watch:
                    audience.told(batch, 1)
                    yield encodings.events(batch)
            finally:
                self._watches.discard(watch)
                if ending is not None:
                    ending.cancel()
        if ending is not None and ending.when() <= asyncio.get_running_loop().time():
            return  # as long as it was to be
        raise Unavailable(f"this server ends its watches; watch again from resource_version {watch.revision}")

    async def _resume_from(self, after: int) -> int:
        # Another server may have shown what this one is about to see.
        if after > self._store.revision and not await self._store.reached(after):
            raise Compacted(
                f"resource_version {after} is in the future; the newest is {self._store.revision}",
                field="opts.resource_version",
            )
        # Nothing of this kind changed since: other kinds' history may well be gone by now.
        return self._store.revision if after >= self._gpus.version else after


class GpuService:
    """`nvidia.device.v1alpha1.GpuService`, in the dialect the caller or the listener asks for."""

    def __init__(self, reader: GpuReader, gpus: Gpus, dialect: GpuDialect) -> None:
        self._reader = reader
        self._gpus = gpus
        self._dialect = dialect
        self.immediate = reader.at_once(dialect)

    def _spoken(self, context: CallContext) -> GpuDialect:
        asked = context.field(wire.DIALECT_FIELD)
        return self._dialect if asked is None else wire.dialect(asked.decode("latin-1"))

    async def GetGpu(self, request: gpu_pb2.GetGpuRequest, context: CallContext) -> Framed:
        return await self._reader.get(wire.gpu_name(request.name), self._spoken(context))

    async def ListGpus(self, request: gpu_pb2.ListGpusRequest, context: CallContext) -> Framed:
        return await self._reader.list(self._spoken(context), generations.page(request.opts))

    async def CreateGpu(self, request: gpu_pb2.CreateGpuRequest, context: CallContext) -> Framed:
        name, asked = wire.asked_gpu(request.gpu)
        gpu, created = await self._gpus.create(
            name, uuid=asked.uuid, report=asked.report, actor=context.principal.name
        )
        return self._framed(gpu, context, b"\x10\x01" if created else b"")

    async def UpdateGpu(self, request: gpu_pb2.UpdateGpuRequest, context: CallContext) -> Framed:
        name, asked = wire.asked_gpu(request.gpu)
        wanted = replace(asked, report=None)
        gpu = await self._gpus.replace(name, wanted, operation="update_spec", actor=context.principal.name)
        return self._framed(gpu, context)

    async def UpdateGpuStatus(self, raw: bytes, context: CallContext) -> Framed:
        request, version = generations.status_request(raw)
        name = wire.gpu_name(request.name)
        wanted = Replacement(version=version, report=wire.required_report(request))
        gpu = await self._gpus.replace(name, wanted, operation="update_status", actor=context.principal.name)
        return self._framed(gpu, context)

    async def DeleteGpu(self, request: gpu_pb2.DeleteGpuRequest, context: CallContext) -> Empty:
        name = wire.gpu_name(request.name)
        if not await self._gpus.unregister(name, actor=context.principal.name):
            raise NotFound("gpu not found", field="name", details={"name": name})
        return Empty()

    def _framed(self, gpu: Gpu, context: CallContext, more: bytes = b"") -> Framed:
        return Framed(wire.encode_get(self._reader.encoded(gpu, self._spoken(context))) + more)

    def WatchGpus(self, request: gpu_pb2.WatchGpusRequest, context: CallContext) -> AsyncIterator[Framed]:
        after = wire.resource_version(request.opts.resource_version)
        return self._reader.watch(after, self._spoken(context), context)


class SentinelGpuService:
    """`nvidia.nvsentinel.v1alpha1.GpuService`, in the generation that the request is of."""

    def __init__(self, reader: GpuReader, gpus: Gpus, generation: Generation) -> None:
        self._reader = reader
        self._gpus = gpus
        self._generation = generation

    async def GetGpu(self, raw: bytes, context: CallContext) -> Framed:
        request = generations.get_request(raw, self._generation, _asked(context))
        return await self._reader.get(request.name, request.dialect)

    async def ListGpus(self, raw: bytes, context: CallContext) -> Framed:
        request = generations.list_request(raw, self._generation, _asked(context))
        if request.elsewhere:
            return Framed(wire.encode_list([], self._gpus.version, request.dialect))
        return await self._reader.list(request.dialect)

    def WatchGpus(self, raw: bytes, context: CallContext) -> AsyncIterator[Framed]:
        request = generations.watch_request(raw, self._generation, _asked(context))
        after = wire.resource_version(request.resource_version)
        return self._reader.watch(
            after,
            request.dialect,
            context,
            initial_events=request.initial_events,
            timeout_seconds=request.timeout_seconds,
        )

    async def CreateGpu(self, raw: bytes, context: CallContext) -> Framed:
        name, asked, dialect = self._written(raw, first_pb2.CreateGpuRequest, context)
        report = (
            None if dialect is GpuDialect.TYPED else asked.report
        )  # which sends an empty one with each GPU
        gpu, created = await self._gpus.create(
            name, uuid=asked.uuid, report=report, actor=context.principal.name
        )
        if not created:
            raise AlreadyExists(f'GPU "{name}" already exists', field="gpu.metadata.name")
        return self._framed(gpu, dialect)

    async def UpdateGpu(self, raw: bytes, context: CallContext) -> Framed:
        name, asked, dialect = self._written(raw, first_pb2.UpdateGpuRequest, context)
        gpu = await self._gpus.replace(
            name, replace(asked, report=None), operation="update_spec", actor=context.principal.name
        )
        return self._framed(gpu, dialect)

    async def UpdateGpuStatus(self, raw: bytes, context: CallContext) -> Framed:
        name, asked, dialect = self._written(raw, first_pb2.UpdateGpuStatusRequest, context)
        if asked.report is None:
            raise InvalidArgument("status is required", field="gpu.status")
        gpu = await self._gpus.replace(name, asked, operation="update_status", actor=context.principal.name)
        return self._framed(gpu, dialect)

    def _written(
        self, raw: bytes, kind: type[generations.WriteT], context: CallContext
    ) -> tuple[str, Replacement, GpuDialect]:
        message, dialect = generations.write_request(raw, kind, self._generation, _asked(context))
        name, asked = wire.asked_gpu(message)
        return name, asked, dialect

    async def PatchGpu(self, request: first_pb2.PatchGpuRequest, context: CallContext) -> Framed:
        name, status = wire.gpu_name(request.name), "status" in request.subresources
        _require_namespace(request.namespace, name)
        gpu = await self._gpus.replace(
            name,
            lambda present: patches.replacement(
                present, request.patch_type, request.data, request.subresources
            ),
            operation="update_status" if status else "update_spec",
            actor=context.principal.name,
        )
        return self._framed(gpu, GpuDialect.TYPED)

    async def DeleteGpu(self, request: first_pb2.DeleteGpuRequest, context: CallContext) -> Empty:
        name, must = wire.gpu_name(request.name), request.opts.preconditions
        _require_namespace(request.namespace, name)
        version = wire.written_version(must.resource_version, "opts.preconditions.resource_version")
        if not await self._gpus.unregister(name, uid=must.uid, version=version, actor=context.principal.name):
            raise NotFound("gpu not found", field="name", details={"name": name})
        return Empty()

    def _framed(self, gpu: Gpu, dialect: GpuDialect) -> Framed:
        return Framed(self._reader.encoded(gpu, dialect))


def _require_namespace(namespace: str, name: str) -> None:
    if namespace not in ("", wire.NAMESPACE):
        raise NotFound("gpu not found", field="namespace", details={"name": name})


def _asked(context: CallContext) -> str | None:
    asked = context.field(wire.DIALECT_FIELD)
    return None if asked is None else asked.decode("latin-1")


class ProviderService:
    """`nvidia.device.v1alpha1.ProviderService`.

    `provider_id` says which of a GPU's conditions belong together; it is no identity. Who
    called is the connection's principal, and that is what the audit log names.
    """

    def __init__(self, gpus: Gpus, providers: ProviderLeases) -> None:
        self._gpus = gpus
        self._providers = providers

    async def RegisterGpu(
        self, request: provider_pb2.RegisterGpuRequest, context: CallContext
    ) -> provider_pb2.RegisterGpuResponse:
        name, provider = wire.gpu_name(request.name), wire.provider_id(request.provider_id)
        report = None
        if request.HasField("initial_status"):
            report = wire.report(request.initial_status, writer=provider, field="initial_status")
        uuid = wire.uuid(request.spec) if request.HasField("spec") else None
        self._providers.heard(provider)
        done = await self._gpus.register(
            name,
            uuid=uuid,
            parent=wire.parent(request.spec),
            report=report,
            provider=provider,
            actor=context.principal.name,
        )
        return provider_pb2.RegisterGpuResponse(created=done.created, resource_version=done.version)

    async def UnregisterGpu(
        self, request: provider_pb2.UnregisterGpuRequest, context: CallContext
    ) -> provider_pb2.UnregisterGpuResponse:
        name, provider = wire.gpu_name(request.name), wire.provider_id(request.provider_id)
        deleted = await self._gpus.unregister(name, provider=provider, actor=context.principal.name)
        return provider_pb2.UnregisterGpuResponse(deleted=deleted)

    async def UpdateGpuStatus(
        self, request: provider_pb2.UpdateGpuStatusRequest, context: CallContext
    ) -> provider_pb2.UpdateGpuStatusResponse:
        name, provider = wire.gpu_name(request.name), wire.provider_id(request.provider_id)
        report = wire.report(request.status, writer=provider) if request.HasField("status") else None
        self._providers.heard(provider)
        version = await self._gpus.set_status(name, report, provider=provider, actor=context.principal.name)
        return provider_pb2.UpdateGpuStatusResponse(resource_version=version)

    async def UpdateGpuCondition(
        self, request: provider_pb2.UpdateGpuConditionRequest, context: CallContext
    ) -> provider_pb2.UpdateGpuConditionResponse:
        name, provider = wire.gpu_name(request.name), wire.provider_id(request.provider_id)
        condition = wire.required_condition(request, writer=provider)
        action = wire.action(request)
        self._providers.heard(provider)
        version = await self._gpus.set_condition(name, condition, actor=context.principal.name, action=action)
        return provider_pb2.UpdateGpuConditionResponse(resource_version=version)

    async def Heartbeat(
        self, request: provider_pb2.HeartbeatRequest, context: CallContext
    ) -> provider_pb2.HeartbeatResponse:
        provider = wire.required_provider_id(request.provider_id)
        names = wire.heartbeat_names(request.gpu_names)
        await self._providers.heartbeat(provider, names, actor=context.principal.name)
        return provider_pb2.HeartbeatResponse(acknowledged=True)


class ProviderSettingsService:
    """`fleetplane.device.v1.ProviderSettingsService`: what our own provider asks about its settings."""

    def __init__(self, settings: ProviderSettings) -> None:
        self._settings = settings

    async def SyncSettings(
        self, request: settings_pb2.SyncSettingsRequest, _context: CallContext
    ) -> settings_pb2.SyncSettingsResponse:
        check_provider(request.provider_id, field="provider_id")
        return await self._settings.heard(request)
