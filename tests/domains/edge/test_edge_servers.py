"""Daemons at any of three real servers on one PostgreSQL, of which one is active and any may die."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import subprocess
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import httpx
import pytest
from support.edge import edge_streams_rig
from support.edge.edge_daemon_rig import running
from support.edge.edge_identity_rig import Machine, claims_of
from support.edge.edge_signer import Identity
from support.edge.edge_site import Rest, Site, a_tenant, until
from support.edge.edge_streams_rig import Daemon
from support.shared.postgres_server import PostgresServer
from support.shared.rough_network import RoughNetwork, rough_network
from support.shared.server_process import START_SECONDS, running_server
from support.shared.waiting_server import WaitingServer, patient

from fleetplane.domains.edge.agent.assembly import Reach
from fleetplane.domains.edge.agent.identity.enrolment import Enroller, EnrolmentRequest
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2_grpc
from fleetplane.kernel.clock import SystemClock

SECONDS = 60.0
GONE_SECONDS = 150.0
"""Until a server that was killed is taken for gone, as patient as these are, and its daemons with it."""
RACES = 5
ONLY = ("--set", "only=edge", "--set", "edge.attests_per_minute=0")


@dataclass(slots=True, kw_only=True)
class Node:
    """One of the servers: where daemons dial, and an operator who calls it."""

    edge: str
    rest: Rest
    process: subprocess.Popen[str]
    waiting: WaitingServer | None = None

    @property
    def stub(self) -> Any:
        return cluster_pb2_grpc.NodeClusterServiceStub(self.channel())

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.edge, options=[("grpc.use_local_subchannel_pool", 1)])

    async def daemon(self, identity: Identity) -> Daemon:
        """A daemon by hand, whose stream is open here."""
        clock = cast("edge_streams_rig.Rig", SimpleNamespace(clock=SystemClock()))
        made = Daemon(clock, identity, self.channel())
        await made.open()
        return made


@dataclass(slots=True, kw_only=True)
class Cluster:
    active: Node
    one: Node
    other: Node
    owner: str
    """A token for what concerns all tenants."""
    balancer: RoughNetwork
    """Where daemons dial; leads to one server at a time."""

    @property
    def all(self) -> tuple[Node, Node, Node]:
        return self.active, self.one, self.other

    def lead_to(self, node: Node) -> None:
        self.balancer.upstream = node.edge

    async def connected(self, node_id: str) -> None:
        for node in self.all:
            await node.rest.connected(node_id)


def _addresses(server: WaitingServer) -> Mapping[str, list[str]]:
    lines = (json.loads(line) for line in server.told().splitlines() if line.startswith("{"))
    found: dict[str, Any] = next(line for line in lines if line["event"] == "standby.reads_served")
    return found


@asynccontextmanager
async def cluster(folder: Path, postgres: PostgresServer) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        balancer = await stack.enter_async_context(rough_network())
        environment = {
            **patient(reads=True),
            "FLEETPLANE_STORE__URL": postgres.database(),
            "FLEETPLANE_IDENTITY__MASTER_KEY": base64.b64encode(secrets.token_bytes(32)).decode(),
        }
        options = (*ONLY, "--set", f"edge.public_endpoint={balancer.address}")
        opened = running_server(folder / "a", *options, environment=environment)
        active = await asyncio.to_thread(opened.__enter__)
        stack.push_async_callback(asyncio.to_thread, opened.__exit__, None, None, None)
        tenant = a_tenant()
        site = Site(server=active, data_dir=folder / "a")
        bearer, owner = site.token(tenant=tenant), site.token()

        async def rest(web: str) -> Rest:
            http = httpx.AsyncClient(
                base_url=web, timeout=SECONDS, headers={"authorization": f"Bearer {bearer}"}
            )
            return Rest(http=await stack.enter_async_context(http), tenant=tenant)

        standbys = []
        for name in ("b", "c"):
            server = stack.enter_context(WaitingServer(folder / name, environment, *options))
            standbys.append(server)
        nodes = []
        for server in standbys:
            await asyncio.to_thread(server.until, lambda: "standby.reads_served" in server.told())  # noqa: B023
            at = _addresses(server)
            edge = at["edge"][0].removeprefix("http://")
            nodes.append(
                Node(edge=edge, rest=await rest(at["web"][0]), process=server.process, waiting=server)
            )
        yield Cluster(
            active=Node(
                edge=active.address("edge", "http").removeprefix("http://"),
                rest=await rest(active.web),
                process=active.process,
            ),
            one=nodes[0],
            other=nodes[1],
            owner=owner,
            balancer=balancer,
        )


async def _joined(node: Node, token: str) -> Identity:
    machine = Machine(node.stub, clock=SystemClock())
    await machine.join(token)
    return Identity(
        node_id=machine.node_id,
        tenant=node.rest.tenant,
        key=machine.key,
        token=machine.token,
        token_id=str(claims_of(machine.token)["jti"]),
    )


@pytest.mark.timeout(900)
async def test_daemons_are_served_by_any_of_three_servers(tmp_path: Path, postgres: PostgresServer) -> None:
    async with cluster(tmp_path, postgres) as here:
        await _one_token_lets_one_machine_in(here)
        node_id, state = await _enrolled_through_the_balancer(here, tmp_path / "daemon")
        async with running(state):
            await here.connected(node_id)
            await _runs_reach_it_from_everywhere(here, node_id)
            await _configuration_reaches_it(here, node_id)
            await _a_heartbeat_is_heard_by_all(here, node_id)
            await _a_worker_is_heard_by_all(here)
            await _a_daemon_moves(here)
            await _drained_and_revoked_on_other_servers(here)
            await _a_server_dies(here, node_id)
            await _the_active_server_dies(here, node_id)


async def _one_token_lets_one_machine_in(here: Cluster) -> None:
    for _ in range(RACES):
        token = await here.active.rest.invite()
        joining = (_joined(node, token) for node in (here.one, here.other))
        came = await asyncio.gather(*joining, return_exceptions=True)
        refused = [one for one in came if isinstance(one, grpc.aio.AioRpcError)]
        assert [error.code() for error in refused] == [grpc.StatusCode.UNAUTHENTICATED], came


async def _enrolled_through_the_balancer(here: Cluster, folder: Path) -> tuple[str, StateFolder]:
    """Invited by one standby, and let in by another."""
    here.lead_to(here.one)
    state = StateFolder(folder)
    enroller = Enroller(folder=state, connect=Reach().channel, clock=SystemClock())
    await enroller.enrol(EnrolmentRequest(token=await here.other.rest.invite("ours")))
    hosts = (await here.active.rest.get("/hosts"))["items"]
    (node,) = [host for host in hosts if host["name"] == "ours"]
    return str(node["node_id"]), state


async def _runs_reach_it_from_everywhere(here: Cluster, node_id: str) -> None:
    for issuer in here.all:
        run_id = await issuer.rest.start(f"@{node_id}", script="echo here")
        for node in here.all:
            (found,) = (await node.rest.ended(run_id))["per_node"]
            assert (found["outcome"], found["stdout_tail"]) == ("ok", "here\n"), found
        for node in here.all:
            async with node.rest.events(f"/fleet/runs/{run_id}/events") as events:
                kinds = [event.kind async for event in events]
            assert (kinds.count("command_result"), kinds[-1]) == (1, "fleet_result")


async def _configuration_reaches_it(here: Cluster, node_id: str) -> None:
    """Set on one standby, pushed by another, acknowledged on all."""
    layer = {"spec": {"cluster": {"heartbeat_interval_secs": 20}}}
    put = await here.other.rest.call("PUT", f"/hosts/{node_id}/config", layer)
    assert put.status_code == 200, put.text
    version = put.json()["version"]
    for node in here.all:

        async def acknowledged(node: Node = node) -> bool:
            return bool((await node.rest.host(node_id))["config_version"] == version)

        await until(acknowledged)


async def _a_heartbeat_is_heard_by_all(here: Cluster, node_id: str) -> None:
    now = (await here.one.rest.host(node_id))["last_heartbeat_at"]
    for node in here.all:

        async def later(node: Node = node) -> bool:
            return bool((await node.rest.host(node_id))["last_heartbeat_at"] > now)

        await until(later)


async def _a_worker_is_heard_by_all(here: Cluster) -> None:
    """It joins at one server, reports to another, and a third one routes to it."""
    worker = Machine(here.one.stub, role=pb.NODE_ROLE_WORKER, clock=SystemClock())
    owner = {"authorization": f"Bearer {here.owner}"}
    asked = {"node_id": worker.node_id, "tenants": ["*"]}
    made = await here.other.rest.post("/worker-tokens", asked, headers=owner)
    await worker.join(enrolment_token=made["token"])
    inner = pb.RegisterNodeInner(node_id=worker.node_id, grpc_address="127.0.0.1:1")
    register = pb.RegisterNodeRequest(envelope=worker.sealed(inner))
    await here.other.stub.RegisterNode(register, timeout=SECONDS)
    shown = (await here.other.rest.get("/workers", headers=owner))["items"]
    (registered_at,) = [one["last_heartbeat_at"] for one in shown]
    stub, beat = here.one.stub, pb.NodeHeartbeatInner(node_id=worker.node_id, status=pb.NODE_STATUS_ACTIVE)
    for node in here.all:

        async def heard(node: Node = node) -> bool:
            await stub.Heartbeat(pb.NodeHeartbeatRequest(envelope=worker.sealed(beat)), timeout=SECONDS)
            (one,) = (await node.rest.get("/workers", headers=owner))["items"]
            assert one["status"] == "active"
            return bool(one["last_heartbeat_at"] > registered_at)

        await until(heard)
    wanted = pb.RouteExecutionInner(execution_id="one")
    route = pb.RouteExecutionRequest(envelope=worker.sealed(wanted))
    answer = await here.active.stub.RouteExecution(route, timeout=SECONDS)
    assert answer.target_node_id == worker.node_id


async def _a_daemon_moves(here: Cluster) -> None:
    """It comes to another server while its stream to the first still seems alive: it was never away."""
    identity = await _joined(here.one, await here.other.rest.invite())
    before = await here.one.daemon(identity)
    await here.connected(identity.node_id)
    since = (await here.active.rest.host(identity.node_id))["since"]
    hello = before.sign.hello(digest=True)
    after = await here.other.daemon(identity)
    assert await before.ended() is grpc.StatusCode.ABORTED
    capabilities = pb.EdgeCapabilities(os="moved", arch="x86_64")
    await after.send(capability_update=after.sign.update(capabilities))
    await after.beat()
    for node in here.all:

        async def seen(node: Node = node) -> Any:
            host = await node.rest.host(identity.node_id)
            assert (host["status"], host["since"]) == ("Connected", since)
            return host["os"] == "moved"

        await until(seen)
    await _a_hello_is_taken_once(here, identity, hello)
    after.leave()

    async def gone() -> bool:
        return bool((await here.one.rest.host(identity.node_id))["status"] == "Disconnected")

    await until(gone)


async def _a_hello_is_taken_once(here: Cluster, identity: Identity, hello: Any) -> None:
    """One from before the move opens no stream, at whichever server."""
    for node in here.all:
        clock = cast("edge_streams_rig.Rig", SimpleNamespace(clock=SystemClock()))
        thief = Daemon(clock, identity, node.channel())
        code, text = await thief.refusal(hello=hello)
        assert (code, "used before" in text) == (grpc.StatusCode.UNAUTHENTICATED, True), text


async def _drained_and_revoked_on_other_servers(here: Cluster) -> None:
    identity = await _joined(here.other, await here.one.rest.invite())
    daemon = await here.other.daemon(identity)
    await here.connected(identity.node_id)
    drain = f"/apis/v1/edge-nodes/{identity.node_id}/actions/drain"
    drained = await here.one.rest.http.post(drain, json={})
    assert drained.status_code == 200, drained.text
    await daemon.next("drain")
    gone = await here.active.rest.call("DELETE", f"/hosts/{identity.node_id}")
    assert gone.status_code == 204, gone.text
    assert await daemon.ended() is grpc.StatusCode.FAILED_PRECONDITION
    for node in here.all:
        thief = Daemon(cast("Any", SimpleNamespace(clock=SystemClock())), identity, node.channel())
        assert (await thief.refusal())[0] is not grpc.StatusCode.OK


async def _a_server_dies(here: Cluster, node_id: str) -> None:
    """Those of its daemons that come to another server were never away; of the others it is said."""
    left_alone = await _joined(here.one, await here.other.rest.invite())
    staying = await here.one.daemon(left_alone)  # kept: a stream that nobody holds is ended as garbage
    await here.connected(left_alone.node_id)
    since = (await here.active.rest.host(node_id))["since"]
    here.lead_to(here.other)
    here.one.process.kill()
    for issuer in (here.active, here.other):
        await until(lambda: _does(issuer.rest, node_id), seconds=START_SECONDS)  # noqa: B023
    for node in (here.active, here.other):
        host = await node.rest.host(node_id)
        assert (host["status"], host["since"]) == ("Connected", since), host

        async def told(node: Node = node) -> bool:
            return bool((await node.rest.host(left_alone.node_id))["status"] == "Disconnected")

        await until(told, seconds=GONE_SECONDS)
    assert await staying.ended() is grpc.StatusCode.UNAVAILABLE


async def _does(rest: Rest, node_id: str) -> bool:
    """Whether a daemon does something now: until it has come back, a run for it may be refused."""
    body = {"target": f"@{node_id}", "tool": "cmd.run", "args": {"command": "true"}}
    headers = {"accept": "application/json", "idempotency-key": uuid.uuid4().hex}
    begun = await rest.call("POST", "/fleet/invoke", body, headers=headers)
    if begun.status_code >= 300:
        return False
    (found,) = (await rest.ended(begun.json()["fleet_command_id"], seconds=START_SECONDS))["per_node"]
    return bool(found["outcome"] == "ok")


async def _the_active_server_dies(here: Cluster, node_id: str) -> None:
    """Its successor had the daemon before, and has it again: nobody wrote that it was away."""
    since = (await here.other.rest.host(node_id))["since"]
    here.active.process.kill()
    waiting = here.other.waiting
    assert waiting is not None
    await asyncio.to_thread(waiting.until, lambda: waiting.is_ready)
    successor = waiting.server()
    here.balancer.upstream = successor.address("edge", "http").removeprefix("http://")
    headers = here.other.rest.http.headers
    async with httpx.AsyncClient(base_url=successor.web, timeout=SECONDS, headers=headers) as http:
        rest = Rest(http=http, tenant=here.other.rest.tenant)
        await until(lambda: _does(rest, node_id), seconds=START_SECONDS)
        host = await rest.host(node_id)
        assert (host["status"], host["since"]) == ("Connected", since), host
