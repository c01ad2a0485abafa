"""A stream's life, whatever is said on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from support.fleet.stream_rig import Echo, stream_rig

from fleetplane.fleet.streams.host import StreamPolicy
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def code(call: Any) -> grpc.StatusCode:
    async with asyncio.timeout(60):
        try:
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError:
            pass
        found = await call.code()
    assert isinstance(found, grpc.StatusCode)
    return found


async def test_what_an_agent_says_is_taken_in_order_and_its_leaving_is_no_error() -> None:
    async with stream_rig() as rig:
        call = await rig.welcomed("a")
        for number in (1, 2, 3):
            await call.write(pb.AgentMessage(timestamp=number))
            assert (await call.read()).ack.message_id == str(number)
        assert len(rig.presences) == 1
        await call.done_writing()
        assert await code(call) is grpc.StatusCode.OK
        assert rig.presences.get("a") is None
        assert rig.presences.current("a") is None
        assert rig.protocol.said == ["settling", "entered", "arrived", "leaving", "left", "ended: ended"]


async def test_who_has_gone_lingers_if_asked_to_until_it_is_forgotten() -> None:
    async with stream_rig(lingering=True) as rig:
        call = await rig.welcomed("a")
        await call.done_writing()
        assert await code(call) is grpc.StatusCode.OK
        assert rig.presences.get("a") is None
        live = rig.presences.current("a")
        assert live is not None
        assert live.is_over
        again = await rig.welcomed("a")
        assert rig.presences.get("a") not in (None, live), "one that lingers keeps nobody out"
        again.cancel()
        rig.presences.forget("a")
        assert rig.presences.current("a") is None


async def test_without_a_hello_in_time_the_protocol_says_why() -> None:
    async with stream_rig(StreamPolicy(hello_seconds=0.1)) as rig:
        call = rig.stub.Stream()
        assert await code(call) is grpc.StatusCode.INVALID_ARGUMENT
        assert rig.protocol.said == []
        assert len(rig.sessions) == 0


async def test_the_older_stream_is_settled_before_the_newer_has_its_place() -> None:
    async with stream_rig() as rig:
        older = await rig.welcomed("a")
        release = asyncio.Event()
        rig.protocol.settle = lambda _live: release.wait()
        newer = [await rig.open("a") for _ in range(3)]
        await until(lambda: "leaving" in rig.protocol.said)
        await asyncio.sleep(0.05)
        assert rig.protocol.said.count("entered") == 1, "nobody enters while the older one is being settled"
        assert rig.presences.get("a") is None, "and nobody can be given work"
        rig.protocol.settle = None
        release.set()
        assert await code(older) is grpc.StatusCode.UNAVAILABLE
        await until(lambda: rig.protocol.said.count("entered") == 4)  # not all of them arrive
        await until(lambda: rig.protocol.said.count("left") == 3)
        assert len(rig.presences) == 1, "of those that came together, one stays"
        assert rig.protocol.said.count("leaving") == 3, "each stream is settled once"
        for call in newer:
            call.cancel()


async def test_a_newer_stream_that_leaves_while_it_settles_the_older_does_not_leave_it_unsettled() -> None:
    async with stream_rig() as rig:
        older = await rig.welcomed("a")
        release = asyncio.Event()
        rig.protocol.settle = lambda _live: release.wait()
        newer = await rig.open("a")
        await until(lambda: rig.protocol.said.count("leaving") == 1)
        newer.cancel()
        await until(lambda: rig.protocol.said.count("leaving") == 2)
        assert "left" not in rig.protocol.said
        release.set()
        assert await code(older) is grpc.StatusCode.UNAVAILABLE
        assert rig.protocol.said.count("left") == 1
        await rig.welcomed("a")


async def test_a_connection_that_is_cut_while_its_stream_is_settled_leaves_nothing_unsettled() -> None:
    async with stream_rig() as rig:
        call = await rig.welcomed("a")
        release = asyncio.Event()
        rig.protocol.settle = lambda _live: release.wait()
        await call.done_writing()
        await until(lambda: rig.protocol.said.count("leaving") == 1)
        call.cancel()
        await until(lambda: rig.protocol.said.count("leaving") == 2)
        assert rig.presences.current("a") is not None, "it keeps its place until it is settled"
        release.set()
        await until(lambda: rig.protocol.said.count("left") == 1)
        await until(lambda: rig.presences.current("a") is None)


async def test_what_was_left_behind_is_settled_while_the_agent_has_no_stream() -> None:
    async with stream_rig() as rig:
        release = asyncio.Event()
        rig.protocol.before = release.wait
        calls = [await rig.open("a") for _ in range(2)]
        await until(lambda: rig.protocol.said == ["settling", "settling"])
        assert rig.presences.current("a") is None
        release.set()
        await until(lambda: rig.protocol.said.count("entered") == 2)
        said = rig.protocol.said
        assert said.index("left") > said.index("entered"), "the second ends the first, and not the other way"
        last = len(said) - 1 - said[::-1].index("entered")
        assert "settling" in said[said.index("left") : last], "and settles again what that one left behind"
        assert len(rig.presences) == 1
        for call in calls:
            call.cancel()


async def test_a_stream_that_may_not_be_superseded_stays() -> None:
    async with stream_rig() as rig:
        older = await rig.welcomed("a")
        rig.protocol.kept.add("a")
        assert await code(await rig.open("a")) is grpc.StatusCode.PERMISSION_DENIED
        await older.write(pb.AgentMessage(timestamp=5))
        assert (await older.read()).ack.message_id == "5"


async def test_an_error_after_entering_gives_the_place_up() -> None:
    async with stream_rig() as rig:
        rig.protocol.fail_after_entering = True
        call = await rig.open("a")
        assert await code(call) is grpc.StatusCode.UNAVAILABLE
        assert rig.protocol.said == ["settling", "entered", "leaving", "left"]
        assert rig.presences.current("a") is None
        assert len(rig.sessions) == 0


async def test_a_message_that_is_not_taken_ends_the_stream_after_a_last_word() -> None:
    async with stream_rig() as rig:
        call = await rig.welcomed("a")
        await call.write(pb.AgentMessage(timestamp=-1))
        assert (await call.read()).error.code == "BAD"
        assert await code(call) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_settling_that_fails_keeps_nobody_out() -> None:
    async def fail(_live: Echo) -> None:
        raise RuntimeError("the store is gone")

    async with stream_rig() as rig:
        call = await rig.welcomed("a")
        rig.protocol.settle = fail
        await call.done_writing()
        assert await code(call) is grpc.StatusCode.UNKNOWN
        rig.protocol.settle = None
        await rig.welcomed("a")


async def test_an_agent_that_is_being_let_in_at_the_end_is_turned_away() -> None:
    async with stream_rig() as rig:
        release = asyncio.Event()
        rig.protocol.before = release.wait
        call = await rig.open("a")
        await until(lambda: rig.protocol.said == ["settling"])
        rig.host.stop()
        release.set()
        assert await code(call) is grpc.StatusCode.UNAVAILABLE
        assert rig.protocol.said == ["settling"]
        assert len(rig.sessions) == 0


async def test_at_the_end_all_agents_get_a_last_message() -> None:
    async with stream_rig() as rig:
        calls = [await rig.welcomed(name) for name in ("a", "b")]
        rig.host.stop(lambda live: pb.MasterMessage(error=pb.Error(code="BYE", message=live.agent)))
        for name, call in zip("ab", calls, strict=True):
            assert (await call.read()).error.message == name
            assert await code(call) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("cut", [False, True])
async def test_a_write_that_waits_ends_with_a_session_that_is_cut_and_not_with_one_that_is_flushed(
    cut: bool,
) -> None:
    async with stream_rig(StreamPolicy(write_seconds=30.0, queue_limit=4)) as rig:
        call = await rig.welcomed("a")
        live = rig.presences.get("a")
        assert live is not None
        large = pb.MasterMessage(error=pb.Error(message="x" * 200_000))
        sent = 0
        async with asyncio.timeout(60):
            stalled = 0
            while stalled < 20:
                if live.session.offer(large):
                    sent, stalled = sent + 1, 0
                    await asyncio.sleep(0)
                else:
                    stalled += 1
                    await asyncio.sleep(0.01)
        live.session.close("test", flush=not cut)
        if cut:
            await until(lambda: live.is_over)
            call.cancel()
            return
        received = 0
        async with asyncio.timeout(60):
            try:
                while await call.read() is not grpc.aio.EOF:
                    received += 1
            except grpc.aio.AioRpcError:
                pass
        assert received == sent, "whoever reads on gets all that was queued"
