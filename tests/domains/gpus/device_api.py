"""A device API in this process: the real store, the real domain, the real listener."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from fleetplane.domains.blueprint import Kernel, prepare_both, run_both
from fleetplane.domains.gpus.grpc.generations import Generation
from fleetplane.domains.gpus.rules import GpuPolicy
from fleetplane.domains.gpus.server import BLUEPRINT, GpuDomain
from fleetplane.domains.gpus.wire import GpuDialect
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, gpu_pb2_grpc, provider_pb2, provider_pb2_grpc
from fleetplane.gen.nvidia.nvsentinel.v1alpha1 import gpu_pb2_grpc as first_pb2_grpc
from fleetplane.kernel.access import AccessTable, Principal, Role
from fleetplane.kernel.clock import Clock, SystemClock
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.stalls import StallDetector
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.rpc import (
    Authentication,
    CallStatistics,
    FixedPrincipal,
    GrpcApp,
    ListenerSpec,
    MethodTable,
    open_listener,
)

LOCAL = Principal(name="local", roles=frozenset({Role("local")}))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceApi:
    address: str
    domain: GpuDomain
    store: Store
    app: GrpcApp
    channel: grpc.aio.Channel
    consumer: Any
    provider: Any
    first: Any
    attention: StallDetector
    """Does not beat unless a test has it run."""

    async def register(self, name: str, **fields: Any) -> provider_pb2.RegisterGpuResponse:
        answer: provider_pb2.RegisterGpuResponse = await self.provider.RegisterGpu(
            provider_pb2.RegisterGpuRequest(name=name, **fields)
        )
        return answer

    async def set_condition(
        self, name: str, kind: str, status: str, *, provider: str = "", **fields: Any
    ) -> provider_pb2.UpdateGpuConditionResponse:
        condition = gpu_pb2.Condition(type=kind, status=status, **fields)
        answer: provider_pb2.UpdateGpuConditionResponse = await self.provider.UpdateGpuCondition(
            provider_pb2.UpdateGpuConditionRequest(name=name, condition=condition, provider_id=provider)
        )
        return answer

    async def get(self, name: str) -> gpu_pb2.Gpu:
        answer: gpu_pb2.GetGpuResponse = await self.consumer.GetGpu(gpu_pb2.GetGpuRequest(name=name))
        return answer.gpu

    async def list(self) -> gpu_pb2.GpuList:
        answer: gpu_pb2.ListGpusResponse = await self.consumer.ListGpus(gpu_pb2.ListGpusRequest())
        return answer.gpu_list

    def watch(self, after: str = "") -> Any:
        return self.consumer.WatchGpus(
            gpu_pb2.WatchGpusRequest(opts=gpu_pb2.ListOptions(resource_version=after))
        )

    async def heartbeat(self, provider: str, names: Iterable[str] = ()) -> bool:
        request = provider_pb2.HeartbeatRequest(provider_id=provider, gpu_names=names)
        answer: provider_pb2.HeartbeatResponse = await self.provider.Heartbeat(request)
        return answer.acknowledged


@asynccontextmanager
async def device_api(
    folder: Path,
    *,
    policy: GpuPolicy | None = None,
    dialect: GpuDialect = GpuDialect.SUPERSET,
    generation: Generation = Generation.FIRST,
    clock: Clock | None = None,
    settings: dict[str, Any] | None = None,
) -> AsyncIterator[DeviceApi]:
    clock = clock or SystemClock()
    socket = folder / "d.sock"
    store_settings = StoreSettings(path=folder / "state.db", **(settings or {}))
    async with Store.open(store_settings, kinds=(*KERNEL_KINDS, *BLUEPRINT.kinds), clock=clock) as store:
        calls = CallStatistics()
        master = MasterKey(bytes(32), clock)
        authority = await Authority.load_or_create(store, master, clock)
        revocations = Revocations(store, clock)
        kernel = Kernel(
            store=store,
            clock=clock,
            calls=calls,
            master=master,
            authority=authority,
            revocations=revocations,
            operators=await Operators.load(store, master, clock),
            attention=StallDetector(clock),
        )
        domain = GpuDomain(
            kernel, policy or GpuPolicy(), dialect=dialect, version="test", node="here", generation=generation
        )
        await prepare_both(domain)
        app = GrpcApp(
            listener="device-api",
            table=MethodTable(BLUEPRINT.methods),
            access=AccessTable(BLUEPRINT.grants),
            authenticators={
                Authentication.LOCAL: FixedPrincipal(LOCAL),
                **domain.authenticators["device-api"],
            },
            clock=clock,
            statistics=calls,
        )
        for service in domain.services:
            app.add_service(service.descriptor, service.servicer, raw_requests=service.raw_requests)
        app.seal()
        spec = ListenerSpec(name="device-api", addresses=(f"unix://{socket}",), app=app)
        async with open_listener(spec, grace_seconds=2), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(run_both(domain))
            async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
                yield DeviceApi(
                    address=f"unix:{socket}",
                    domain=domain,
                    store=store,
                    app=app,
                    channel=channel,
                    consumer=gpu_pb2_grpc.GpuServiceStub(channel),
                    provider=provider_pb2_grpc.ProviderServiceStub(channel),
                    first=first_pb2_grpc.GpuServiceStub(channel),
                    attention=kernel.attention,
                )
                domain.drain()
                await app.drain(2)
            running.cancel()


async def take(stream: Any, count: int, *, seconds: float = 60) -> list[gpu_pb2.WatchGpusResponse]:
    """The next events of a watch."""
    async with asyncio.timeout(seconds):
        return [await stream.read() for _ in range(count)]


def told(events: Iterable[gpu_pb2.WatchGpusResponse]) -> list[tuple[str, str, int]]:
    """What a watch said, in short."""
    return [(event.type, event.object.name, event.object.resource_version) for event in events]
