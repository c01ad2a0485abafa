"""Commands on their way to daemons of both kinds and back, over a real listener."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path

import grpc
import pytest
from support.edge.edge_identity_rig import MovableClock
from support.edge.edge_signer import legacy, ok
from support.edge.edge_streams_rig import Daemon, Rig, streams_rig, until

from fleetplane.domains.edge.kinds import PayloadDialect
from fleetplane.domains.edge.nodes.config_layers import LayerPlace
from fleetplane.domains.edge.streams.assembly import StreamOptions
from fleetplane.domains.edge.streams.call_encoding import TAIL_BYTES, ToolCall, public_id
from fleetplane.domains.edge.streams.tool_calls import Dispatcher, DispatchPolicy
from fleetplane.domains.edge.wire.messages import CommandProgress
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.fleetplane.edge.v1 import tolerant_pb2
from fleetplane.kernel.commands import Command
from fleetplane.kernel.errors import InvalidArgument

Code = grpc.StatusCode
ACME = LayerPlace(tenant="acme")


def claims_of(token: str) -> dict[str, object]:
    segment = token.split(".")[1]
    found: dict[str, object] = json.loads(base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4)))
    return found


async def test_a_call_is_what_a_daemon_in_the_field_accepts_and_ours_can_verify(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        command = await rig.issue(daemon, deadline_seconds=7.2)
        raw = await daemon.read_bytes()
        rig.check_seals(raw, daemon)
        call = pb.EdgeCommand.FromString(raw).invoke_tool
        seal = call.seal_envelope
        assert call.command_id == public_id(command)
        assert (call.tool_name, dict(call.args)) == ("cmd.run", {"command": "true", "count": 3.0})
        assert (call.deadline.seconds, call.deadline.nanos) == (8, 0), "whole seconds, never fewer"
        assert call.security_context_name == seal.security_context_name == "zaru-free"
        assert seal.tenant_id == "acme"
        assert all(seal.user_security_token.split("."))
        assert len(seal.user_security_token.split(".")) == 3
        said = claims_of(seal.user_security_token)
        assert (said["sub"], said["tid"], said["scp"]) == ("user/boss", "acme", "zaru-free")
        assert said["jti"] == call.command_id
        assert seal.payload["tool_name"] == "cmd.run"
        daemon.leave()


async def test_a_command_of_another_stream_does_not_pass_for_this_ones(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        await rig.issue(daemon)
        raw = await daemon.read_bytes()
        other = await rig.daemon()
        with pytest.raises(AssertionError):
            rig.check_seals(raw, other)
        daemon.leave()


async def test_one_call_to_many_is_signed_for_once(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemons = [await rig.daemon() for _ in range(3)]
        for daemon in daemons:
            await daemon.open()
        await rig.issue(*daemons)
        calls = [await daemon.next("invoke_tool") for daemon in daemons]
        assert len({call.seal_envelope.signature for call in calls}) == 1
        for daemon in daemons:
            daemon.leave()


@pytest.mark.parametrize("levels", [40, 900])
async def test_a_stored_call_that_cannot_be_sealed_has_an_outcome_and_cuts_nobody_off(
    tmp_path: Path, levels: int
) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        deep = b'{"a":' * levels + b"1" + b"}" * levels
        stored = await rig.issue(daemon, wait=True, args_json=deep)
        good = await rig.issue(daemon, wait=True)
        await daemon.open()
        assert (await daemon.next("invoke_tool")).command_id == public_id(good)
        assert rig.outcome(stored, daemon) == "undeliverable"
        status = rig.target(stored, daemon).status
        assert status is not None
        assert status.detail == "it cannot be sent: is nested deeper than 31 levels"
        daemon.leave()


# Results.


async def result_of(rig: Rig, daemon: Daemon, result: bytes, *, digest: bool = True) -> tuple[str, Command]:
    command = await rig.issue(daemon)
    call = await daemon.next("invoke_tool")
    await daemon.answer(call.command_id, result, digest=digest)
    await until(lambda: rig.outcome(command, daemon) not in ("sent", "waiting"))
    return rig.outcome(command, daemon), command


async def test_results_of_the_documented_dialect_in_every_arm(tmp_path: Path) -> None:
    timed_out = pb.EdgeResult(timed_out=pb.EdgeResult.TimedOut())
    cancelled = pb.EdgeResult(cancelled=pb.EdgeResult.Cancelled(reason="as you wish"))
    failed = pb.EdgeResult(err=pb.EdgeResult.Err(code="policy_violation", message="no", exit_code=3))
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        state, command = await result_of(rig, daemon, ok(stdout=b"out"))
        assert (state, rig.kept(command, daemon).stdout_tail) == ("ok", b"out")
        assert rig.kept(command, daemon).duration_seconds is not None
        state, command = await result_of(rig, daemon, failed.SerializeToString())
        kept = rig.kept(command, daemon)
        assert (state, kept.code, kept.exit_code) == ("failed", "policy_violation", 3)
        assert (await result_of(rig, daemon, timed_out.SerializeToString()))[0] == "timed_out"
        assert (await result_of(rig, daemon, cancelled.SerializeToString()))[0] == "cancelled"
        daemon.leave()


async def test_results_of_daemons_in_the_field_in_every_shape(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon(legacy=True)
        await daemon.open_legacy()
        for result, state, code in (
            (legacy(ok=True, stdout=b"x" * 9000, stderr=b"e"), "ok", ""),
            (legacy(ok=True), "ok", ""),
            (legacy(exit_code=2, error_kind="nonzero_exit"), "failed", "nonzero_exit"),
            (legacy(error_kind="timeout", error_message="late"), "timed_out", "timeout"),
            (legacy(error_kind="cancelled"), "cancelled", "cancelled"),
            (legacy(error_kind="policy_violation"), "failed", "policy_violation"),
        ):
            found, command = await result_of(rig, daemon, result, digest=False)
            kept = rig.kept(command, daemon)
            assert (found, kept.code) == (state, code)
            if kept.stdout_tail:
                assert kept.stdout_tail == b"x" * TAIL_BYTES
        daemon.leave()


async def test_a_result_that_says_nothing_fails_its_command_and_not_the_stream(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        command = await rig.issue(daemon)
        call = await daemon.next("invoke_tool")
        await daemon.send(command_result=daemon.sign.result(call.command_id, b""))
        await until(lambda: rig.outcome(command, daemon) == "failed")
        assert rig.kept(command, daemon).code == "protocol_error"
        await daemon.beat()
        await until(lambda: rig.side.streams.heartbeats["acme"] == 1)
        daemon.leave()


async def test_duplicate_late_unknown_and_senseless_results_are_ignored(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon, other = await rig.daemon(), await rig.daemon()
        await daemon.open()
        await other.open()
        theirs = await rig.issue(other)
        state, command = await result_of(rig, daemon, ok())
        assert state == "ok"
        for command_id in (
            public_id(command),
            public_id(theirs),  # of another daemon
            "cccccccc-1111-4222-8333-dddddddddddd",
            "not an id",
            "",
            "c" * 10_000,
        ):
            await daemon.answer(command_id, legacy(error_kind="cancelled"))
        await daemon.beat()
        await until(lambda: rig.side.streams.heartbeats["acme"] == 1)
        assert rig.outcome(command, daemon) == "ok"
        assert rig.outcome(theirs, other) == "sent"
        assert rig.side.dispatcher.ignored == 6
        daemon.leave()
        other.leave()


# Output while it runs.


async def test_output_is_told_while_it_comes_and_its_end_is_kept(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        told: list[tuple[str, str, CommandProgress]] = []
        stop = rig.side.dispatcher.watch(lambda *what: told.append(what))
        daemon = await rig.daemon()
        await daemon.open()
        command = await rig.issue(daemon)
        identity = (await daemon.next("invoke_tool")).command_id
        chunks = [
            pb.Chunk(stdout=b"a" * TAIL_BYTES, sequence=1),
            pb.Chunk(stdout=b"\xff\0b\n", sequence=2),
            pb.Chunk(stderr=b"oops\n", sequence=3),
            pb.Chunk(status=pb.StatusUpdate(state="working", percent=50), sequence=4),
        ]
        for chunk in chunks:
            await daemon.send(command_progress=daemon.sign.chunk(identity, chunk))
        await until(lambda: len(told) == 4)
        assert {(node, name) for node, name, _ in told} == {(daemon.node_id, command.name)}
        assert [said.data for _, _, said in told[1:3]] == [b"\xff\0b\n", b"oops\n"]
        stop()
        await daemon.send(command_progress=daemon.sign.chunk(identity, pb.Chunk(stdout=b"last")))
        await daemon.answer(identity)
        await until(lambda: rig.outcome(command, daemon) == "ok")
        kept = rig.kept(command, daemon)
        assert kept.stdout_tail.endswith(b"\xff\0b\nlast")
        assert len(kept.stdout_tail) == TAIL_BYTES
        assert kept.stderr_tail == b"oops\n"
        assert len(told) == 4
        daemon.leave()


async def test_a_daemon_is_known_by_its_output_when_nothing_else_tells_its_dialect(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open(metadata=(("authorization", f"Bearer {daemon.identity.token}"),), digest=False)
        assert rig.side.presences.dialect(daemon.node_id) is PayloadDialect.DOCUMENTED
        command = await rig.issue(daemon)
        identity = (await daemon.next("invoke_tool")).command_id
        for sequence, text in enumerate((b"\n", b"text\n", b"\x0a\x03abc\n")):
            await daemon.send(command_progress=daemon.sign.line(identity, text, sequence=sequence))
        await until(lambda: rig.side.presences.dialect(daemon.node_id) is PayloadDialect.LEGACY)
        await daemon.answer(identity, legacy(ok=True), digest=False)
        await until(lambda: rig.outcome(command, daemon) == "ok")
        assert rig.kept(command, daemon).stdout_tail == b"\ntext\n\x0a\x03abc\n"
        daemon.leave()


async def test_live_output_has_a_bound_and_the_tail_goes_on(tmp_path: Path) -> None:
    options = StreamOptions(dispatch=DispatchPolicy(live_bytes=10))
    async with streams_rig(tmp_path, options=options) as rig:
        told: list[CommandProgress] = []
        rig.side.dispatcher.watch(lambda _node, _command, said: told.append(said))
        daemon = await rig.daemon()
        await daemon.open()
        command = await rig.issue(daemon)
        identity = (await daemon.next("invoke_tool")).command_id
        for text in (b"12345", b"67890", b"more"):
            await daemon.send(command_progress=daemon.sign.chunk(identity, pb.Chunk(stdout=text)))
        await daemon.answer(identity)
        await until(lambda: rig.outcome(command, daemon) == "ok")
        assert [said.data for said in told] == [b"12345", b"67890"]
        assert rig.kept(command, daemon).stdout_tail == b"1234567890more"
        daemon.leave()


# One at a time, and taking back.


async def test_a_daemon_in_the_field_has_one_command_at_a_time(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon(legacy=True)
        await daemon.open_legacy()
        first, second = await rig.issue(daemon), await rig.issue(daemon)
        call = await daemon.next("invoke_tool")
        assert call.command_id == public_id(first)
        assert rig.outcome(second, daemon) == "waiting"
        await daemon.answer(call.command_id, legacy(ok=True), digest=False)
        assert (await daemon.next("invoke_tool")).command_id == public_id(second)
        assert rig.outcome(first, daemon) == "ok"
        assert rig.side.presences.in_flight(daemon.node_id) == 1
        daemon.leave()


async def test_our_daemon_has_as_many_as_the_policy_says(tmp_path: Path) -> None:
    options = StreamOptions(dispatch=DispatchPolicy(in_flight=3))
    async with streams_rig(tmp_path, options=options) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        commands = [await rig.issue(daemon) for _ in range(5)]
        for _ in range(3):
            await daemon.next("invoke_tool")
        states = [rig.outcome(command, daemon) for command in commands]
        assert states == ["sent"] * 3 + ["waiting"] * 2
        daemon.leave()


async def test_a_daemon_that_cannot_stop_is_told_to_and_what_it_says_first_is_the_outcome(
    tmp_path: Path,
) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon(legacy=True)
        await daemon.open_legacy()
        command, queued = await rig.issue(daemon), await rig.issue(daemon)
        await daemon.next("invoke_tool")
        await rig.side.dispatcher.ledger.cancel(command.scope, command.name, actor="user/boss")
        assert rig.outcome(command, daemon) == "sent"
        recall = await daemon.next("cancel")
        assert recall.command_id == public_id(command)
        # It is still busy: what waits is not sent before it says that it is done.
        assert rig.outcome(queued, daemon) == "waiting"
        await daemon.answer(public_id(command), legacy(ok=True), digest=False)
        assert (await daemon.next("invoke_tool")).command_id == public_id(queued)
        await daemon.answer(public_id(command), legacy(error_kind="cancelled"), digest=False)
        await daemon.answer(public_id(queued), legacy(ok=True), digest=False)
        await until(lambda: rig.outcome(queued, daemon) == "ok")
        assert rig.outcome(command, daemon) == "ok"
        daemon.leave()


async def test_a_daemon_of_ours_that_is_told_to_stop_has(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        command = await rig.issue(daemon)
        await daemon.next("invoke_tool")
        await rig.side.dispatcher.ledger.cancel(command.scope, command.name, actor="user/boss")
        assert rig.outcome(command, daemon) == "cancelled"
        assert (await daemon.next("cancel")).command_id == public_id(command)
        daemon.leave()


async def test_the_servers_own_deadline_waits_a_little_longer_than_the_daemons(tmp_path: Path) -> None:
    options = StreamOptions(dispatch=DispatchPolicy(grace_seconds=1.0))
    async with streams_rig(tmp_path, options=options) as rig:
        daemon = await rig.daemon(legacy=True)
        await daemon.open_legacy()
        began = time.monotonic()
        command, queued = await rig.issue(daemon, deadline_seconds=1), await rig.issue(daemon)
        await until(lambda: rig.outcome(command, daemon) == "timed_out")
        assert time.monotonic() - began >= 1.9
        assert (await daemon.next("cancel")).command_id == public_id(command)
        assert (await daemon.next("invoke_tool")).command_id == public_id(queued), "its place is free again"
        daemon.leave()


async def test_a_daemon_is_told_to_stop_also_if_its_place_is_given_up_before_that_is_written(
    tmp_path: Path,
) -> None:
    clock = MovableClock()
    async with streams_rig(tmp_path, clock=clock, runs=False) as rig:
        daemon = await rig.daemon()
        await daemon.open()
        command = await rig.issue(daemon, deadline_seconds=60)
        await daemon.next("invoke_tool")
        clock.ahead_seconds = 3600
        ledger, courier = rig.side.dispatcher.ledger, rig.side.dispatcher.courier
        await courier.expire(ledger)
        assert rig.side.presences.in_flight(daemon.node_id) == 0
        await ledger.expire()
        assert rig.outcome(command, daemon) == "timed_out"
        later = await rig.issue(daemon)
        told = [await daemon.read() for _ in range(2)]
        assert [one.WhichOneof("command") for one in told] == ["cancel", "invoke_tool"]
        assert told[0].cancel.command_id == public_id(command)
        assert told[1].invoke_tool.command_id == public_id(later)
        daemon.leave()


# Before anything is written.


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"args_json": b"[1]"}, "args"),
        ({"args_json": b"{"}, "args"),
        ({"args_json": b'{"a": NaN}'}, "args"),
        ({"tool": ""}, "tool"),
        ({"security_context": ""}, "security_context"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
    ],
)
def test_a_call_that_could_not_be_sent_is_refused(changed: dict[str, object], field: str) -> None:
    good: dict[str, object] = {
        "tool": "cmd.run",
        "args_json": b"{}",
        "security_context": "zaru-free",
        "tenant": "acme",
        "actor": "user/boss",
        "deadline_seconds": 60,
    }
    Dispatcher.check(ToolCall(**good))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument) as caught:
        Dispatcher.check(ToolCall(**{**good, **changed}))  # type: ignore[arg-type]
    assert caught.value.field == field


def test_the_dialects_agree_on_what_a_result_event_is() -> None:
    made = tolerant_pb2.CommandResult(command_id="x", result=ok())
    assert pb.CommandResult.FromString(made.SerializeToString()).result.HasField("ok")
