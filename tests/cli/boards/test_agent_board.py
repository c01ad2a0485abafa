"""`fleetplane agent board` as people run it: joined, started, asked, stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from support.boards.boards_rig import boards_rig, until
from support.boards.original_board_agent import dial
from support.boards.original_controller import OriginalClient

PROGRAM = [sys.executable, "-m", "fleetplane.cli.main", "agent", "board"]
PATIENT = """
from fleetplane.domains.boards.agent import reporter

reporter.GOODBYE_SECONDS = 60.0
"""


async def run(*words: str, stdin: bytes = b"") -> tuple[int, str, str]:
    child = await asyncio.create_subprocess_exec(
        *PROGRAM,
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "NO_COLOR": "1"},
    )
    async with asyncio.timeout(60):
        out, err = await child.communicate(stdin)
    assert child.returncode is not None
    return child.returncode, out.decode(), err.decode()


@asynccontextmanager
async def agent(state: Path, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """One that says goodbye however long the machine takes to pass that on."""
    local = ("--state-dir", str(state), "--simulate", "--address", "127.0.0.1", "--port", "0")
    site = state.parent / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(PATIENT)
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    with (state.parent / "agent.log").open("wb") as log:
        child = await asyncio.create_subprocess_exec(
            *PROGRAM,
            "run",
            *local,
            *words,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=log,
            env={**os.environ, "PYTHONPATH": path},
        )
    try:
        await until(lambda: (state / "running.json").exists() or child.returncode is not None, seconds=60)
        assert child.returncode is None, (state.parent / "agent.log").read_text()
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def test_a_board_from_its_token_to_its_goodbye(tmp_path: Path) -> None:
    state = tmp_path / "node"
    async with boards_rig(tmp_path) as server:
        token = await server.token()
        where = ("--server", server.address, "--state-dir", str(state), "--simulate", "--name", "pump")
        code, out, err = await run("join", "-", *where, stdin=token.encode() + b"\n")
        assert (code, err) == (0, "")
        assert out == f"joined {server.address} as board 1 (pump)\n"
        assert token.encode() not in b"".join(path.read_bytes() for path in state.iterdir())

        code, out, _ = await run("status", "--state-dir", str(state), "--output", "json")
        found = json.loads(out)
        assert (code, found["board"], found["member"], found["running"]) == (0, 1, True, False)

        code, _, err = await run("join", token, *where)
        assert code != 0
        assert "member 1" in err

        async with agent(state, "--plaintext-listen", "127.0.0.1:0", "--name", "pump") as child:
            await until(lambda: server.board(1).conditions, seconds=60)
            code, out, _ = await run("status", "--state-dir", str(state), "--output", "json")
            found = json.loads(out)
            assert (found["running"], found["pid"]) == (True, child.pid)
            async with dial(found["listeners"]["node-plain"][0].partition("://")[2]) as channel:
                assert (await OriginalClient(channel).demo(18))[0] == "health ok"

            code, _, err = await run("run", "--state-dir", str(state), "--simulate")
            assert code != 0
            assert "another agent" in err

            child.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                assert await child.wait() == 0
        assert server.state(1) == "maintenance"
        assert not (state / "running.json").exists()

    code, out, _ = await run("leave", "--yes", "--state-dir", str(state))
    assert code == 0
    assert f"removed {state / 'node.key'}" in out
    assert {path.name for path in state.iterdir()} <= {"agent.lock", "audit.jsonl", "simulated-serial"}


async def test_what_is_missing_is_told_with_what_to_do(tmp_path: Path) -> None:
    code, _, err = await run("run", "--state-dir", str(tmp_path / "node"), "--simulate")
    assert code != 0
    assert "no identity" in err
    assert "join" in err
    nowhere = ("--server", "127.0.0.1:1", "--state-dir", str(tmp_path / "node"))
    code, _, err = await run("join", "nonsense", *nowhere)
    assert code != 0
    assert "join token" in err
    assert "Traceback" not in err


async def test_a_killed_agent_leaves_nothing_that_looks_alive(tmp_path: Path) -> None:
    state = tmp_path / "node"
    async with agent(state, "--plaintext-listen", "127.0.0.1:0") as child:
        child.kill()
        await child.wait()
    assert (state / "running.json").exists()
    _, out, _ = await run("status", "--state-dir", str(state), "--output", "json")
    assert json.loads(out)["running"] is False
