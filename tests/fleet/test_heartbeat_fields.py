"""What heartbeats move is shown as of now by whichever server answers, and as the documented APIs show it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from support.shared import virtual_loop
from support.shared.virtual_servers import VirtualServer, until, virtual_servers

from fleetplane.domains.blueprint import Blueprint
from fleetplane.domains.boards.inventory.boards import Boards
from fleetplane.domains.boards.inventory.last_seen import BoardPresence
from fleetplane.domains.boards.inventory.liveness import BoardController, BoardPolicy, Word
from fleetplane.domains.boards.kinds import BOARD, BoardSpec, BoardState, BoardStatus
from fleetplane.domains.boards.kinds import SCOPE as BOARDS_SCOPE
from fleetplane.domains.boards.rest import views as board_views
from fleetplane.domains.boards.server import BLUEPRINT as BOARDS
from fleetplane.domains.edge.kinds import (
    EDGE_NODE,
    Capabilities,
    NodeSpec,
    NodeState,
    NodeStatus,
    PayloadDialect,
)
from fleetplane.domains.edge.rest import views as edge_views
from fleetplane.domains.edge.server import BLUEPRINT as EDGE
from fleetplane.domains.edge.streams.assembly import StreamSide
from fleetplane.domains.edge.streams.live import LiveDaemon
from fleetplane.domains.edge.streams.verification import Seal
from fleetplane.domains.fleetwide import BLUEPRINT as FLEETWIDE
from fleetplane.domains.gpus.kinds import GPU, PROVIDER_LABEL, GpuSpec, GpuStatus
from fleetplane.domains.gpus.kinds import SCOPE as GPUS_SCOPE
from fleetplane.domains.gpus.registry import Gpus
from fleetplane.domains.gpus.rules import GpuPolicy
from fleetplane.domains.gpus.server import BLUEPRINT as GPUS
from fleetplane.domains.gpus.shared_providers import SharedProviders
from fleetplane.domains.instances.server import BLUEPRINT as INSTANCES
from fleetplane.domains.proxies import wire
from fleetplane.domains.proxies.agents.assembly import AgentSide
from fleetplane.domains.proxies.agents.live import LiveAgent
from fleetplane.domains.proxies.agents.records import AgentRoster
from fleetplane.domains.proxies.kinds.records import (
    AGENT,
    WORKSPACE,
    AgentSpec,
    AgentStatus,
    WorkspaceSpec,
    workspace_scope,
)
from fleetplane.domains.proxies.kinds.values import AgentState
from fleetplane.domains.proxies.rest import views as proxy_views
from fleetplane.domains.proxies.server import BLUEPRINT as PROXIES
from fleetplane.fleet.resources.catalogue import Catalogue, CatalogueMember
from fleetplane.fleet.resources.declaration import AnyPublicResource
from fleetplane.fleet.resources.objects import at
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.presence.last_seen import LastSeen
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.store import Draft, Store

BLUEPRINTS = (BOARDS, EDGE, GPUS, INSTANCES, PROXIES, FLEETWIDE)
SCOPE = workspace_scope("o", "w")
LONG_AGO_NS = 10**18
SILENT_FOR_SECONDS = 200.0
"""Shorter than the time after which an NGINX agent's health is written in any case."""
LATE_SECONDS = 30.0
"""How old a moment may be at a server that hears of it from the database."""


@dataclass
class Served:
    """What one server runs of a domain, as far as heartbeats go."""

    running: Any
    """In the place of the running domain."""
    beat: Callable[[], Awaitable[None]]
    documented: Callable[[AnyResource], object]
    """The field as the domain's own API shows it."""
    run: Callable[[], Awaitable[Any]]


@dataclass
class Row:
    resource: str
    field: str
    record: Callable[[Draft], object]
    serve: Callable[[VirtualServer], Served]


def _session() -> Any:
    return SimpleNamespace(is_open=True, offer=lambda _message: True)


# Boards.


def board_record(draft: Draft) -> None:
    status = BoardStatus(state=BoardState.READY, registered_at_ns=LONG_AGO_NS, last_seen_at_ns=LONG_AGO_NS)
    draft.put(BOARD, BOARDS_SCOPE, "1", spec=BoardSpec(name="pi"), status=status)


def boards(server: VirtualServer) -> Served:
    store, clock, presence = server.store, server.clock, BoardPresence()
    heard = LastSeen(store, clock, channel="boards")
    controller = BoardController(
        store=store,
        clock=clock,
        boards=Boards(store),
        presence=presence,
        approvals=cast("Any", None),
        join_tokens=cast("Any", None),
        policy=BoardPolicy(),
        heard=heard,
    )

    async def beat() -> None:
        await controller.heard(1, Word(), actor="board/1")

    return Served(
        running=SimpleNamespace(core=SimpleNamespace(presence=presence)),
        beat=beat,
        documented=lambda board: board_views.node(board, last_seen_ns=presence.last_seen_ns(board)).last_seen,
        run=controller.run_here,
    )


# Edge.


def node_record(draft: Draft) -> None:
    spec = NodeSpec(
        display_name="n",
        public_key=b"k" * 32,
        token_id="t",
        token_expires_at_ns=2 * 10**18,
        enrolled_at_ns=LONG_AGO_NS,
    )
    status = NodeStatus(state=NodeState.CONNECTED, since_ns=LONG_AGO_NS, last_heartbeat_at_ns=LONG_AGO_NS)
    draft.put(EDGE_NODE, "tenant/acme", "n", spec=spec, status=status)


def edge(server: VirtualServer) -> Served:
    side = StreamSide(
        server.store,
        server.clock,
        tokens=cast("Any", None),
        key=cast("Any", None),
        revocations=Revocations(server.store, server.clock),
        layers=cast("Any", None),
    )

    async def beat() -> None:
        live = side.presences.get("n")
        if live is None:
            live = LiveDaemon(
                agent="n",
                session=_session(),
                since_ns=1,
                heard_ns=1,
                seal=Seal(node_id="n", tenant="acme", stream_id="s", token_id="t", newest_ms=1),
                dialect=next(iter(PayloadDialect)),
                capabilities=Capabilities(),
            )
            side.presences.came(live)
        side.controller.heard(live, heartbeat=True)

    return Served(
        running=SimpleNamespace(streams=side),
        beat=beat,
        documented=lambda node: edge_views.host(node, heard_at_ns=side.heard_at_ns("n")).last_heartbeat_at,
        run=side.last_heard.run_here,
    )


# NGINX agents.


def agent_record(draft: Draft) -> None:
    draft.put(WORKSPACE, SCOPE, "w", spec=WorkspaceSpec(name="Ws", slug="ws"))
    status = AgentStatus(state=AgentState.ONLINE, last_seen_at_ns=LONG_AGO_NS)
    draft.put(AGENT, SCOPE, "a", spec=AgentSpec(name="web-1"), status=status)


def agents(shows: Callable[[proxy_views.AgentView], object]) -> Callable[[VirtualServer], Served]:
    def serve(server: VirtualServer) -> Served:
        store, clock = server.store, server.clock
        side = AgentSide(
            store,
            clock,
            workspaces=cast("Any", None),
            vault=cast("Any", SimpleNamespace(master=MasterKey(b"k" * 32, clock))),
            revocations=Revocations(store, clock),
        )
        roster = AgentRoster(store, side.whereabouts)

        async def beat() -> None:
            live = side.presences.get("a")
            is_first = live is None
            if live is None:
                agent = store.get(AGENT, SCOPE, "a")
                assert agent is not None
                place = await side.whereabouts.enter("a")
                live = LiveAgent(
                    agent="a", session=_session(), since_ns=1, heard_ns=1, record=agent, place=place
                )
                side.presences.came(live)
            side.controller.heard_from("a", live)
            nginx = pb.NginxStatus(is_running=not is_first)
            report = pb.HealthReport(config_version=3 if is_first else 11, nginx=nginx)
            live.health = wire.health(report)
            await roster.note_health(live)

        async def run() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(side.whereabouts.run_here())
                tasks.create_task(side._heard.run_here())
                tasks.create_task(side.presences.follow_heard())

        def documented(agent: Any) -> object:
            return shows(proxy_views.agent(agent, side.presences.sighting("a"), detailed=True))

        return Served(
            running=SimpleNamespace(presences=side.presences), beat=beat, documented=documented, run=run
        )

    return serve


# GPUs.


def gpu_record(draft: Draft) -> None:
    labels = {PROVIDER_LABEL: "nvml"}
    draft.put(GPU, GPUS_SCOPE, "g", spec=GpuSpec(uuid="GPU-g"), status=GpuStatus(), labels=labels)


def gpus(server: VirtualServer) -> Served:
    store, clock = server.store, server.clock
    registry = Gpus(store, policy := GpuPolicy())
    providers = SharedProviders(store, registry, policy, clock, LastSeen(store, clock, channel="gpus"))
    running = SimpleNamespace(leases=providers.leases, stored_gpus=registry.all, applied_settings=dict)

    async def beat() -> None:
        await providers.heartbeat("nvml", frozenset({"g"}), actor="test")

    return Served(running=running, beat=beat, documented=lambda _made: None, run=providers.run_here)


TABLE = (
    Row("board", ".status.lastSeenAt", board_record, boards),
    Row("edge-node", ".status.lastHeartbeatAt", node_record, edge),
    Row("proxy-agent", ".status.lastSeenAt", agent_record, agents(lambda shown: shown.last_seen_at)),
    Row(
        "proxy-agent",
        ".status.configVersion",
        agent_record,
        agents(lambda shown: cast("Any", shown.health).config_version),
    ),
    Row(
        "proxy-agent",
        ".status.nginx",
        agent_record,
        agents(lambda shown: cast("Any", shown.health).nginx_status),
    ),
    Row("gpu", ".status.observedAt", gpu_record, gpus),
    Row("provider", ".status.heardAt", gpu_record, gpus),
    Row("provider", ".status.heartbeats", gpu_record, gpus),
)
MOMENTS = ("heard", "seen", "heartbeat", "observed_at")
"""In names of fields that a heartbeat may move."""


def _blueprint(resource: str) -> tuple[Blueprint, AnyPublicResource]:
    return next((one, found) for one in BLUEPRINTS for found in one.resources if found.name == resource)


def _shown(row: Row, server: VirtualServer, served: Served) -> object:
    """The field as `/apis/v1` shows it, of the one object that there is."""
    blueprint, resource = _blueprint(row.resource)
    catalogue = Catalogue([CatalogueMember(resource=resource, domain=blueprint.name, running=served.running)])
    (found,) = catalogue.named(resource.plural).all(server.store)
    return at(found.shown(server.store), row.field)


def _record(store: Store) -> AnyResource:
    kinds = (BOARD, EDGE_NODE, AGENT, GPU)
    (found,) = (one for kind in kinds for one in store.list(cast("Any", kind)))
    return found


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.resource}{row.field}")
def test_what_a_heartbeat_moves_is_shown_as_of_now_on_every_server(row: Row) -> None:
    async def scene() -> None:
        kinds = dict.fromkeys((*KERNEL_KINDS, *(kind for one in BLUEPRINTS for kind in one.kinds)))
        served: dict[str, Served] = {}

        async def work(server: VirtualServer) -> None:
            served[server.name] = row.serve(server)
            await served[server.name].run()

        async with virtual_servers(kinds, here=work, active=work) as servers:
            one, two = [await servers.start(name) for name in ("one", "two")]
            await until(lambda: len(served) == 2)
            touches = [
                BOARD.key(BOARDS_SCOPE, "1"),
                EDGE_NODE.key("tenant/acme", "n"),
                GPU.key(GPUS_SCOPE, "g"),
            ]
            touches += [AGENT.key(SCOPE, "a"), WORKSPACE.key(SCOPE, "w")]
            await one.store.transact(row.record, actor="test", action="test", touches=touches)
            await two.store.confirmed()
            await served["one"].beat()
            before = _shown(row, one, served["one"])
            await asyncio.sleep(SILENT_FOR_SECONDS)
            await served["one"].beat()
            await asyncio.sleep(LATE_SECONDS)
            for server in (one, two):
                found = _shown(row, server, served[server.name])
                _check(found, before, now_ns=server.clock.now_ns())
                documented = served[server.name].documented(_record(server.store))
                assert documented in (None, found), f"{server.name} shows {found}, and its API {documented}"

    virtual_loop.run(scene())


def _check(found: object, before: object, *, now_ns: int) -> None:
    if not (isinstance(found, str) and "T" in found):
        assert found in (11, "running", None)  # as the last report said; null for what no server knows
        return
    assert found != before
    assert now_ns - datetime.fromisoformat(found).timestamp() * 1e9 <= 2 * LATE_SECONDS * 1e9


def test_no_field_that_sounds_as_if_heartbeats_moved_it_is_left_out() -> None:
    tested = {(row.resource, row.field) for row in TABLE}
    assert {one for one in _moments() if one not in tested} == set()


def _moments() -> Iterator[tuple[str, str]]:
    for blueprint in BLUEPRINTS:
        for resource in blueprint.resources:
            for one in msgspec.structs.fields(resource.status):
                if any(word in one.name for word in MOMENTS) and one.type in (str, str | None):
                    yield resource.name, f".status.{one.encode_name}"
