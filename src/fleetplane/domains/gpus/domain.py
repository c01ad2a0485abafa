"""The GPU domain: its kinds, methods, services and controllers, in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client.registry import Collector

from fleetplane.domains.blueprint import Blueprint, Kernel, Service
from fleetplane.domains.gpus import rules
from fleetplane.domains.gpus.kinds import GPU
from fleetplane.domains.gpus.metrics import GpuCollector
from fleetplane.domains.gpus.providers import Providers
from fleetplane.domains.gpus.registry import Gpus
from fleetplane.domains.gpus.rules import GpuPolicy
from fleetplane.domains.gpus.service import FirstGpuService, GpuReader, GpuService, ProviderService
from fleetplane.domains.gpus.wire import Dialect
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, provider_pb2
from fleetplane.gen.nvidia.nvsentinel.v1alpha1 import gpu_pb2 as first_pb2
from fleetplane.kernel.access import Grant, Permission, Role
from fleetplane.rpc import Authentication, Authenticator, MethodRow
from fleetplane.web.ops import Mount

LISTENER = "device-api"
READ = Permission("gpus.read")
WRITE = Permission("gpus.write")
LOCAL = Role("local")
"""Whoever can reach the node's socket or loopback port: consumers and providers alike."""

_CONSUMER = gpu_pb2.DESCRIPTOR.services_by_name["GpuService"]
_PROVIDER = provider_pb2.DESCRIPTOR.services_by_name["ProviderService"]
_FIRST = first_pb2.DESCRIPTOR.services_by_name["GpuService"]

BLUEPRINT = Blueprint(
    name="gpus",
    kinds=(GPU,),
    methods=tuple(
        MethodRow(
            path=f"/{package}.{method}",
            listener=LISTENER,
            authentication=Authentication.LOCAL,
            permission=needed,
        )
        for package, method, needed in (
            ("nvidia.device.v1alpha1", "GpuService/GetGpu", READ),
            ("nvidia.device.v1alpha1", "GpuService/ListGpus", READ),
            ("nvidia.device.v1alpha1", "GpuService/WatchGpus", READ),
            ("nvidia.device.v1alpha1", "ProviderService/RegisterGpu", WRITE),
            ("nvidia.device.v1alpha1", "ProviderService/UnregisterGpu", WRITE),
            ("nvidia.device.v1alpha1", "ProviderService/UpdateGpuStatus", WRITE),
            ("nvidia.device.v1alpha1", "ProviderService/UpdateGpuCondition", WRITE),
            ("nvidia.device.v1alpha1", "ProviderService/Heartbeat", WRITE),
            ("nvidia.nvsentinel.v1alpha1", "GpuService/GetGpu", READ),
            ("nvidia.nvsentinel.v1alpha1", "GpuService/ListGpus", READ),
            ("nvidia.nvsentinel.v1alpha1", "GpuService/WatchGpus", READ),
        )
    ),
    grants={LOCAL: (Grant(permission=READ), Grant(permission=WRITE))},
)


class GpuDomain:
    def __init__(
        self, kernel: Kernel, policy: GpuPolicy, *, dialect: Dialect, version: str, node: str
    ) -> None:
        self._gpus = Gpus(kernel.store, policy)
        self._providers = Providers(self._gpus, policy, kernel.clock)
        self._reader = GpuReader(kernel.store, self._gpus)
        self.services: Sequence[Service] = (
            Service(listener=LISTENER, descriptor=_CONSUMER, servicer=GpuService(self._reader, dialect)),
            Service(listener=LISTENER, descriptor=_FIRST, servicer=FirstGpuService(self._reader)),
            Service(
                listener=LISTENER, descriptor=_PROVIDER, servicer=ProviderService(self._gpus, self._providers)
            ),
        )
        self.collectors: Sequence[Collector] = (
            GpuCollector(
                store=kernel.store, gpus=self._gpus, reader=self._reader, providers=self._providers,
                calls=kernel.calls, version=version, node=node,
            ),
        )  # fmt: skip

    server_names: Sequence[str] = ()
    routes: Sequence[Mount] = ()
    notices: Sequence[str] = ()
    authenticators: Mapping[str, Mapping[Authentication, Authenticator]] = {}

    def opened(self, addresses: Mapping[str, Sequence[str]]) -> None:
        """GPUs need not know where they are found."""

    async def prepare(self) -> None:
        """What was stored may have stopped being true while nobody was watching."""
        await self._gpus.silence(None, message=rules.NOT_HEARD_SINCE_START)

    async def run(self) -> None:
        await self._providers.watch_over()

    def drain(self) -> None:
        self._reader.close()
