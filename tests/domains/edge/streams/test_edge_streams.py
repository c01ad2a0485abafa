"""Streams of daemons over a real listener: how they open, what keeps them open, how they end."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.edge.edge_identity_rig import MovableClock
from support.edge.edge_signer import BOSS, CAPABILITIES, Signer, ok
from support.edge.edge_streams_rig import Rig, streams_rig, until

from fleetplane.domains.edge.kinds import EDGE_NODE, Desired
from fleetplane.domains.edge.streams.assembly import StreamOptions
from fleetplane.domains.edge.streams.verification import LAYOUT_PAGE
from fleetplane.fleet.streams.host import StreamPolicy
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.fleetplane.edge.v1 import legacy_pb2, tolerant_pb2

Code = grpc.StatusCode
STRANGER = Ed25519PrivateKey.generate()


# Opening.


async def test_headers_come_right_after_a_good_hello_and_the_state_is_written(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        await until(lambda: rig.state(daemon) == "connected")
        status = rig.node(daemon).status
        assert status is not None
        assert status.capabilities.local_tools == ("shell", "git")
        assert status.stream_id == daemon.sign.stream_id
        assert status.last_heartbeat_at_ns is not None
        assert rig.side.presences.connected("acme") == [daemon.node_id]
        daemon.leave()
        await until(lambda: rig.state(daemon) == "disconnected")
        assert not rig.side.presences.is_connected(daemon.node_id)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"token": "a.b.c"}, Code.UNAUTHENTICATED),
        ({"key": STRANGER}, Code.UNAUTHENTICATED),
        ({"ahead_ms": -301_000}, Code.UNAUTHENTICATED),
        ({"stream_id": "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee"}, Code.UNAUTHENTICATED),
        ({"capabilities": b"\xff"}, Code.INVALID_ARGUMENT),
        ({"metadata": (("authorization", "Bearer a.b.c"),)}, Code.UNAUTHENTICATED),
        ({"metadata": (("authorization", "Basic abc"),)}, Code.UNAUTHENTICATED),
    ],
)
async def test_a_bad_hello_is_turned_away_before_any_header(
    tmp_path: Path, wrong: dict[str, Any], code: Code
) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        assert (await daemon.refusal(**wrong))[0] is code
        assert len(rig.side.presences) == 0
        await daemon.open()  # and a good one is still welcome
        daemon.leave()


async def test_codes_for_those_who_are_known_but_not_welcome(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        public = daemon.identity.public_key
        foreign = rig.tokens.issue_node(daemon.node_id, "rival", public, life_seconds=60)
        assert (await daemon.refusal(token=foreign.token))[0] is Code.PERMISSION_DENIED
        nowhere = "99999999-2222-4333-8444-555555555555"
        unknown = rig.tokens.issue_node(nowhere, "acme", public, life_seconds=60)
        assert (await daemon.refusal(token=unknown.token, node_id=nowhere))[0] is Code.NOT_FOUND
        await rig.nodes.set_desired("acme", daemon.node_id, Desired.SHUTDOWN, actor=BOSS)
        assert (await daemon.refusal())[0] is Code.FAILED_PRECONDITION
        await rig.nodes.revoke("acme", daemon.node_id, reason="stolen", actor=BOSS)
        assert (await daemon.refusal())[0] is Code.FAILED_PRECONDITION


async def test_what_is_no_hello_opens_nothing(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        for raw in (
            tolerant_pb2.EdgeEvent(heartbeat=daemon.sign.heartbeat()).SerializeToString(),
            tolerant_pb2.EdgeEvent(hello=tolerant_pb2.Hello(stream_id="x")).SerializeToString(),
            b"",
            b"\xff\xff\xff",
        ):
            daemon.call = daemon._method()
            await daemon.call.write(raw)
            assert (await daemon.turned_away())[0] is Code.INVALID_ARGUMENT


async def test_who_says_nothing_opens_nothing(tmp_path: Path) -> None:
    quick = StreamOptions(stream=StreamPolicy(hello_seconds=0.2))
    async with streams_rig(tmp_path, options=quick) as rig:
        daemon = await rig.daemon()
        daemon.call = daemon._method()
        assert (await daemon.turned_away())[0] is Code.INVALID_ARGUMENT


async def test_the_bearer_token_of_the_call_may_be_the_nodes_own(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon, other = await rig.daemon(), await rig.enrol()
        await daemon.open(metadata=(("authorization", f"Bearer {daemon.identity.token}"),))
        daemon.leave()
        theirs = (("authorization", f"Bearer {other.token}"),)
        assert (await daemon.refusal(metadata=theirs))[0] is Code.UNAUTHENTICATED


# While it lasts.


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"key": STRANGER}, Code.UNAUTHENTICATED),
        ({"stream_id": "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee"}, Code.UNAUTHENTICATED),
        ({"ahead_ms": 360_000}, Code.UNAUTHENTICATED),  # still ahead of us when it is read late
        ({"inner": b"more"}, Code.UNAUTHENTICATED),
    ],
)
async def test_one_event_that_is_not_believed_ends_the_stream(
    tmp_path: Path, wrong: dict[str, Any], code: Code
) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        await daemon.beat(**wrong)
        assert await daemon.ended() is code
        await until(lambda: rig.state(daemon) == "disconnected")


async def test_a_second_hello_ends_the_stream(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        await daemon.send(hello=daemon.sign.hello())
        assert await daemon.ended() is Code.INVALID_ARGUMENT


async def test_heartbeats_of_both_dialects_are_taken(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        await daemon.beat()
        counted = legacy_pb2.LegacyHeartbeat(envelope=daemon.sign.heartbeat().envelope, active_invocations=3)
        await daemon.call.write(legacy_pb2.LegacyEdgeEvent(heartbeat=counted).SerializeToString())
        await until(lambda: rig.side.streams.heartbeats["acme"] == 2)
        daemon.leave()


async def test_new_capabilities_are_written_at_the_next_heartbeat_and_tags_never(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        boastful = legacy_pb2.LegacyCapabilities(os="linux", tags=["admin"]).SerializeToString()
        await daemon.open(capabilities=boastful)
        await until(lambda: rig.state(daemon) == "connected")
        await daemon.send(capability_update=daemon.sign.update(CAPABILITIES))
        live = rig.side.presences.get(daemon.node_id)
        assert live is not None
        await until(lambda: live.capabilities.arch == "x86_64")
        assert rig.status(daemon).capabilities.arch == ""
        await daemon.beat()
        await until(lambda: rig.status(daemon).capabilities.arch == "x86_64")
        assert rig.node(daemon).spec.tags == ("keep",)
        daemon.leave()


# Ending.


async def test_a_daemon_that_half_closes_is_let_go_with_ok(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        await daemon.call.done_writing()
        assert await daemon.ended() is Code.OK
        await until(lambda: rig.state(daemon) == "disconnected")


async def test_a_newer_stream_ends_the_older_and_keeps_its_place(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        older = await rig.daemon()
        await older.open()
        newer = await rig.client(older.identity)
        await newer.open()
        assert await older.ended() is Code.ABORTED
        live = rig.side.presences.get(newer.node_id)
        assert live is not None
        assert live.seal.stream_id == newer.sign.stream_id
        await newer.beat()
        await until(lambda: rig.side.streams.heartbeats["acme"] == 1)
        assert rig.side.presences.get(newer.node_id) is live
        here = (newer.sign.stream_id, "connected")
        await until(lambda: (rig.status(newer).stream_id, rig.state(newer)) == here)
        newer.leave()


async def test_many_streams_of_one_daemon_at_once_leave_one(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        first = await rig.daemon()
        daemons = [await rig.client(first.identity) for _ in range(8)]
        ended = []

        async def stay(daemon: Any) -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await daemon.open()
            ended.append(await daemon.ended())

        async with asyncio.TaskGroup() as tasks:
            for daemon in daemons:
                tasks.create_task(stay(daemon))
            await until(lambda: len(ended) == 7)
            live = rig.side.presences.get(first.node_id)
            assert live is not None
            assert len(rig.side.presences) == len(rig.side.sessions) == 1
            for daemon in daemons:
                daemon.leave()
        assert ended[:7] == [Code.ABORTED] * 7


async def test_a_revoked_daemons_open_stream_is_cut_before_its_silence_is_noticed(
    tmp_path: Path,
) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        await rig.nodes.revoke("acme", daemon.node_id, reason="stolen", actor=BOSS)
        assert await daemon.ended() is Code.FAILED_PRECONDITION
        await asyncio.sleep(0.1)  # whatever its stream's end writes down must not bring it back
        assert rig.state(daemon) == "revoked"


async def test_a_stopping_server_says_so(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        rig.side.drain()
        assert await daemon.ended() is Code.UNAVAILABLE


async def test_after_a_restart_everyone_is_away_until_they_return(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        await until(lambda: rig.state(daemon) == "connected")
        identity = daemon.identity
        # A server that dies writes nothing: put the record back to what it would have been.
        left_behind = rig.node(daemon).status
        daemon.leave()
        await until(lambda: rig.state(daemon) == "disconnected")
        await _write_status(rig, identity, left_behind)
        assert rig.state(daemon) == "connected"
    async with streams_rig(tmp_path) as rig:
        again = await rig.client(identity)
        assert rig.state(again) == "disconnected"
        await again.open()
        await until(lambda: rig.state(again) == "connected")
        again.leave()


async def _write_status(rig: Rig, identity: Any, status: Any) -> None:
    node = rig.node(identity)
    await rig.store.transact(
        lambda draft: draft.put(EDGE_NODE, node.scope, node.name, spec=node.spec, status=status),
        actor=BOSS,
        action="test",
        touches=[node.key],
    )


# Rotation.


async def test_a_stream_survives_a_rotation_and_is_let_go_after_the_overlap(tmp_path: Path) -> None:
    clock = MovableClock()
    async with streams_rig(tmp_path, clock=clock) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        new = await rig.rotate(daemon.identity, overlap_seconds=120.0)
        await daemon.beat()
        await until(lambda: rig.side.streams.heartbeats["acme"] == 1)
        clock.ahead_seconds = 121
        assert await daemon.ended() is Code.UNAUTHENTICATED
        assert (await daemon.refusal())[0] is Code.UNAUTHENTICATED
        again = await rig.client(new)
        await again.open()
        again.leave()


async def test_two_rotations_within_one_overlap_do_not_cut_the_stream(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open_legacy()
        once = await rig.rotate(daemon.identity, overlap_seconds=60.0)
        await rig.rotate(once, overlap_seconds=60.0)
        for _ in range(3):
            await daemon.beat()
        await until(lambda: rig.side.streams.heartbeats["acme"] == 3)
        live = rig.side.presences.get(daemon.node_id)
        assert live is not None
        await until(lambda: live.credentials_until_ns is not None)  # it is let go when the overlap is over
        daemon.leave()


async def test_work_in_flight_keeps_a_rotated_stream_open_until_it_is_answered(tmp_path: Path) -> None:
    clock = MovableClock()
    async with streams_rig(tmp_path, clock=clock) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        command = await rig.issue(daemon, deadline_seconds=3600)
        call = await daemon.next("invoke_tool")
        await rig.rotate(daemon.identity, overlap_seconds=120.0)
        live = rig.side.presences.get(daemon.node_id)
        assert live is not None
        await until(lambda: live.credentials_until_ns is not None)
        clock.ahead_seconds = 125
        await until(lambda: live.closing)
        await daemon.beat()
        await until(lambda: rig.side.streams.heartbeats["acme"] == 1)
        assert not rig.side.dispatcher.courier.is_present(daemon.node_id), "it gets no new work"
        await daemon.answer(call.command_id)
        await until(lambda: rig.outcome(command, daemon) == "ok")
        assert await daemon.ended() is Code.UNAUTHENTICATED


async def test_a_daemon_that_switches_on_its_stream_keeps_it(tmp_path: Path) -> None:
    clock = MovableClock()
    async with streams_rig(tmp_path, clock=clock) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        await until(lambda: rig.state(daemon) == "connected")  # nothing is written of it any more
        live = rig.side.presences.get(daemon.node_id)
        assert live is not None
        new = await rig.rotate(daemon.identity, overlap_seconds=120.0)
        await until(lambda: live.credentials_until_ns is not None)
        daemon.sign.identity = new
        await daemon.beat()
        await until(lambda: rig.side.streams.heartbeats["acme"] == 1)
        clock.ahead_seconds = 125
        await until(lambda: live.credentials_until_ns is None)
        assert rig.side.dispatcher.courier.is_present(daemon.node_id), "and gets new work"
        await daemon.beat()
        await until(lambda: rig.side.streams.heartbeats["acme"] == 2)
        daemon.leave()


# A client written from the pages.


async def test_the_page_says_what_a_daemon_of_ones_own_signs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[4] / LAYOUT_PAGE.partition("#")[0]).read_text()
    section = page.partition("## A daemon of your own\n")[2]
    shown: dict[str, Any] = {}
    exec(section.partition("```python\n")[2].partition("```")[0], shown)  # our own page
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        other = Signer(identity=daemon.identity, clock=rig.clock, plain=b'{"event": "hello"}')
        code, words = await daemon.refusal(hello=other.hello())
        assert (code, LAYOUT_PAGE in words) == (Code.UNAUTHENTICATED, True)

        sign = Signer(identity=daemon.identity, clock=rig.clock)
        where = (daemon.node_id, sign.stream_id)
        sign.plain = shown["hello"](*where, b"")
        daemon.call = daemon._method(metadata=(("authorization", f"Bearer {daemon.identity.token}"),))
        await daemon.send(hello=sign.hello(capabilities=b""))
        async with asyncio.timeout(60):
            await daemon.call.initial_metadata()
        sign.plain = shown["heartbeat"](*where)
        await daemon.send(heartbeat=sign.heartbeat())
        command = await rig.issue(daemon)
        given = (await daemon.next("invoke_tool")).command_id
        chunk = pb.Chunk(stdout=b"hi")
        sign.plain = shown["progress"](*where, given, chunk.SerializeToString())
        await daemon.send(command_progress=sign.chunk(given, chunk))
        sign.plain = shown["result"](*where, given, ok())
        await daemon.send(command_result=sign.result(given, ok()))
        await until(lambda: rig.outcome(command, daemon) == "ok")
        daemon.leave()
