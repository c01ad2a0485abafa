"""What daemons are told beside tool calls, and that they did it."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import grpc
from support.edge.edge_signer import BOSS, CAPABILITIES, legacy, ok
from support.edge.edge_streams_rig import Daemon, streams_rig, until

from fleetplane.domains.blueprint import run_both
from fleetplane.domains.edge.kinds import Desired
from fleetplane.domains.edge.nodes.config_layers import LayerPlace, version_of
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.fleetplane.edge.v1 import legacy_pb2

Code = grpc.StatusCode
ACME = LayerPlace(tenant="acme")


async def tell(daemon: Daemon, about: str, state: str, message: str = "") -> None:
    chunk = pb.Chunk(status=pb.StatusUpdate(state=state, message=message))
    await daemon.send(command_progress=daemon.sign.chunk(about, chunk))


def acknowledged(capabilities: pb.EdgeCapabilities, version: str) -> pb.EdgeCapabilities:
    made = pb.EdgeCapabilities.FromString(capabilities.SerializeToString())
    made.config_version = version
    return made


async def test_a_configuration_is_pushed_at_the_start_and_at_every_change(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await rig.layers.put(ACME, {"level": 1}, actor=BOSS)
        await daemon.open()
        pushed = await daemon.next("push_config")
        assert json.loads(pushed.config_delta) == {"level": 1}
        assert pushed.version == version_of(pushed.config_delta)
        await tell(daemon, pushed.version, "config-applied", pushed.version)
        await daemon.beat()
        await until(lambda: rig.status(daemon).config_version == pushed.version)

        await rig.layers.put(LayerPlace(tenant="acme", node_id=daemon.node_id), {"mine": True}, actor=BOSS)
        assert json.loads((await daemon.next("push_config")).config_delta) == {"level": 1, "mine": True}
        await rig.layers.put(LayerPlace(), {"all": 0}, actor=BOSS)
        assert json.loads((await daemon.next("push_config")).config_delta)["all"] == 0
        daemon.leave()


async def test_what_is_set_while_the_server_starts_reaches_those_who_are_there_already(
    tmp_path: Path,
) -> None:
    async with streams_rig(tmp_path, runs=False) as rig, asyncio.TaskGroup() as tasks:
        daemon, other = await rig.daemon(), await rig.daemon()
        await daemon.open()
        await other.open()
        await until(lambda: len(list(rig.side.presences)) == 2)
        await rig.nodes.set_desired("acme", other.node_id, Desired.DRAINING, actor=BOSS)
        await rig.layers.put(ACME, {"level": 1}, actor=BOSS)
        running = tasks.create_task(run_both(rig.side))
        await other.next("drain")
        assert json.loads((await daemon.next("push_config")).config_delta) == {"level": 1}
        running.cancel()
        daemon.leave()
        other.leave()


async def test_what_was_acknowledged_is_not_pushed_again(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        layer = await rig.layers.put(ACME, {"level": 1}, actor=BOSS)
        version = layer.spec.version
        await daemon.open()
        await daemon.next("push_config")
        await daemon.send(capability_update=daemon.sign.update(acknowledged(CAPABILITIES, version)))
        await daemon.beat()
        await until(lambda: rig.status(daemon).config_version == version)
        # It says itself what it has; then the drain is the first thing it is told.
        await rig.nodes.set_desired("acme", daemon.node_id, Desired.DRAINING, actor=BOSS)
        await daemon.next("drain")
        await daemon.open(capabilities=acknowledged(CAPABILITIES, version).SerializeToString())
        assert (await daemon.read()).WhichOneof("command") == "drain"
        # And one that lost it gets it again.
        await daemon.open()
        assert (await daemon.read()).WhichOneof("command") == "push_config"
        daemon.leave()


async def test_a_configuration_that_comes_back_before_its_follower_was_acknowledged_is_sent_again(
    tmp_path: Path,
) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await rig.layers.put(ACME, {"level": 1}, actor=BOSS)
        await daemon.open()
        first = await daemon.next("push_config")
        await tell(daemon, first.version, "config-applied", first.version)
        await until(lambda: rig.status(daemon).config_version == first.version)
        await rig.layers.put(ACME, {"level": 2}, actor=BOSS)
        second = await daemon.next("push_config")
        assert second.version != first.version
        await rig.layers.put(ACME, {"level": 1}, actor=BOSS)  # the daemon is still at the second
        assert (await daemon.next("push_config")).version == first.version
        daemon.leave()


async def test_a_refused_configuration_is_not_sent_again_on_the_stream(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await rig.layers.put(ACME, {"level": 1}, actor=BOSS)
        await daemon.open()
        pushed = await daemon.next("push_config")
        await tell(daemon, pushed.version, "config-refused", "no such level")
        live = rig.side.presences.get(daemon.node_id)
        assert live is not None
        await until(lambda: live.config_refused == "no such level")
        await rig.nodes.set_desired("acme", daemon.node_id, Desired.DRAINING, actor=BOSS)
        assert (await daemon.read()).WhichOneof("command") == "drain"
        assert live.config_version == ""
        daemon.leave()


async def test_a_daemon_in_the_field_gets_a_struct_when_it_is_idle(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon(legacy=True)
        await daemon.open_legacy()
        await rig.issue(daemon)
        call = await daemon.next("invoke_tool")
        await rig.layers.put(ACME, {"level": 1, "deep": {"a": [True, None]}}, actor=BOSS)
        await daemon.answer(call.command_id, legacy(ok=True), digest=False)
        raw = await daemon.read_bytes()
        command = legacy_pb2.LegacyEdgeCommand.FromString(raw)
        assert command.push_config.merged_config_delta["level"] == 1
        assert pb.EdgeCommand.FromString(raw).HasField("envelope")  # which it passes over
        await daemon.beat()  # the stream goes on
        await until(lambda: rig.side.streams.heartbeats["acme"] == 1)
        daemon.leave()


async def test_a_configuration_arrives_before_the_call_that_follows_it(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await rig.issue(daemon, wait=True)
        await rig.layers.put(ACME, {"level": 1}, actor=BOSS)
        await daemon.open()
        kinds = [(await daemon.read()).WhichOneof("command") for _ in range(2)]
        assert kinds == ["push_config", "invoke_tool"]
        daemon.leave()


async def test_a_removed_configuration_is_taken_back(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await rig.layers.put(ACME, {"level": 1}, actor=BOSS)
        await daemon.open()
        await daemon.next("push_config")
        await rig.layers.remove(ACME, actor=BOSS)
        assert (await daemon.next("push_config")).config_delta == b"{}"
        daemon.leave()


# Draining.


async def test_a_draining_daemon_finishes_what_it_has_and_gets_nothing_new(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        command = await rig.issue(daemon)
        call = await daemon.next("invoke_tool")
        await rig.nodes.set_desired("acme", daemon.node_id, Desired.DRAINING, actor=BOSS)
        await daemon.next("drain")
        assert rig.outcome(await rig.issue(daemon), daemon) == "undeliverable"
        await daemon.answer(call.command_id, ok())
        await until(lambda: rig.outcome(command, daemon) == "ok")
        await tell(daemon, "drain", "drained")
        live = rig.side.presences.get(daemon.node_id)
        assert live is not None
        await until(lambda: live.drained)
        assert rig.side.dispatcher.ignored == 0, "an acknowledgement is not output of a command"
        daemon.leave()


async def test_a_drain_that_is_taken_back_ends_the_stream_so_that_the_next_takes_work(
    tmp_path: Path,
) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        await rig.nodes.set_desired("acme", daemon.node_id, Desired.DRAINING, actor=BOSS)
        await daemon.next("drain")
        await rig.nodes.set_desired("acme", daemon.node_id, Desired.ACTIVE, actor=BOSS)
        assert await daemon.ended() is Code.UNAVAILABLE
        await daemon.open()
        await rig.issue(daemon)
        await daemon.next("invoke_tool")
        daemon.leave()


# Stopping.


async def test_a_shutdown_names_its_grace_and_keeps_the_daemon_away(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        await rig.nodes.set_desired("acme", daemon.node_id, Desired.SHUTDOWN, grace_seconds=62.5, actor=BOSS)
        grace = (await daemon.next("shutdown")).grace
        assert (grace.seconds, grace.nanos) == (62, 500_000_000)
        assert rig.outcome(await rig.issue(daemon), daemon) == "undeliverable"
        await daemon.call.done_writing()
        assert await daemon.ended() is Code.OK
        assert (await daemon.refusal())[0] is Code.FAILED_PRECONDITION
        await rig.nodes.set_desired("acme", daemon.node_id, Desired.ACTIVE, actor=BOSS)
        await daemon.open()
        daemon.leave()


async def test_a_daemon_that_does_not_stop_loses_its_stream_after_the_grace(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        began = time.monotonic()
        await rig.nodes.set_desired("acme", daemon.node_id, Desired.SHUTDOWN, actor=BOSS)
        await daemon.next("shutdown")
        assert await daemon.ended() is Code.OK
        assert time.monotonic() - began >= 4.5


async def test_what_is_in_force_is_this_daemons_word_on_this_stream(tmp_path: Path) -> None:
    """A daemon in the field takes the place of ours and ignores what is pushed: nothing is said of it."""
    async with streams_rig(tmp_path) as rig:
        ours = await rig.daemon()
        layer = await rig.layers.put(ACME, {"level": 1}, actor=BOSS)
        said = pb.EdgeCapabilities(config_version=layer.spec.version).SerializeToString()
        await ours.open(capabilities=said)
        await until(lambda: rig.status(ours).config_version == layer.spec.version)
        ours.leave()
        await until(lambda: rig.state(ours) == "disconnected")
        field = await rig.client(ours.identity)
        await field.open_legacy()
        await field.next("push_config")
        await until(lambda: rig.state(field) == "connected")
        assert rig.status(field).config_version == ""
        field.leave()
