"""A server that was stopped, stalled or given another time takes nobody for silent because of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
from domains.boards.inventory.test_board_liveness import INTERVAL, watchtower
from domains.gpus.device_api import device_api
from support.edge import edge_streams_rig
from support.instances import agents_rig
from support.instances.controller_rig import rig, wanted
from support.shared.server_process import ServerProcess, running_server

from fleetplane.domains.boards.kinds import BoardState
from fleetplane.domains.edge.streams.assembly import StreamOptions
from fleetplane.domains.gpus.rules import GpuPolicy
from fleetplane.domains.instances.rules.decide import State
from fleetplane.domains.proxies.agents.controller import AgentPolicy
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, gpu_pb2_grpc, provider_pb2, provider_pb2_grpc
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.stalls import StallDetector
from fleetplane.sim.clock import VirtualClock

LEASE_SECONDS = 6.0


@contextmanager
def stopped(server: ServerProcess, seconds: float) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def test_a_stopped_server_takes_no_provider_for_silent_when_it_goes_on(tmp_path: Path) -> None:
    arguments = ("--only", "gpus", "--set", f"gpus.lease_seconds={LEASE_SECONDS}")
    with running_server(tmp_path, *arguments) as server, grpc.insecure_channel(server.socket) as channel:
        provider = provider_pb2_grpc.ProviderServiceStub(channel)
        consumer = gpu_pb2_grpc.GpuServiceStub(channel)
        provider.RegisterGpu(provider_pb2.RegisterGpuRequest(name="gpu-1", spec={"uuid": "GPU-1"}))
        heartbeat = provider_pb2.HeartbeatRequest(provider_id="nvml", gpu_names=["gpu-1"])
        provider.UpdateGpuCondition(
            provider_pb2.UpdateGpuConditionRequest(
                name="gpu-1",
                provider_id="nvml",
                condition={"type": "NVMLReady", "status": "True", "reason": "Fine"},
            )
        )
        provider.Heartbeat(heartbeat)
        watch = consumer.WatchGpus(gpu_pb2.WatchGpusRequest())
        assert next(watch).object.name == "gpu-1"

        with stopped(server, 1.5 * LEASE_SECONDS):
            pass
        began = time.monotonic()
        provider.Heartbeat(heartbeat, timeout=60)
        silenced = next(watch)  # and a provider that really is silent is found out in the next term
        assert silenced.object.status.conditions[0].reason == "ProviderSilent"
        assert time.monotonic() - began > LEASE_SECONDS / 2, "it was not taken for silent when we went on"
        events = {line["event"] for line in server.logged()}
        assert "server.gap" in events
        assert server.stop() == 0


async def stalled(clock: VirtualClock) -> None:
    """Ten minutes in which nobody was heard, and everything that fell due meanwhile comes at once."""
    clock.stall(600)
    await clock.advance(0)


@asynccontextmanager
async def beating(attention: StallDetector) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(attention.run())
        await asyncio.sleep(0)
        yield
        running.cancel()


async def test_a_paused_machine_costs_no_provider_its_lease(tmp_path: Path) -> None:
    clock = VirtualClock()
    policy = GpuPolicy(lease_seconds=30)
    async with device_api(tmp_path, policy=policy, clock=clock) as api, beating(api.attention):
        await api.register("gpu-1")
        await api.set_condition("gpu-1", "NVMLReady", "True", provider="nvml", reason="Fine")
        await api.heartbeat("nvml", ["gpu-1"])
        await clock.advance(20)
        clock.stall(3600)
        await clock.advance(29)
        assert (await api.get("gpu-1")).status.conditions[0].reason == "Fine"
        await clock.advance(2)
        async with asyncio.timeout(60):
            while (await api.get("gpu-1")).status.conditions[0].reason != "ProviderSilent":
                await asyncio.sleep(0.01)


async def test_a_stalled_server_drains_nobody_when_it_comes_back(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(3), silence_share=1.0) as place, beating(place.attention):
        names = await place.grown(3)
        await stalled(place.clock)
        place.silent.update(names)
        await place.advance(29)
        assert place.names(State.REGISTERED) == names
        place.silent.clear()
        await place.advance(40)
        assert place.names(State.REGISTERED) == names


async def test_a_clock_set_forward_or_back_drains_nobody_and_hides_nobody(tmp_path: Path) -> None:
    for number, seconds in enumerate((86_400.0, -86_400.0)):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with rig(folder, wanted(3), silence_share=1.0) as place, beating(place.attention):
            names = await place.grown(3)
            place.silent.update(names[:1])
            place.clock.step(seconds)
            await place.advance(29)
            assert place.names(State.REGISTERED) == names
            await place.advance(12)  # one look at the provider's list later at most
            assert place.names(State.DRAINING) == names[:1]


async def test_an_instance_whose_agent_could_not_register_meanwhile_gets_its_time(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(1)) as place, beating(place.attention):
        await place.advance(5)
        [name] = place.names(State.PROVISIONED)
        await stalled(place.clock)
        await place.advance(50)
        assert place.names(State.PROVISIONED) == [name]


class PausedClock(SystemClock):
    """The machine's clock, that can be as if everything had stood still for a while."""

    def __init__(self) -> None:
        self._paused_seconds = 0.0

    def pause(self, seconds: float) -> None:
        self._paused_seconds += seconds

    def now_ns(self) -> int:
        return super().now_ns() + round(self._paused_seconds * 1e9)

    def monotonic(self) -> float:
        return time.monotonic() + self._paused_seconds


async def test_a_paused_server_takes_no_proxy_agent_for_gone(tmp_path: Path) -> None:
    clock = PausedClock()
    attention = StallDetector(clock)
    policy = AgentPolicy(heartbeat_seconds=6, missed_heartbeats=3, reconnect_seconds=60)
    async with (
        beating(attention),
        agents_rig.agents_rig(tmp_path, policy=policy, clock=clock, attention=attention) as rig,
    ):
        agent = await rig.agent("web-01")
        await agent.open()
        await agents_rig.until(lambda: rig.state(agent.agent_id) == "online")
        clock.pause(600)
        await asyncio.sleep(2.5)  # two looks at who is silent
        assert rig.state(agent.agent_id) == "online"
        clock.pause(1)
        await agents_rig.until(lambda: rig.state(agent.agent_id) == "offline", seconds=60)


async def test_a_paused_server_takes_no_daemon_for_unhealthy(tmp_path: Path) -> None:
    clock = PausedClock()
    attention = StallDetector(clock)
    options = StreamOptions(stale_seconds=15.0)
    async with (
        beating(attention),
        edge_streams_rig.streams_rig(tmp_path, clock=clock, options=options, attention=attention) as rig,
    ):
        daemon = await rig.daemon()
        await daemon.open()
        live = rig.side.presences.get(daemon.node_id)
        assert live is not None
        clock.pause(600)
        await asyncio.sleep(2.5)
        assert not live.silent
        await edge_streams_rig.until(lambda: live.silent, seconds=60)
        daemon.leave()


async def test_a_paused_server_takes_no_board_for_not_ready(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with watchtower(tmp_path, clock) as tower, beating(tower.attention):
        number = await tower.come()
        clock.stall(86_400)
        await tower.wait(3 * INTERVAL - 2)
        assert tower.state(number) is BoardState.READY
        await tower.wait(4)
        await tower.sees(number, BoardState.NOT_READY)
