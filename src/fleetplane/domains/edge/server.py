"""The edge domain: its kinds, methods, services, routes and controllers, in one place."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

from prometheus_client.registry import Collector

from fleetplane.domains.blueprint import Blueprint, Kernel, ServerContext, Service
from fleetplane.domains.edge import access, releases
from fleetplane.domains.edge.desired import DESIRED, WRITERS
from fleetplane.domains.edge.explain import DaemonExplainer, WorkerExplainer
from fleetplane.domains.edge.grpc.relay import Relay
from fleetplane.domains.edge.identity import assembly as identity_side
from fleetplane.domains.edge.identity.assembly import IdentitySide
from fleetplane.domains.edge.identity.challenges import SWEEP_SECONDS as CHALLENGES_SWEEP_SECONDS
from fleetplane.domains.edge.identity.challenges import SharedChallenges
from fleetplane.domains.edge.identity.policy import IdentityPolicy
from fleetplane.domains.edge.metrics import EdgeCollector
from fleetplane.domains.edge.nodes.config_layers import CONFIG_LAYER, ConfigLayers
from fleetplane.domains.edge.nodes.groups import EDGE_GROUP, EdgeGroups
from fleetplane.domains.edge.releases import AUDIENCE, DaemonRegister
from fleetplane.domains.edge.resources import RESOURCES
from fleetplane.domains.edge.rest.assembly import EdgeRest
from fleetplane.domains.edge.rollout import LayerConfiguration
from fleetplane.domains.edge.runs.channel import EDGE_RUN, EdgeChannel, EdgeRuns, NodesOf
from fleetplane.domains.edge.settings import EdgeSettings
from fleetplane.domains.edge.streams.assembly import StreamOptions, StreamSide
from fleetplane.domains.edge.wire.messages import CommandProgress
from fleetplane.fleet.explain import ExplainedKind, Explainer, TokenReaders
from fleetplane.fleet.figures import FigureKeeper
from fleetplane.fleet.figures_service import SERVICE as FIGURES
from fleetplane.fleet.figures_service import FigureService
from fleetplane.fleet.freeze import Freezable
from fleetplane.fleet.plans.records import with_writing
from fleetplane.fleet.rollouts.records import KINDS as ROLLOUT_KINDS
from fleetplane.fleet.runs.runs import Runs
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.commands import COMMAND, COMMAND_TARGET
from fleetplane.kernel.sessions import SessionCollector
from fleetplane.rpc import Authentication, Authenticator
from fleetplane.web.documents import Documents, WebDocument
from fleetplane.web.ops import Mount

SWEEP_SECONDS = 3600.0
CA_PATH = "/v1/edge/ca.pem"
"""By which daemons know a listener with TLS of our own."""

BLUEPRINT = Blueprint(
    name="edge",
    keeps_telemetry=True,
    kinds=(*identity_side.KINDS, CONFIG_LAYER, EDGE_GROUP, EDGE_RUN, COMMAND, COMMAND_TARGET, *ROLLOUT_KINDS),
    methods=(*identity_side.METHODS, *releases.ROWS),
    grants=identity_side.GRANTS,
    operator_roles=access.ROLES,
    explain={
        "daemon": ExplainedKind(
            summary="why a daemon is not connected or healthy, or has not its configuration",
            permission=access.HOSTS_READ,
            explainer=lambda domain: domain.explainers["daemon"],
        ),
        "worker": ExplainedKind(
            summary="why a worker is not healthy",
            permission=access.CLUSTER,
            explainer=lambda domain: domain.explainers["worker"],
        ),
    },
    readers=lambda domain: domain.readers,
    resources=with_writing((*RESOURCES, *DESIRED), WRITERS),
    releases=AUDIENCE,
    freeze=Freezable(
        stops="sending configuration, and telling daemons and workers to drain or stop; runs go on",
        scopes=("tenant/{tenant}", "tenant/{tenant}/daemon/{daemon}", "worker/{worker}"),
    ),
    rollouts=lambda domain: (domain.configuration,),
)


async def build(settings: EdgeSettings, context: ServerContext, kernel: Kernel) -> EdgeDomain:
    return await EdgeDomain.create(kernel, settings, version=context.version)


class DaemonEndpoint:
    """Where daemons dial in, which is known once the server listens."""

    def __init__(self, configured: str) -> None:
        self._configured = configured
        self.opened = ""

    def __call__(self) -> str:
        return self._configured or self.opened


class EdgeDomain:
    """See `create`; the constructor takes what has been loaded."""

    def __init__(
        self,
        kernel: Kernel,
        settings: EdgeSettings,
        *,
        identity: IdentitySide,
        endpoint: DaemonEndpoint,
        layers: ConfigLayers,
        version: str,
    ) -> None:
        store, clock = kernel.store, kernel.clock
        self._clock = clock
        self._authority = kernel.authority
        self._endpoint = endpoint
        self._relay = Relay.load(settings) if settings.relay_coordinator_endpoint else None
        self.identity = identity
        identity.workers.attention = kernel.attention
        self.streams = StreamSide(
            store,
            clock,
            tokens=identity.tokens,
            key=identity.key,
            revocations=kernel.revocations,
            layers=layers,
            options=StreamOptions.of(settings),
            attention=kernel.attention,
        )
        self.configuration = LayerConfiguration(
            store,
            layers,
            presences=self.streams.presences,
            whereabouts=self.streams.whereabouts,
            pushes=self.streams.pushes,
            controller=self.streams.controller,
            ledger=self.streams.dispatcher.ledger,
            clock=clock,
        )
        store.add_hook(self.configuration.commit_hook, CONFIG_LAYER)
        self.groups = EdgeGroups(store, clock)
        dispatcher, presences = self.streams.dispatcher, self.streams.presences
        channel = EdgeChannel(
            ledger=dispatcher.ledger,
            groups=self.groups,
            check=dispatcher.check,
            nodes=NodesOf(
                list=identity.nodes.list, get=identity.nodes.get, is_connected=self.streams.is_connected
            ),
        )
        self.runs = Runs(store, clock, channel)
        dispatcher.watch(_onlooker(self.runs))
        self.rest = EdgeRest(
            kernel,
            door=kernel.door,
            nodes=identity.nodes,
            enrollments=identity.enrollments,
            groups=self.groups,
            layers=layers,
            runs=self.runs,
            workers=identity.workers,
            worker_admission=identity.worker_admission,
            relay=self._relay,
            heard_at_ns=self.streams.heard_at_ns,
            shipped_shapes=settings.shipped_shapes,
            deadline_seconds=settings.deadline_seconds,
            version=version,
        )
        self.readers = TokenReaders(kernel.door, access.GRANTS)
        self.explainers: Mapping[str, Explainer] = {
            "daemon": DaemonExplainer(store, presences, layers, clock, whereabouts=self.streams.whereabouts),
            "worker": WorkerExplainer(store, identity.workers, clock),
        }
        self.figures = FigureKeeper(
            kernel.telemetry, clock, prefix=releases.PREFIX, measures=releases.MEASURES
        )
        intake = releases.DaemonFigures(DaemonRegister(store, identity.tokens), self.figures)
        self.services: Sequence[Service] = (
            identity.service(self.streams.streams, self._relay),
            Service(
                listener=identity_side.LISTENER,
                descriptor=FIGURES,
                servicer=FigureService(intake),
            ),
        )
        self.authenticators: Mapping[str, Mapping[Authentication, Authenticator]] = identity.authenticators
        self.server_names: Sequence[str] = tuple(settings.own_names())
        self.collectors: Sequence[Collector] = (
            *self.rest.collectors,
            SessionCollector(self.streams.sessions, domain="edge"),
            EdgeCollector(store, streams=self.streams, runs=self.runs, tallies=channel.tallies),
        )
        self.notices: Sequence[str] = ()

    def __repr__(self) -> str:
        return f"<EdgeDomain {self.streams!r}>"

    @classmethod
    async def create(cls, kernel: Kernel, settings: EdgeSettings, *, version: str) -> EdgeDomain:
        layers, endpoint = ConfigLayers(kernel.store), DaemonEndpoint(settings.public_endpoint)
        identity = await IdentitySide.load(
            kernel.store,
            kernel.master,
            kernel.clock,
            revocations=kernel.revocations,
            door=kernel.door,
            layers=layers,
            policy=IdentityPolicy.of(settings),
            issuer=settings.issuer,
            endpoint=endpoint,
        )
        return cls(kernel, settings, identity=identity, endpoint=endpoint, layers=layers, version=version)

    @property
    def routes(self) -> Sequence[Mount]:
        trust = WebDocument(content_type="application/x-pem-file", content=lambda: self._authority.trust_pem)
        return (*self.rest.routes, Mount(path=CA_PATH, app=Documents({CA_PATH: trust})))

    async def prepare_here(self) -> None:
        await self.streams.prepare_here()
        await self.runs.prepare_here()

    async def take_over(self) -> None:
        await self.rest.take_over()
        await self.streams.take_over()
        await self.runs.take_over()

    def opened(self, addresses: Mapping[str, Sequence[str]]) -> None:
        ours = addresses.get(identity_side.LISTENER, ())
        self._endpoint.opened = ours[0] if ours else ""

    async def run_here(self) -> None:
        """Streams, and what is sent on them."""
        async with self._relayed(), Boundary() as tasks:
            tasks.keep("edge/streams", self.streams.run_here)
            tasks.keep("edge/workers", self.identity.workers.heard.run_here)
            tasks.keep("edge/runs", self.runs.run_here)

    async def run_active(self) -> None:
        """Sweeps and deadlines."""
        async with Boundary() as tasks:
            tasks.keep("edge/streams", self.streams.run_active)
            tasks.keep("edge/runs", self.runs.run_active)
            tasks.keep("edge/rest", self.rest.run_active)
            tasks.keep("edge/sweep", self._sweep)
            if self.identity.challenges is not None:
                tasks.keep("edge/challenges", partial(self._sweep_challenges, self.identity.challenges))

    @asynccontextmanager
    async def _relayed(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            if self._relay is not None:
                await self._relay.close()

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            await self.identity.sweep()

    async def _sweep_challenges(self, challenges: SharedChallenges) -> None:
        while True:
            await self._clock.sleep(CHALLENGES_SWEEP_SECONDS)
            await challenges.sweep()

    def drain(self) -> None:
        self.streams.drain()


def _onlooker(runs: EdgeRuns) -> Callable[[str, str, CommandProgress], None]:
    def tell(node_id: str, command: str, progress: CommandProgress) -> None:
        data = progress.data
        if progress.status is not None:
            data = f"{progress.status.state} {progress.status.message}".strip().encode()
        runs.progressed(node_id, command, progress.stream, data)

    return tell
