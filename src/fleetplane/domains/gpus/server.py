"""The GPU domain: its kinds, methods, services and controllers, in one place."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from prometheus_client.registry import Collector

from fleetplane.domains.blueprint import Blueprint, Kernel, ServerContext, Service
from fleetplane.domains.gpus import releases, rules
from fleetplane.domains.gpus.domain import OPERATOR_PROVIDER
from fleetplane.domains.gpus.explain import GpuExplainer, ProviderExplainer
from fleetplane.domains.gpus.grpc.device_api import (
    SETTINGS_SERVICE,
    GpuReader,
    GpuService,
    ProviderService,
    ProviderSettingsService,
    SentinelGpuService,
)
from fleetplane.domains.gpus.grpc.generations import Generation
from fleetplane.domains.gpus.kinds import GPU, Gpu
from fleetplane.domains.gpus.leases import PROVIDER_LEASE
from fleetplane.domains.gpus.metrics import GpuCollector
from fleetplane.domains.gpus.provider_settings.delivery import KINDS as SETTINGS_KINDS
from fleetplane.domains.gpus.provider_settings.delivery import (
    PROVIDER_SETTINGS,
    ProviderSettings,
    SettingsApplied,
)
from fleetplane.domains.gpus.provider_settings.resources import OPERATE, SETTINGS, SETTINGS_WRITERS
from fleetplane.domains.gpus.providers import ProviderLease, Providers
from fleetplane.domains.gpus.registry import SERVER, Gpus
from fleetplane.domains.gpus.releases import AUDIENCE
from fleetplane.domains.gpus.resources import READ, RESOURCES
from fleetplane.domains.gpus.rollout import ProviderSettingsSubject
from fleetplane.domains.gpus.rules import GpuPolicy
from fleetplane.domains.gpus.settings import DeviceApiSettings, GpuSettings
from fleetplane.domains.gpus.shared_providers import CHANNEL, SharedProviders
from fleetplane.domains.gpus.wire import GpuDialect
from fleetplane.fleet.explain import ExplainedKind, Explainer, TokenReaders
from fleetplane.fleet.figures import FigureKeeper
from fleetplane.fleet.figures_service import SERVICE as FIGURES
from fleetplane.fleet.figures_service import FigureService
from fleetplane.fleet.freeze import Freezable
from fleetplane.fleet.plans.records import with_writing
from fleetplane.fleet.rollouts.records import KINDS as ROLLOUT_KINDS
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, provider_pb2
from fleetplane.gen.nvidia.nvsentinel.v1alpha1 import gpu_pb2 as first_pb2
from fleetplane.kernel.access import Grant, Permission, Principal, Role, built_in_grants
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.errors import PermissionDenied
from fleetplane.kernel.presence.last_seen import LastSeen
from fleetplane.rpc import Authentication, Authenticator, Connection, MethodRow, Needs, service_rows
from fleetplane.web.ops import Mount

LISTENER = "device-api"
WRITERS_PAGE = "docs/gpus.md#a-client-written-from-the-reference"
WRITE = Permission("gpus.write")
LOCAL = Role("local")
"""The role of every caller at the node's socket or loopback port: consumers and providers alike."""
VIEWER = Role("gpus.viewer")
OPERATOR = Role("gpus.operator")
READER_GRANTS = {
    VIEWER: (Grant(permission=READ),),
    OPERATOR: (Grant(permission=READ), Grant(permission=OPERATE)),
    **built_in_grants(viewer=(READ,), operator=(OPERATE,)),
}
"""Who may ask over REST, with a token, why a GPU is not healthy, and write settings of providers."""

_CONSUMER = gpu_pb2.DESCRIPTOR.services_by_name["GpuService"]
_PROVIDER = provider_pb2.DESCRIPTOR.services_by_name["ProviderService"]
_FIRST = first_pb2.DESCRIPTOR.services_by_name["GpuService"]

BLUEPRINT = Blueprint(
    name="gpus",
    kinds=(GPU, PROVIDER_LEASE, *SETTINGS_KINDS, *ROLLOUT_KINDS),
    keeps_telemetry=True,
    methods=(
        *service_rows(
            SETTINGS_SERVICE,
            WRITE,
            listener=LISTENER,
            authentication=Authentication.SOCKET,
            needs=Needs.WRITES,
        ),
        *(
            MethodRow(
                path=f"/{package}.{method}",
                listener=LISTENER,
                authentication=Authentication.LOCAL if needed is READ else Authentication.SOCKET,
                permission=needed,
                needs=Needs.STORE if needed is READ else Needs.WRITES,
            )
            for package, method, needed in (
                ("nvidia.device.v1alpha1", "GpuService/GetGpu", READ),
                ("nvidia.device.v1alpha1", "GpuService/ListGpus", READ),
                ("nvidia.device.v1alpha1", "GpuService/WatchGpus", READ),
                ("nvidia.device.v1alpha1", "GpuService/CreateGpu", WRITE),
                ("nvidia.device.v1alpha1", "GpuService/UpdateGpu", WRITE),
                ("nvidia.device.v1alpha1", "GpuService/UpdateGpuStatus", WRITE),
                ("nvidia.device.v1alpha1", "GpuService/DeleteGpu", WRITE),
                ("nvidia.device.v1alpha1", "ProviderService/RegisterGpu", WRITE),
                ("nvidia.device.v1alpha1", "ProviderService/UnregisterGpu", WRITE),
                ("nvidia.device.v1alpha1", "ProviderService/UpdateGpuStatus", WRITE),
                ("nvidia.device.v1alpha1", "ProviderService/UpdateGpuCondition", WRITE),
                ("nvidia.device.v1alpha1", "ProviderService/Heartbeat", WRITE),
                ("nvidia.nvsentinel.v1alpha1", "GpuService/GetGpu", READ),
                ("nvidia.nvsentinel.v1alpha1", "GpuService/ListGpus", READ),
                ("nvidia.nvsentinel.v1alpha1", "GpuService/WatchGpus", READ),
                ("nvidia.nvsentinel.v1alpha1", "GpuService/CreateGpu", WRITE),
                ("nvidia.nvsentinel.v1alpha1", "GpuService/UpdateGpu", WRITE),
                ("nvidia.nvsentinel.v1alpha1", "GpuService/UpdateGpuStatus", WRITE),
                ("nvidia.nvsentinel.v1alpha1", "GpuService/DeleteGpu", WRITE),
                ("nvidia.nvsentinel.v1alpha1", "GpuService/PatchGpu", WRITE),
            )
        ),
        *releases.ROWS,
    ),
    grants={LOCAL: (Grant(permission=READ), Grant(permission=WRITE)), **READER_GRANTS},
    operator_roles=tuple(READER_GRANTS),
    explain={
        "gpu": ExplainedKind(
            summary="why a GPU is not healthy",
            permission=READ,
            explainer=lambda domain: domain.explainers["gpu"],
        ),
        "provider": ExplainedKind(
            summary="why a provider is not heard",
            permission=READ,
            explainer=lambda domain: domain.explainers["provider"],
        ),
    },
    readers=lambda domain: domain.readers,
    resources=with_writing((*RESOURCES, SETTINGS), SETTINGS_WRITERS),
    rollouts=lambda domain: (domain.settings_subject,),
    releases=AUDIENCE,
    freeze=Freezable(stops="rollouts of providers' settings", scopes=("gpus",)),
)


async def build(wanted: GpuSettings, context: ServerContext, kernel: Kernel) -> GpuDomain:
    listener = context.listener(LISTENER, DeviceApiSettings)
    return GpuDomain(
        kernel,
        wanted.policy(),
        dialect=listener.dialect,
        tcp_writes=listener.tcp_writes,
        generation=listener.nvsentinel_generation,
        version=context.version,
        node=wanted.node or socket.gethostname(),
    )


class Writers:
    """Admits writes through the Unix socket only, whose file mode its owner chose."""

    def __init__(self, *, tcp_writes: bool) -> None:
        self._tcp_writes = tcp_writes
        self._local = Principal(name="local", roles=frozenset({LOCAL}))

    def __call__(self, connection: Connection) -> Principal:
        if self._tcp_writes or connection.transport == "unix":
            return self._local
        raise PermissionDenied(
            "this address is for reading: any user of this machine can reach it",
            hint="write through the Unix socket, or set listeners.device-api.tcp_writes = true; see"
            f" {WRITERS_PAGE}",
        )


class GpuDomain:
    def __init__(
        self,
        kernel: Kernel,
        policy: GpuPolicy,
        *,
        dialect: GpuDialect,
        version: str,
        node: str,
        tcp_writes: bool = False,
        generation: Generation = Generation.AUTO,
    ) -> None:
        self.authenticators: Mapping[str, Mapping[Authentication, Authenticator]] = {
            LISTENER: {Authentication.SOCKET: Writers(tcp_writes=tcp_writes)}
        }
        self._store = kernel.store
        self._gpus = Gpus(kernel.store, policy)
        self._shared: SharedProviders | None = None
        self._providers: Providers | SharedProviders
        if kernel.store.shared:
            heard = LastSeen(kernel.store, kernel.clock, channel=CHANNEL)
            self._shared = SharedProviders(kernel.store, self._gpus, policy, kernel.clock, heard)
            self._providers = self._shared
        else:
            self._providers = Providers(self._gpus, policy, kernel.clock, kernel.attention)
        self.settings = ProviderSettings(kernel.store, kernel.clock, self._providers, policy)
        self.settings_subject = ProviderSettingsSubject(kernel.store, kernel.clock, self.settings)
        kernel.store.add_hook(self.settings.commit_hook, PROVIDER_SETTINGS)
        self._reader = GpuReader(kernel.store, self._gpus)
        self.readers = TokenReaders(kernel.door, READER_GRANTS)
        self.explainers: Mapping[str, Explainer] = {
            "gpu": GpuExplainer(kernel.store, self._providers, kernel.clock),
            "provider": ProviderExplainer(kernel.store, self._providers, kernel.clock),
        }
        self._clock = kernel.clock
        self.figures = FigureKeeper(
            kernel.telemetry, kernel.clock, prefix=releases.PREFIX, measures=releases.MEASURES
        )
        self.provider_figures = FigureKeeper(
            kernel.telemetry,
            kernel.clock,
            prefix=releases.PROVIDERS_PREFIX,
            measures=releases.PROVIDER_MEASURES,
        )
        self.services: Sequence[Service] = (
            Service(
                listener=LISTENER,
                descriptor=_CONSUMER,
                raw_requests=("UpdateGpuStatus",),
                servicer=GpuService(self._reader, self._gpus, dialect),
            ),
            Service(
                listener=LISTENER,
                descriptor=_FIRST,
                raw_requests=("GetGpu", "ListGpus", "WatchGpus", "CreateGpu", "UpdateGpu", "UpdateGpuStatus"),
                servicer=SentinelGpuService(self._reader, self._gpus, generation),
            ),
            Service(
                listener=LISTENER, descriptor=_PROVIDER, servicer=ProviderService(self._gpus, self._providers)
            ),
            Service(
                listener=LISTENER,
                descriptor=SETTINGS_SERVICE,
                servicer=ProviderSettingsService(self.settings),
            ),
            Service(
                listener=LISTENER,
                descriptor=FIGURES,
                servicer=FigureService(releases.GpuFigures(kernel.store, self.figures)),
            ),
        )
        self.collectors: Sequence[Collector] = (
            GpuCollector(
                store=kernel.store,
                gpus=self._gpus,
                reader=self._reader,
                providers=self._providers,
                calls=kernel.calls,
                version=version,
                node=node,
            ),
        )

    def leases(self) -> Iterator[tuple[ProviderLease, bool]]:
        """Every provider's lease, and whether its holder is alive."""
        return self._providers.leases()

    def stored_gpus(self) -> Sequence[Gpu]:
        return self._store.list(GPU)

    def applied_settings(self) -> Mapping[str, SettingsApplied]:
        """What providers have of their settings, by their ids."""
        return self.settings.applied()

    server_names: Sequence[str] = ()
    routes: Sequence[Mount] = ()
    notices: Sequence[str] = ()

    def opened(self, addresses: Mapping[str, Sequence[str]]) -> None:
        """GPUs need not know where they are found."""

    async def prepare_here(self) -> None:
        """Providers need nothing loaded."""

    async def take_over(self) -> None:
        """What was stored may have stopped being true while nobody was watching.

        A server that follows another one has watched, and so may others: their callers were heard.
        """
        if self._shared is not None:
            self._shared.take_over()
        if self._store.succeeds:
            return
        if self._shared is not None:
            await self._shared.forget()
        await self._gpus.silence(None, message=rules.NOT_HEARD_SINCE_START)
        await self._gpus.provider_heard(OPERATOR_PROVIDER, (), actor=SERVER)  # older releases put it aside

    async def run_here(self) -> None:
        if self._shared is not None:
            await self._shared.run_here()

    async def run_active(self) -> None:
        async with Boundary() as tasks:
            if isinstance(self._providers, Providers):
                tasks.keep("gpus/providers", self._providers.watch_over)
            tasks.keep("gpus/figures", self._look)

    async def _look(self) -> NoReturn:
        """Keep over time how GPUs are, whoever reports them."""
        while True:
            releases.look(self._store.list(GPU), self.figures, self.provider_figures)
            await self._clock.sleep(releases.LOOK_SECONDS)

    def drain(self) -> None:
        self._reader.close()
