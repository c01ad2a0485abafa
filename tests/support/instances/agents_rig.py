"""The agents' half of the proxies domain in this process: real store, real TLS listener, official client."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.domains.blueprint import prepare_both, run_both
from fleetplane.domains.proxies.agents import assembly as agent_side
from fleetplane.domains.proxies.agents.assembly import AgentSide
from fleetplane.domains.proxies.agents.controller import AgentPolicy
from fleetplane.domains.proxies.agents.identity import LISTENER
from fleetplane.domains.proxies.agents.registry import AgentEnrolment, Agents
from fleetplane.domains.proxies.kinds.records import (
    AGENT,
    DEPLOYMENT,
    KINDS,
    Agent,
    Deployment,
    OrganizationSpec,
    VirtualHost,
    VirtualHostSpec,
    WorkspaceSpec,
    agent_scope,
    organization_scope,
    workspace_scope,
)
from fleetplane.domains.proxies.kinds.values import DeploymentState, Location
from fleetplane.domains.proxies.rules.alerts import ALERT
from fleetplane.domains.proxies.serving.certificates import Certificates
from fleetplane.domains.proxies.serving.hosts import Hosts
from fleetplane.domains.proxies.serving.private_keys import Vault
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.domains.proxies.tenancy.organizations import TenancyPlaces
from fleetplane.fleet.people import own_accounts
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2_grpc
from fleetplane.kernel.access import AccessTable, Principal
from fleetplane.kernel.clock import Clock, SystemClock
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.rpc import (
    Authentication,
    CallStatistics,
    GrpcApp,
    ListenerSpec,
    MethodTable,
    TlsFiles,
    open_listener,
)

DEADLINE_SECONDS = 60.0
QUICK = AgentPolicy(
    reconnect_seconds=0.2, first_report_seconds=60.0, debounce_seconds=0.0, heartbeat_seconds=30
)
BOSS = "user/boss"


async def until(condition: Callable[[], Any], *, seconds: float = DEADLINE_SECONDS) -> Any:
    """What the condition comes to, once that is true."""
    async with asyncio.timeout(seconds):
        while not (found := condition()):
            await asyncio.sleep(0.005)
    return found


class FakeAgent:
    """A client generated from the contract; what it does is up to the test."""

    def __init__(self, stub: Any, token: str, agent_id: str) -> None:
        self.stub = stub
        self.token = token
        self.agent_id = agent_id
        self.call: Any = None
        self.clock = itertools.count(1_900_000_000_000)

    async def open(
        self, *, metadata: Any = None, agent_id: str = "", **about: Any
    ) -> pb.RegistrationResponse:
        self.call = self.stub.Stream(metadata=metadata)
        about = {"hostname": "web-01.internal", "ip_address": "10.0.1.10", "version": "0.1.0", **about}
        registration = pb.RegistrationRequest(**{"token": self.token, **about})
        await self.call.write(pb.AgentMessage(agent_id=agent_id, registration=registration))
        return (await self.read()).registration_response

    async def send(self, **payload: Any) -> int:
        timestamp = next(self.clock)
        await self.call.write(pb.AgentMessage(agent_id=self.agent_id, timestamp=timestamp, **payload))
        return timestamp

    async def health(
        self, version: int = 0, *, checksum: str = "", running: bool = True, **about: Any
    ) -> None:
        nginx = pb.NginxStatus(
            is_running=running, pid=1, uptime_seconds=86_400, active_connections=42, requests_per_second=150.5
        )
        system = about.pop(
            "system",
            pb.SystemMetrics(cpu_percent=25.0, memory_used_bytes=512 << 20, memory_total_bytes=4 << 30),
        )
        await self.send(
            health=pb.HealthReport(
                nginx=nginx, system=system, config_version=version, config_checksum=checksum, **about
            )
        )

    async def status(self, update: pb.ConfigUpdate, *states: str, error: str = "") -> None:
        for state in states:
            await self.send(
                config_status=pb.ConfigStatus(
                    config_id=update.config_id, version=update.version, status=state, error_message=error
                )
            )

    async def read(self) -> pb.MasterMessage:
        async with asyncio.timeout(DEADLINE_SECONDS):
            message = await self.call.read()
        if message is grpc.aio.EOF:
            raise EOFError(await self.call.code())
        assert isinstance(message, pb.MasterMessage)
        return message

    async def next(self, payload: str) -> Any:
        """The next message with this payload, passing over others."""
        while True:
            message = await self.read()
            if message.WhichOneof("payload") == payload:
                return getattr(message, payload)

    async def ended(self) -> grpc.StatusCode:
        """How the stream ended, reading what still comes."""
        try:
            while True:
                await self.read()
        except (EOFError, grpc.aio.AioRpcError):
            pass
        code = await self.call.code()
        assert isinstance(code, grpc.StatusCode)
        return code

    async def answer(self, command_id: str, *, success: bool, event_id: str = "", **data: str) -> None:
        said = {"command_id": command_id, "success": "true" if success else "false", **data}
        await self.send(
            event=pb.Event(
                event_id=event_id or f"event-{next(self.clock)}", event_type="command.result", data=said
            )
        )

    def leave(self) -> None:
        self.call.cancel()


@dataclass(slots=True, kw_only=True)
class Rig:
    store: Store
    side: AgentSide
    agents: Agents
    hosts: Hosts
    certificates: Certificates
    revocations: Revocations
    places: TenancyPlaces
    scope: str
    address: str
    root: bytes
    app: GrpcApp
    stack: AsyncExitStack
    made: list[FakeAgent] = field(default_factory=list)

    async def enrol(self, name: str, **labels: str) -> AgentEnrolment:
        return await self.agents.enrol(self.scope, name, labels, hours=24, actor=BOSS)

    async def agent(self, name: str, **labels: str) -> FakeAgent:
        enrolled = await self.enrol(name, **labels)
        return await self.client(enrolled.token, enrolled.agent.name)

    async def client(self, token: str, agent_id: str) -> FakeAgent:
        return FakeAgent(agent_pb2_grpc.AgentServiceStub(await self.channel()), token, agent_id)

    async def channel(self, key_pem: bytes | None = None, certificate_pem: bytes | None = None) -> Any:
        """A connection of its own, with a client certificate or without."""
        credentials = grpc.ssl_channel_credentials(self.root, key_pem, certificate_pem)
        alone = (("grpc.use_local_subchannel_pool", 1),)
        return await self.stack.enter_async_context(
            grpc.aio.secure_channel(self.address, credentials, options=alone)
        )

    async def host(self, server_name: str, *, port: int = 80, **fields: Any) -> VirtualHost:
        spec = VirtualHostSpec(
            name=server_name,
            server_name=server_name,
            listen_port=port,
            locations=(Location(path="/", proxy_pass="http://127.0.0.1:9000"),),
            **fields,
        )
        return await self.hosts.create(self.scope, spec, actor=BOSS)

    def stored(self, agent_id: str) -> Agent:
        found = self.store.get(AGENT, self.scope, agent_id)
        assert found is not None
        return found

    def state(self, agent_id: str) -> str:
        status = self.stored(agent_id).status
        return status.state if status is not None else "unknown"

    def deployments(self, agent_id: str) -> list[Deployment]:
        return list(self.store.list(DEPLOYMENT, agent_scope(self.scope, agent_id)))

    def deployment_states(self, agent_id: str) -> dict[int, DeploymentState]:
        return {
            one.spec.version: one.status.state for one in self.deployments(agent_id) if one.status is not None
        }

    def alerts(self, agent_id: str) -> dict[str, str]:
        found = self.store.list(ALERT, agent_scope(self.scope, agent_id))
        return {alert.name: alert.spec.severity.value for alert in found}


@asynccontextmanager
async def agents_rig(
    folder: Path, *, policy: AgentPolicy = QUICK, clock: Clock | None = None, **options: Any
) -> AsyncIterator[Rig]:
    clock = clock or SystemClock()
    ca = ThrowawayCa()
    certificate, key = ca.server(folder)
    known: tuple[AnyKind, ...] = (*KINDS, *agent_side.KINDS, *KERNEL_KINDS, *own_accounts.KINDS)
    kinds = list({kind.name: kind for kind in known}.values())
    settings = StoreSettings(path=folder / "state.db")
    async with Store.open(settings, kinds=kinds, clock=clock) as store:
        master = MasterKey(b"k" * 32, clock)
        vault = Vault(store, master)
        workspaces = Workspaces(store, vault)
        authority = await Authority.load_or_create(store, master, clock)
        trust = folder / "clients.pem"
        trust.write_bytes(authority.trust_pem)
        revocations = Revocations(store, clock)
        side = AgentSide(
            store,
            clock,
            workspaces=workspaces,
            vault=vault,
            policy=policy,
            authority=authority,
            revocations=revocations,
            **options,
        )
        await prepare_both(side)
        places = TenancyPlaces(store, clock, workspaces)
        app = _app(side, clock)
        spec = ListenerSpec(
            name=LISTENER,
            addresses=("127.0.0.1:0",),
            app=app,
            tls=TlsFiles(certificate=certificate, key=key, client_ca=trust, client_certificate="optional"),
        )
        async with open_listener(spec, grace_seconds=2) as listener, asyncio.TaskGroup() as tasks:
            running = tasks.create_task(run_both(side))
            async with AsyncExitStack() as channels:
                yield Rig(
                    store=store,
                    side=side,
                    agents=Agents(store, clock, workspaces, side.presences),
                    hosts=Hosts(store, clock, workspaces),
                    certificates=Certificates(store, clock, workspaces, vault),
                    revocations=revocations,
                    places=places,
                    scope=await _workspace(store, places),
                    address=listener.addresses[0].removeprefix("https://"),
                    root=ca.pem,
                    app=app,
                    stack=channels,
                )
                side.drain()
                await app.drain(2)
            running.cancel()


async def _workspace(store: Store, places: TenancyPlaces) -> str:
    from fleetplane.domains.proxies.kinds.records import WORKSPACE

    existing = store.list(WORKSPACE)
    if existing:
        return existing[0].scope
    organization = await places.create_organization(
        OrganizationSpec(name="Acme", slug="acme"), owner="boss", actor=BOSS
    )
    made = await places.create_workspace(
        organization.name, WorkspaceSpec(name="Production", slug="production"), actor=BOSS
    )
    assert made.scope == workspace_scope(organization.name, made.name)
    assert made.scope.startswith(organization_scope(organization.name))
    return made.scope


def _app(side: AgentSide, clock: Clock) -> GrpcApp:
    app = GrpcApp(
        listener=LISTENER,
        table=MethodTable(agent_side.METHODS),
        access=AccessTable(agent_side.GRANTS),
        authenticators={
            Authentication.ANONYMOUS: lambda _connection: Principal(name="anonymous", roles=frozenset()),
            **side.authenticators[LISTENER],
        },
        clock=clock,
        statistics=CallStatistics(),
    )
    for service in side.services:
        app.add_service(service.descriptor, service.servicer)
    app.seal()
    return app
