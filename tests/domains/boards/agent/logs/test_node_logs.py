"""Logs of a node over mTLS."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.boards.board_node_rig import NodeRig, configured, node_rig
from support.boards.boards_rig import BoardsRig, until
from support.boards.journal_double import JournalDouble
from support.boards.node_calls import (
    CODE,
)
from support.shared.processes_seen import with_mark

from fleetplane.gen.boards import boards_pb2 as pb


async def test_logs_are_streamed_filtered_and_resumed(tmp_path: Path, server: BoardsRig) -> None:
    journal = JournalDouble(tmp_path / "journal")
    for number in range(5):
        journal.add(f"message {number}", PRIORITY=str(7 - number))
    config = configured(logs={"journalctl": str(journal.program)})
    async with node_rig(tmp_path, server, config=config) as rig:
        node = await rig.node()
        found = [one async for one in node.StreamLogs(pb.LogFilter(min_level=pb.LogEntry.NOTICE))]
        assert [one.message for one in found] == ["message 2", "message 3", "message 4"]
        assert found[0].level == pb.LogEntry.NOTICE

        stream = node.StreamLogs(pb.LogFilter(cursor=found[1].cursor, follow=True))
        entries = aiter(stream)
        assert (await anext(entries)).message == "message 4"
        journal.add("message 5")
        assert (await anext(entries)).message == "message 5"
        stream.cancel()
        await until(lambda: not list(with_mark(str(journal.program))))


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({"sources": ["file:/etc/shadow"]}, CODE.INVALID_ARGUMENT),
        ({"sources": ["../../etc"]}, CODE.INVALID_ARGUMENT),
        ({"regex": "("}, CODE.INVALID_ARGUMENT),
        ({"regex": "(.{1,1000}){1000}"}, CODE.INVALID_ARGUMENT),
        ({"regex": "x" * 100_000}, CODE.INVALID_ARGUMENT),
        ({"units": ["--output=export"]}, CODE.INVALID_ARGUMENT),
        ({"tail_lines": 1_000_000}, CODE.INVALID_ARGUMENT),
        ({"cursor": "journal=$(id)"}, CODE.INVALID_ARGUMENT),
        ({"min_level": 77}, CODE.INVALID_ARGUMENT),
    ],
)
async def test_hostile_filters_are_refused(
    tmp_path: Path, rig: NodeRig, said: dict[str, Any], code: Any
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in (await rig.node()).StreamLogs(pb.LogFilter(**said)):
            pass
    assert raised.value.code() is code


async def test_a_client_that_does_not_read_costs_a_bounded_queue(tmp_path: Path, server: BoardsRig) -> None:
    async with node_rig(tmp_path, server) as rig:
        node = await rig.node()
        rig.parts.ring.add("info", {"event": "first"})
        stream = node.StreamLogs(pb.LogFilter(sources=["agent"], follow=True))
        entries = aiter(stream)
        while (await anext(entries)).message != "first":
            pass
        total = 8000
        for number in range(total):
            rig.parts.ring.add("info", {"event": f"event {number} {'x' * 4000}"})
            if number % 50 == 0:
                await asyncio.sleep(0.002)
        received = dropped = 0
        async with asyncio.timeout(60):
            async for one in stream:
                if one.message.startswith("event "):
                    received, dropped = received + 1, dropped + one.dropped
                    if one.message.startswith(f"event {total - 1} "):
                        break
        assert dropped > 0
        assert received + dropped == total  # nothing is lost that is not counted
        stream.cancel()


async def test_the_agents_own_events_are_a_log_for_viewers(rig: NodeRig) -> None:
    rig.parts.ring.add("error", {"event": "something.happened", "why": "test"})
    viewer = await rig.node_of("boards.viewer")
    found = [one async for one in viewer.StreamLogs(pb.LogFilter(sources=["agent"], contains="happened"))]
    assert [(one.message, one.level, dict(one.fields)) for one in found] == [
        ("something.happened", pb.LogEntry.ERROR, {"why": "test"})
    ]
