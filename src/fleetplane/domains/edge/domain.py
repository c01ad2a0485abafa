"""The edge domain: its kinds, methods, services, routes and controllers, in one place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from prometheus_client.registry import Collector

from fleetplane.domains.blueprint import Blueprint, Kernel, Service
from fleetplane.domains.edge import access, identity_side
from fleetplane.domains.edge.config_layers import CONFIG_LAYER, ConfigLayers
from fleetplane.domains.edge.fleet import FleetRuns, NodesOf
from fleetplane.domains.edge.groups import EDGE_GROUP, Groups
from fleetplane.domains.edge.identity_policy import IdentityPolicy
from fleetplane.domains.edge.identity_side import IdentitySide
from fleetplane.domains.edge.metrics import EdgeCollector
from fleetplane.domains.edge.rest_side import RestSide
from fleetplane.domains.edge.runs import EDGE_RUN
from fleetplane.domains.edge.stream_side import StreamOptions, StreamSide
from fleetplane.domains.edge.wire import Progress
from fleetplane.kernel.commands import COMMAND, COMMAND_TARGET
from fleetplane.kernel.session_metrics import SessionCollector
from fleetplane.rpc import Authentication, Authenticator
from fleetplane.web.documents import Document, Documents
from fleetplane.web.ops import Mount

SWEEP_SECONDS = 3600.0
CA_PATH = "/v1/edge/ca.pem"
"""By which daemons know a listener with TLS of our own."""

BLUEPRINT = Blueprint(
    name="edge",
    kinds=(*identity_side.KINDS, CONFIG_LAYER, EDGE_GROUP, EDGE_RUN, COMMAND, COMMAND_TARGET),
    methods=identity_side.METHODS,
    grants=identity_side.GRANTS,
    operator_roles=access.ROLES,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeOptions:
    version: str
    public_endpoint: str = ""
    """Where daemons dial in; the first address of our listener when empty."""
    issuer: str = ""
    identity: IdentityPolicy = field(default_factory=IdentityPolicy)
    streams: StreamOptions = field(default_factory=StreamOptions)
    deadline_seconds: float = 60.0
    shipped_shapes: bool = False


class Endpoint:
    """Where daemons dial in, which is known once the server listens."""

    def __init__(self, configured: str) -> None:
        self._configured = configured
        self.opened = ""

    def __call__(self) -> str:
        return self._configured or self.opened


class EdgeDomain:
    """See `create`; the constructor takes what has been loaded."""

    def __init__(
        self, kernel: Kernel, options: EdgeOptions, *, identity: IdentitySide, endpoint: Endpoint,
        layers: ConfigLayers,
    ) -> None:  # fmt: skip
        store, clock = kernel.store, kernel.clock
        self._clock = clock
        self._authority = kernel.authority
        self._endpoint = endpoint
        self.identity = identity
        self.streams = StreamSide(
            store, clock, tokens=identity.tokens, key=identity.key, revocations=kernel.revocations,
            layers=layers, options=options.streams,
        )  # fmt: skip
        self.groups = Groups(store, clock)
        dispatcher, presences = self.streams.dispatcher, self.streams.presences
        self.runs = FleetRuns(
            store, clock, ledger=dispatcher.ledger, groups=self.groups,
            nodes=NodesOf(
                list=identity.nodes.list, get=identity.nodes.get, is_connected=presences.is_connected
            ),
            check=dispatcher.check, grace_seconds=dispatcher.policy.grace_seconds,
        )  # fmt: skip
        dispatcher.watch(_onlooker(self.runs))
        self.rest = RestSide(
            store, kernel.master, clock, operators=kernel.operators, nodes=identity.nodes,
            enrollments=identity.enrollments, groups=self.groups, layers=layers, runs=self.runs,
            heard_at_ns=presences.last_heartbeat_at_ns, shipped_shapes=options.shipped_shapes,
            deadline_seconds=options.deadline_seconds, version=options.version,
        )  # fmt: skip
        self.services: Sequence[Service] = (identity.service(self.streams.streams),)
        self.authenticators: Mapping[str, Mapping[Authentication, Authenticator]] = identity.authenticators
        self.server_names: Sequence[str] = _host_of(options.public_endpoint)
        self.collectors: Sequence[Collector] = (
            *self.rest.collectors,
            SessionCollector(self.streams.sessions, domain="edge"),
            EdgeCollector(store, streams=self.streams, runs=self.runs),
        )
        self.notices: Sequence[str] = ()

    def __repr__(self) -> str:
        return f"<EdgeDomain {self.streams!r}>"

    @classmethod
    async def create(cls, kernel: Kernel, options: EdgeOptions) -> EdgeDomain:
        layers, endpoint = ConfigLayers(kernel.store), Endpoint(options.public_endpoint)
        identity = await IdentitySide.load(
            kernel.store, kernel.master, kernel.clock, revocations=kernel.revocations,
            operators=kernel.operators, layers=layers, policy=options.identity, issuer=options.issuer,
            endpoint=endpoint,
        )  # fmt: skip
        return cls(kernel, options, identity=identity, endpoint=endpoint, layers=layers)

    @property
    def routes(self) -> Sequence[Mount]:
        trust = Document(content_type="application/x-pem-file", content=lambda: self._authority.trust_pem)
        return (*self.rest.routes, Mount(path=CA_PATH, app=Documents({CA_PATH: trust})))

    async def prepare(self) -> None:
        await self.rest.prepare()
        await self.streams.prepare()
        await self.runs.prepare()

    def opened(self, addresses: Mapping[str, Sequence[str]]) -> None:
        ours = addresses.get(identity_side.LISTENER, ())
        self._endpoint.opened = ours[0] if ours else ""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.streams.run(), name="edge/streams")
            tasks.create_task(self.runs.run(), name="edge/runs")
            tasks.create_task(self.rest.run(), name="edge/rest")
            tasks.create_task(self._sweep(), name="edge/sweep")

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            await self.identity.sweep()

    def drain(self) -> None:
        self.streams.drain()


def _host_of(endpoint: str) -> Sequence[str]:
    """The name that daemons dial, for which our certificate must hold; none if there is no such name."""
    host = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}").hostname
    return (host,) if host else ()


def _onlooker(runs: FleetRuns) -> Callable[[str, str, Progress], None]:
    def tell(node_id: str, command: str, progress: Progress) -> None:
        data = progress.data
        if progress.status is not None:
            data = f"{progress.status.state} {progress.status.message}".strip().encode()
        runs.progressed(node_id, command, progress.stream, data)

    return tell
