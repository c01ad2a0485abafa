"""`fleetplane mcp` as an assistant's program starts it, with the protocol's own client."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import ClientSession, StdioServerParameters, stdio_client
from support.shared.server_process import running_server

READING = {"whoami", "kinds", "list", "get", "explain", "plan", "aegis.edge.fleet.list"}
CHANGING = {"apply_plan", "act", "aegis.edge.fleet.invoke", "aegis.edge.fleet.cancel"}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    data = tmp_path_factory.mktemp("mcp") / "d"
    with running_server(data, "--only", "edge"):
        yield data


class Assistant:
    def __init__(self, session: ClientSession) -> None:
        self.session = session

    async def tools(self) -> dict[str, Any]:
        return {one.name: one for one in (await self.session.list_tools()).tools}

    async def __call__(self, tool: str, **arguments: Any) -> tuple[Any, bool]:
        told = await self.session.call_tool(tool, arguments)
        text = told.content[0].text  # type: ignore[union-attr]
        return json.loads(text), bool(told.is_error)


@asynccontextmanager
async def assistant(data_dir: Path, *options: str) -> AsyncIterator[Assistant]:
    words = ["-m", "fleetplane.cli.main", "mcp", "--data-dir", str(data_dir), *options]
    started = StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ))
    async with stdio_client(started) as (reading, writing), ClientSession(reading, writing) as session:
        await session.initialize()
        yield Assistant(session)


async def test_an_assistant_only_reads_unless_changes_are_allowed(data_dir: Path) -> None:
    async with assistant(data_dir) as ask:
        tools = await ask.tools()
        assert set(tools) == READING
        assert all(one.annotations.read_only_hint for one in tools.values())
        who, failed = await ask("whoami")
        assert (who["name"], failed) == ("operator/local", False)
        kinds, _ = await ask("kinds")
        assert "edge-nodes" in {one["plural"] for one in kinds}
        found, failed = await ask("list", kind="en", scope="/tenants/acme")
        assert (found["items"], failed) == ([], False)
        meant, failed = await ask("aegis.edge.fleet.list", target="all", tenant="acme")
        assert not failed, meant
        assert meant["resolved"] == []
        for tool, arguments, reason in (
            ("get", {"kind": "edge-nodes", "name": "none"}, "NOT_FOUND"),
            ("get", {"kind": "nothing", "name": "none"}, "NOT_FOUND"),
            ("list", {}, "INVALID_ARGUMENT"),
            ("list", {"kind": "en", "more": "x"}, "INVALID_ARGUMENT"),
            ("list", {"kind": 7}, "INVALID_ARGUMENT"),
            ("apply_plan", {"plan": "x"}, "PERMISSION_DENIED"),
            ("aegis.edge.fleet.invoke", {"target": "all", "tool_name": "cmd.run"}, "PERMISSION_DENIED"),
        ):
            told, failed = await ask(tool, **arguments)
            assert (told["reason"], failed) == (reason, True), told


async def test_a_change_is_a_plan_of_this_session_first(data_dir: Path) -> None:
    async with assistant(data_dir, "--allow-changes") as ask:
        tools = await ask.tools()
        assert set(tools) == READING | CHANGING
        assert {name for name, one in tools.items() if one.annotations.destructive_hint} == CHANGING
        told, failed = await ask("apply_plan", plan="anothers")
        assert (told["reason"], failed) == ("PERMISSION_DENIED", True)
        told, failed = await ask("aegis.edge.fleet.cancel", fleet_command_id="../x")
        assert (told["reason"], failed) == ("INVALID_ARGUMENT", True)
