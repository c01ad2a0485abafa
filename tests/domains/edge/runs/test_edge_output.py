"""Much output: line by line, faster than it is read, and results that are larger than a message may be."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support.edge.edge_signer import legacy, ok
from support.edge.edge_streams_rig import MESSAGE_LIMIT_BYTES, Daemon, Rig, streams_rig, until

from fleetplane.domains.edge.kinds import PayloadDialect
from fleetplane.domains.edge.streams import tool_calls
from fleetplane.domains.edge.streams.assembly import StreamOptions
from fleetplane.domains.edge.streams.call_encoding import TAIL_BYTES
from fleetplane.domains.edge.streams.verification import OUTPUT_SAMPLE, RejectionCause, SealPolicy
from fleetplane.domains.edge.wire.messages import ResultOutcome
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.fleetplane.edge.v1 import tolerant_pb2

COMMAND = "cccccccc-1111-4222-8333-dddddddddddd"
STRANGER = Ed25519PrivateKey.generate()
LINES = 12_000
"""More than were taken at once when there was a rate; a hundred thousand differ in nothing but time."""


async def _at_work(rig: Rig) -> tuple[Daemon, Any, str]:
    daemon = await rig.daemon()
    await daemon.open_legacy()
    command = await rig.issue(daemon)
    return daemon, command, (await daemon.next("invoke_tool")).command_id


async def test_lines_come_as_fast_as_they_are_taken_and_all_of_them_arrive(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        heard = 0

        def listen(_node: str, _command: str, said: Any) -> None:
            nonlocal heard
            heard += len(said.data)

        rig.side.dispatcher.watch(listen)
        daemon, command, name = await _at_work(rig)
        lines = [b"line %d\n" % number for number in range(LINES)]
        for number, text in enumerate(lines):
            await daemon.send(command_progress=daemon.sign.line(name, text, sequence=number))
        await daemon.answer(name, legacy(ok=True), digest=False)
        await until(lambda: rig.outcome(command, daemon) == "ok", seconds=60)
        whole = b"".join(lines)
        assert (heard, rig.kept(command, daemon).stdout_tail) == (len(whole), whole[-TAIL_BYTES:])
        daemon.leave()


async def test_a_result_over_the_bound_is_cut_with_a_mark_and_keeps_its_outcome(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon, command, name = await _at_work(rig)
        await daemon.send(command_progress=daemon.sign.line(name, b"the end\n", sequence=0))
        large = legacy(ok=True, stdout=b"x" * (MESSAGE_LIMIT_BYTES + 1))
        await daemon.answer(name, large, digest=False)
        await until(lambda: rig.outcome(command, daemon) == "ok", seconds=60)
        target = rig.target(command, daemon)
        assert target.status is not None
        assert "was cut" in target.status.detail
        assert rig.kept(command, daemon).stdout_tail == b"the end\n"
        await daemon.beat()  # and the stream goes on
        await until(lambda: rig.side.streams.heartbeats["acme"] == 1)
        daemon.leave()


async def test_other_events_over_the_bound_count_as_not_said(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon, command, name = await _at_work(rig)
        line = daemon.sign.line(name, b"y" * (MESSAGE_LIMIT_BYTES // 2 + 1), sequence=0)
        await daemon.send(command_progress=line)  # twice its size: in the payload, and beside it
        await until(lambda: rig.side.streams.oversized == 1, seconds=60)
        await daemon.answer(name, legacy(ok=True), digest=False)
        await until(lambda: rig.outcome(command, daemon) == "ok")
        daemon.leave()


@pytest.mark.parametrize(
    ("result", "outcome", "exit_code", "dialect"),
    [
        (legacy(ok=True, stdout=b"x" * 99_999), ResultOutcome.OK, 0, PayloadDialect.LEGACY),
        (
            legacy(exit_code=3, stdout=b"x" * 99_999, error_kind="e"),
            ResultOutcome.ERROR,
            3,
            PayloadDialect.LEGACY,
        ),
        (
            legacy(exit_code=-1, stderr=b"x" * 99_999, error_kind="e"),
            ResultOutcome.ERROR,
            -1,
            PayloadDialect.LEGACY,
        ),
        (
            legacy(stdout=b"x" * 99_999, error_kind="timeout"),
            ResultOutcome.ERROR,
            None,
            PayloadDialect.LEGACY,
        ),
        (ok(2, b"x" * 99_999), ResultOutcome.OK, 2, PayloadDialect.DOCUMENTED),
        (
            pb.EdgeResult(err=pb.EdgeResult.Err(code="c", message="x" * 99_999)).SerializeToString(),
            ResultOutcome.ERROR,
            0,
            PayloadDialect.DOCUMENTED,
        ),
    ],
)
def test_how_it_ended_is_told_by_the_beginning_of_a_result(
    result: bytes, outcome: ResultOutcome, exit_code: int | None, dialect: PayloadDialect
) -> None:
    sealed = pb.SealNodeEnvelope(node_security_token="t" * 900, signature=b"s" * 64, payload=b"p" * 100)
    event = tolerant_pb2.CommandResult(envelope=sealed, command_id=COMMAND, result=result)
    whole = tolerant_pb2.EdgeEvent(command_result=event).SerializeToString()
    found = tool_calls.read(whole[:65_536], len(whole))
    assert found is not None
    assert (found.event.command_id, found.event.envelope) == (COMMAND, sealed)
    assert (found.said.outcome, found.said.exit_code, found.dialect) == (outcome, exit_code, dialect)
    assert "was cut" in found.said.message
    for length in range(0, 1200, 7):
        tool_calls.read(whole[:length], len(whole))  # whatever is there, it does not break


# Whether lines are believed.


async def test_forged_lines_are_found_out_though_not_every_signature_is_checked(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon, _, name = await _at_work(rig)
        await daemon.send(command_progress=daemon.sign.line(name, b"true\n", sequence=0))
        for number in range(1, 40 * OUTPUT_SAMPLE):
            lie = daemon.sign.line(name, b"false\n", sequence=number, key=STRANGER)
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it is over by then
                await daemon.send(command_progress=lie)
        await until(lambda: rig.side.verifier.refused[RejectionCause.SIGNATURE] == 1)
        await until(lambda: not rig.side.presences.is_connected(daemon.node_id))


@pytest.mark.parametrize("first", [True, False], ids=["the first line", "any line, if so set"])
async def test_a_forged_line_is_found_out_at_once(tmp_path: Path, first: bool) -> None:
    options = StreamOptions(seal=SealPolicy(output_checked=not first))
    async with streams_rig(tmp_path, options=options) as rig:
        daemon, _, name = await _at_work(rig)
        for number in range(0 if first else 3):
            await daemon.send(command_progress=daemon.sign.line(name, b"true\n", sequence=number))
        await daemon.send(command_progress=daemon.sign.line(name, b"false\n", sequence=9, key=STRANGER))
        assert await daemon.ended() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "wrong",
    [
        {"stream_id": "aaaaaaaa-bbbb-4ccc-8ddd-eeeeeeeeeeee"},
        {"inner": b"other"},
        {"ahead_ms": 360_000},
        {"token": "a.b.c"},
    ],
)
async def test_all_but_the_signature_is_looked_at_in_every_line(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    async with streams_rig(tmp_path) as rig:
        daemon, _, name = await _at_work(rig)
        live = rig.side.presences.get(daemon.node_id)
        assert live is not None
        await daemon.send(command_progress=daemon.sign.line(name, b"true\n", sequence=0))
        await until(lambda: live.seal._output_of == name)
        live.seal._unchecked = 1000  # not its turn
        await daemon.send(command_progress=daemon.sign.line(name, b"x\n", sequence=1, **wrong))
        assert await daemon.ended() is grpc.StatusCode.UNAUTHENTICATED
