"""What every stream gets from its host, shown with agents: let go, slowed, cut off, settled."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from support.instances.agents_rig import BOSS, FakeAgent, Rig, agents_rig, until

from fleetplane.domains.proxies.agents.records import actor
from fleetplane.domains.proxies.agents.stream import STREAM_POLICY
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.rpc import Rate

LARGE = pb.MasterMessage(error=pb.Error(code="X", message="x" * 200_000))


async def fill(rig: Rig, agent: FakeAgent) -> None:
    """Send until the transport takes no more and the queue is full, or the stream has ended."""
    live = rig.side.presences.get(agent.agent_id)
    assert live is not None
    async with asyncio.timeout(60):
        while live.session.is_open:
            if not live.session.offer(LARGE):
                refused = live.session.queued
                await asyncio.sleep(0.05)
                if live.session.queued == refused:
                    return
            await asyncio.sleep(0)


async def test_an_agent_that_does_not_read_is_let_go(tmp_path: Path) -> None:
    policy = replace(STREAM_POLICY, write_seconds=0.3, queue_limit=4)
    async with agents_rig(tmp_path, stream=policy) as rig:
        agent = await rig.agent("web-01")
        await agent.open()
        while (live := rig.side.presences.get(agent.agent_id)) is not None:
            live.session.offer(LARGE)  # more than it has room for, sooner or later
            await asyncio.sleep(0.01)
        assert await agent.ended() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_an_agent_that_says_too_much_is_slowed_and_loses_nothing(tmp_path: Path) -> None:
    pace = Rate(per_second=40.0, burst=10)
    async with agents_rig(tmp_path, stream=replace(STREAM_POLICY, pace=pace)) as rig:
        agent = await rig.agent("web-01")
        await agent.open()
        began = time.monotonic()
        sent = [str(await agent.send(metrics=pb.MetricsBatch())) for _ in range(40)]
        received, moments = [], []
        for _ in sent:
            received.append((await agent.next("ack")).message_id)
            moments.append(time.monotonic() - began)
        assert received == sent
        # One more than the burst may pass before the first wait.
        due = [(number - pace.burst - 1) / pace.per_second for number in range(1, 41)]
        assert all(at >= least - 0.05 for at, least in zip(moments, due, strict=True))


async def test_an_ordinary_agent_is_not_slowed(tmp_path: Path) -> None:
    """It comes back with what it gathered while it was away."""
    gathered = 300
    assert STREAM_POLICY.pace is not None
    assert STREAM_POLICY.pace.burst > gathered, "none of them waits"
    async with agents_rig(tmp_path) as rig:
        agent = await rig.agent("web-01")
        await agent.open()
        for _ in range(gathered):
            await agent.send(metrics=pb.MetricsBatch())
        for _ in range(gathered):
            await agent.next("ack")


async def test_a_revocation_ends_an_open_stream_long_before_its_silence_is_noticed(tmp_path: Path) -> None:
    async with agents_rig(tmp_path) as rig:
        agent = await rig.agent("web-01")
        await agent.open()
        await rig.revocations.revoke(principal=actor(agent.agent_id), reason="stolen", actor=BOSS)
        assert (await agent.next("error")).code == "UNAUTHENTICATED"
        assert await agent.ended() is grpc.StatusCode.UNAUTHENTICATED
        assert not (await agent.open()).success


async def test_a_revocation_does_not_wait_for_an_agent_that_does_not_read(tmp_path: Path) -> None:
    async with agents_rig(tmp_path, stream=replace(STREAM_POLICY, queue_limit=4)) as rig:
        agent = await rig.agent("web-01")
        await agent.open()
        await fill(rig, agent)
        live = rig.side.presences.get(agent.agent_id)
        assert live is not None
        await rig.revocations.revoke(principal=actor(agent.agent_id), reason="stolen", actor=BOSS)
        await until(lambda: live.is_over)


async def test_of_many_streams_at_once_the_last_stays_and_each_older_is_told(tmp_path: Path) -> None:
    async with agents_rig(tmp_path) as rig:
        first = await rig.agent("web-01")
        streams = [first, *(FakeAgent(first.stub, first.token, first.agent_id) for _ in range(5))]
        for stream in streams:
            assert (await stream.open()).success
        for older in streams[:-1]:
            assert await older.ended() is grpc.StatusCode.ABORTED
        live = rig.side.presences.get(first.agent_id)
        assert live is not None
        logs = await streams[-1].send(logs=pb.LogBatch())
        assert (await streams[-1].next("ack")).message_id == str(logs)
        assert rig.side.presences.get(first.agent_id) is live


async def test_an_agent_that_comes_while_the_server_stops_is_not_told_that_it_is_refused(
    tmp_path: Path,
) -> None:
    async with agents_rig(tmp_path) as rig:
        agent = await rig.agent("web-01")
        rig.side.drain()
        with pytest.raises((EOFError, grpc.aio.AioRpcError)):
            await agent.open()
        assert await agent.call.code() is grpc.StatusCode.UNAVAILABLE
