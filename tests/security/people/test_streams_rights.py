"""Whoever loses the right to read something does not read on, also where reading began before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.boards.boards_rig import boards_rig, until
from support.boards.boards_web import BoardsWeb, boards_web, parsed
from support.boards.slow_boards import SlowNode, served

from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.access import Role
from fleetplane.web import streaming


@pytest.fixture
async def web(tmp_path: Path) -> AsyncIterator[BoardsWeb]:
    async with boards_rig(tmp_path) as rig, boards_web(rig) as web:
        yield web


async def test_whoever_follows_a_run_reads_no_further_once_the_token_is_revoked(
    web: BoardsWeb, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_SECONDS", 0.05)
    monkeypatch.setattr(streaming, "CHECK_SECONDS", 0.0)
    member, agent = await web.rig.join("b1"), SlowNode()
    agent.answer = pb.CommandResponse(success=True, stdout=b"the secret\n", exit_code=0)
    await served(web.rig, member, agent)
    tokens = web.rig.kernel.operators.tokens
    token = await tokens.create("mallory", roles=frozenset({Role("boards.viewer")}), scope="", actor="local")
    body = {"command": "uptime", "target": {"all": True}}
    run_id = (await web.post("/runs", body, status=202))["id"]
    await until(lambda: agent.under_way)
    runs = web.rig.domain.nodes.runs
    feed = runs.feed(runs.get("boards", run_id))
    assert feed is not None
    reading = asyncio.create_task(web.call("GET", f"/runs/{run_id}/events", token=token))
    other = asyncio.create_task(web.call("GET", f"/runs/{run_id}/events"))
    await until(lambda: feed.readers == 2 and len(feed._events) == 2)
    await tokens.revoke("mallory", actor="local")
    async with asyncio.timeout(60):
        answer = await reading
    agent.let_go.set()
    assert [kind for kind, _ in parsed(answer.text)] == ["run_started", "target_started"]
    assert "the secret" in (await other).text  # who may read on does
