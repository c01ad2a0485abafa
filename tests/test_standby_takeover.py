"""Two real servers on one PostgreSQL: the one that takes over keeps all that is connected to it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from support.cluster.daemons import Book, book
from support.edge.edge_daemon_rig import running
from support.edge.edge_site import Rest, Site, a_tenant, until
from support.shared.postgres_server import PostgresServer
from support.shared.server_process import START_SECONDS, STOP_SECONDS, ServerProcess, running_server
from support.shared.waiting_server import WaitingServer, patient

from fleetplane.domains.edge.agent.assembly import Reach
from fleetplane.domains.edge.agent.identity.enrolment import Enroller, EnrolmentRequest
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, gpu_pb2_grpc, provider_pb2, provider_pb2_grpc
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.presence.departures import PresenceSpec

SECONDS = 60.0
VERIFY = "/v1/fleet/audit/verify"
"""Only the active server does it."""


@dataclass(slots=True, kw_only=True)
class Cluster:
    active: ServerProcess
    standby: WaitingServer
    web: httpx.AsyncClient
    """An owner's, at the standby."""
    rest: Rest
    """An operator's of one tenant, there."""
    device_api: grpc.aio.Channel
    """There."""
    log: Book

    async def register(self, gpu: str) -> None:
        stub = provider_pb2_grpc.ProviderServiceStub(self.device_api)
        await stub.RegisterGpu(provider_pb2.RegisterGpuRequest(name=gpu), timeout=SECONDS)

    async def verifies(self) -> int:
        return (await self.web.post(VERIFY, json={})).status_code


@asynccontextmanager
async def cluster(folder: Path, postgres: PostgresServer) -> AsyncIterator[Cluster]:
    url, tenant = postgres.database(), a_tenant()
    environment = {
        **patient(reads=True),
        "FLEETPLANE_STORE__URL": url,
        "FLEETPLANE_IDENTITY__MASTER_KEY": base64.b64encode(secrets.token_bytes(32)).decode(),
    }
    only = ("--set", "only=edge,gpus", "--set", "edge.attests_per_minute=0")
    async with AsyncExitStack() as stack:
        opened = running_server(folder / "one", *only, environment=environment)
        active = await asyncio.to_thread(opened.__enter__)
        stack.push_async_callback(asyncio.to_thread, opened.__exit__, None, None, None)
        site = Site(server=active, data_dir=folder / "one")
        tokens = await asyncio.to_thread(lambda: (site.token("owner"), site.token(tenant=tenant)))
        standby = stack.enter_context(WaitingServer(folder / "two", environment, *only))
        await asyncio.to_thread(standby.until, lambda: "standby.reads_served" in standby.told())
        lines = (json.loads(line) for line in standby.told().splitlines() if line.startswith("{"))
        at = next(line for line in lines if line["event"] == "standby.reads_served")
        owner, operator = [
            await stack.enter_async_context(
                httpx.AsyncClient(
                    base_url=at["web"][0], timeout=SECONDS, headers={"authorization": f"Bearer {token}"}
                )
            )
            for token in tokens
        ]
        channel = grpc.aio.insecure_channel(at["device-api"][0])
        yield Cluster(
            active=active,
            standby=standby,
            web=owner,
            rest=Rest(http=operator, tenant=tenant),
            device_api=await stack.enter_async_context(channel),
            log=await stack.enter_async_context(book(url)),
        )


async def _daemon(here: Cluster, folder: Path) -> tuple[str, StateFolder]:
    """One that was let in at the standby, and dials there."""
    state = StateFolder(folder)
    enroller = Enroller(folder=state, connect=Reach().channel, clock=SystemClock())
    await enroller.enrol(EnrolmentRequest(token=await here.rest.invite("ours")))
    (node,) = (await here.rest.get("/hosts"))["items"]
    return str(node["node_id"]), state


async def _session(here: Cluster, node_id: str) -> PresenceSpec:
    await here.log.read()
    return here.log.presences[node_id]


class Watch:
    """Events of one connection to the standby, which is never opened a second time."""

    def __init__(self, here: Cluster) -> None:
        self._here = here
        self.seen: list[str] = []
        self.has_ended = False

    async def follow(self) -> None:
        async with self._here.web.stream("GET", "/apis/v1/watch?of=gpus", timeout=None) as stream:
            async for line in stream.aiter_lines():
                found = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {}
                if name := found.get("metadata", {}).get("name"):
                    self.seen.append(name)
        self.has_ended = True


class GpuWatch:
    """The same over gRPC."""

    def __init__(self, here: Cluster) -> None:
        self._here = here
        self.seen: list[str] = []
        self.has_ended = False

    async def follow(self) -> None:
        stub: Any = gpu_pb2_grpc.GpuServiceStub(self._here.device_api)
        try:
            async for event in stub.WatchGpus(gpu_pb2.WatchGpusRequest()):
                self.seen.append(event.object.name)
        finally:
            self.has_ended = True


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_agents_and_watches_of_a_server_that_takes_over_notice_nothing(
    tmp_path: Path, postgres: PostgresServer, how: signal.Signals
) -> None:
    async with cluster(tmp_path, postgres) as here, asyncio.TaskGroup() as tasks:
        node_id, state = await _daemon(here, tmp_path / "daemon")
        async with running(state):
            await here.rest.connected(node_id)
            before = await _session(here, node_id)
            assert before.is_open
            states = list(here.log.states[node_id])
            watches = Watch(here), GpuWatch(here)
            following = [tasks.create_task(watch.follow()) for watch in watches]
            await here.register("before")
            for watch in watches:
                await until(lambda: "before" in watch.seen)  # noqa: B023
            assert await here.verifies() == 503

            os.kill(here.active.pid, how)
            await asyncio.to_thread(here.active.process.wait, STOP_SECONDS)
            await asyncio.to_thread(here.standby.until, lambda: here.standby.is_ready, START_SECONDS)

            await here.register("after")
            for watch in watches:
                await until(lambda: "after" in watch.seen)  # noqa: B023
                assert (watch.seen, watch.has_ended) == (["before", "after"], False)
            (found,) = (await here.rest.do(f"@{node_id}", script="echo here"))["per_node"]
            assert (found["outcome"], found["stdout_tail"]) == ("ok", "here\n")
            after = await _session(here, node_id)
            assert (after.session, after.server, after.is_open) == (before.session, before.server, True)
            assert await here.verifies() == 200
            assert here.log.states[node_id] == states, "nobody wrote that it was away"
            for task in following:
                task.cancel()


@pytest.mark.timeout(600)
def test_a_server_that_could_not_serve_while_it_stood_by_takes_over_all_the_same(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    environment = {
        **patient(reads=True),
        "FLEETPLANE_STORE__URL": postgres.database(),
        "FLEETPLANE_IDENTITY__MASTER_KEY": base64.b64encode(secrets.token_bytes(32)).decode(),
    }
    with running_server(tmp_path / "one", "--only", "gpus", environment=environment) as one:
        taken = ("--set", f"listeners.web.addresses={one.web.removeprefix('http://')}")
        with WaitingServer(tmp_path / "two", environment, "--only", "gpus", *taken) as two:
            two.until(lambda: "standby.reads_not_served" in two.told())
            assert not two.is_ready
            os.kill(one.pid, signal.SIGKILL)
            one.process.wait(STOP_SECONDS)
            two.until(lambda: two.is_ready, START_SECONDS)
            server = two.server()
            assert server.web == one.web
            assert httpx.get(f"{server.web}/readyz", timeout=SECONDS).status_code == 200
            assert server.stop() == 0
