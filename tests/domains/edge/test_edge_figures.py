"""Figures of daemons: taken of the node whose token a call shows, and of no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from support.edge.edge_identity_rig import BOSS, OTHER, TENANT, Machine, Rig, code_of, identity_rig

from fleetplane.domains.edge import releases
from fleetplane.domains.edge.identity import assembly as identity_side
from fleetplane.domains.edge.kinds import EDGE_NODE, EdgeNode, tenant_scope
from fleetplane.domains.edge.releases import DaemonRegister
from fleetplane.fleet.figures import FigureKeeper
from fleetplane.fleet.figures_service import SERVICE, FigureService
from fleetplane.gen.fleetplane.fleet.v1 import figures_pb2 as pb
from fleetplane.gen.fleetplane.fleet.v1 import figures_pb2_grpc
from fleetplane.kernel.access import AccessTable, Principal
from fleetplane.rpc import (
    Authentication,
    CallStatistics,
    FixedPrincipal,
    GrpcApp,
    ListenerSpec,
    MethodTable,
    open_listener,
)

NOBODY = Principal(name="anonymous", roles=frozenset())


class Site:
    """The service of figures beside the identity side, on a listener of its own."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.keeper = FigureKeeper(None, rig.clock, prefix=releases.PREFIX, measures=releases.MEASURES)
        self.stub: Any = None

    async def open(self) -> None:
        rig = self.rig
        app = GrpcApp(
            listener=identity_side.LISTENER,
            table=MethodTable(releases.ROWS),
            access=AccessTable(identity_side.GRANTS),
            authenticators={Authentication.ANONYMOUS: FixedPrincipal(NOBODY)},
            clock=rig.clock,
            statistics=CallStatistics(),
        )
        intake = releases.DaemonFigures(DaemonRegister(rig.store, rig.side.tokens), self.keeper)
        app.add_service(SERVICE, FigureService(intake))
        app.seal()
        spec = ListenerSpec(name=identity_side.LISTENER, addresses=("127.0.0.1:0",), app=app)
        listener = await rig.stack.enter_async_context(open_listener(spec, grace_seconds=2))
        address = listener.addresses[0].removeprefix("http://")
        channel = await rig.stack.enter_async_context(grpc.aio.insecure_channel(address))
        self.stub = figures_pb2_grpc.AgentFiguresStub(channel)

    def report(self, token: str, name: str = "", **values: float) -> Any:
        request = pb.ReportFiguresRequest(name=name, objects=[pb.ObjectFigures(values=values)])
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        return self.stub.Report(request, metadata=metadata, timeout=60)

    def node(self, machine: Machine, tenant: str = TENANT) -> EdgeNode:
        found = self.rig.store.get(EDGE_NODE, tenant_scope(tenant), machine.node_id)
        assert found is not None
        return found

    def latest(self, node: EdgeNode) -> dict[str, float]:
        found = self.keeper.latest([node]).get(node.name)
        return dict(found.values) if found is not None else {}


async def test_figures_are_those_of_the_node_whose_token_it_is(tmp_path: Path) -> None:
    async with identity_rig(tmp_path) as rig:
        site = Site(rig)
        await site.open()
        ours, theirs = await rig.enrolled(TENANT), await rig.enrolled(OTHER)
        await site.report(ours.token, theirs.node_id, cpuPercent=12.0, diskPercent=3.0, secrets=1.0)
        assert site.latest(site.node(ours)) == {"cpuPercent": 12.0, "diskPercent": 3.0}
        assert site.latest(site.node(theirs, OTHER)) == {}, "whatever name is said"
        assert site.keeper.refused == 1


@pytest.mark.parametrize("token", ["", "nonsense", "a.b.c"])
async def test_who_shows_no_token_of_a_daemon_tells_nothing(tmp_path: Path, token: str) -> None:
    async with identity_rig(tmp_path) as rig:
        site = Site(rig)
        await site.open()
        assert await code_of(site.report(token, cpuPercent=1.0)) is grpc.StatusCode.UNAUTHENTICATED


async def test_workers_and_revoked_daemons_tell_nothing(tmp_path: Path) -> None:
    async with identity_rig(tmp_path) as rig:
        site = Site(rig)
        await site.open()
        daemon, worker = await rig.enrolled(), await rig.worker()
        assert await code_of(site.report(worker.token, cpuPercent=1.0)) is grpc.StatusCode.UNAUTHENTICATED
        node = site.node(daemon)
        await rig.side.nodes.revoke(TENANT, daemon.node_id, reason="lost", actor=BOSS)
        assert await code_of(site.report(daemon.token, cpuPercent=1.0)) is grpc.StatusCode.UNAUTHENTICATED
        assert site.latest(node) == {}
