"""Both kinds of daemons on one real server process: ours as a process, and one of those in the field."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from support.edge.edge_server_double import until
from support.edge.shipped_daemon import ShippedDaemon
from support.shared.cli_runner import COMMAND, Outcome
from support.shared.cli_runner import execute as run_command
from support.shared.server_process import running_server

from fleetplane.cli.exits import Exit

TENANT = "acme"
NOT_BOTH = (Exit.FAILURE, Exit.PARTIAL, Exit.CONDITION_NOT_MET, Exit.NOT_FOUND, Exit.UNAVAILABLE)
"""How a run ends that meets one of them, or none."""


async def execute(*words: str) -> Outcome:
    """Beside the event loop, on which the stand-in runs."""
    return await asyncio.to_thread(run_command, *words, timeout_seconds=120)


async def test_one_run_reaches_both_before_and_after_their_keys_are_replaced(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", "--set", "only=edge", "--set", "edge.overlap_seconds=5") as server:
        where = ("--tenant", TENANT, "--data-dir", str(tmp_path / "data"))
        tokens = [(await execute("edge", "token", "--name", name, *where)).out.strip() for name in ("a", "b")]
        address = server.address("edge", "http").removeprefix("http://")
        shipped = await ShippedDaemon.enroll(address, tokens[0], heartbeat_seconds=1.0, wait_scale=0.1)
        state = str(tmp_path / "state")
        enrolled = await execute("agent", "edge", "enroll", tokens[1], "--state-dir", state)
        assert enrolled.code == 0, enrolled.err
        again = await execute("agent", "edge", "enroll", tokens[1], "--state-dir", f"{state}-2")
        assert again.code == 5  # a token enrols one machine, once
        ours = await asyncio.create_subprocess_exec(
            *COMMAND, "agent", "edge", "run", "--state-dir", state, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            async with shipped.running():
                run = ("edge", "run", "--target", "all", "--require-min", "2", *where, "--")
                first = await _until_both(*run, "echo", "before")
                assert first.out.count("ok exit=0") == 2
                await _ours_tells_figures(tmp_path / "data")
                await shipped.rotate_key()
                rotated = await execute("agent", "edge", "rotate", "--state-dir", state)
                assert rotated.code == 0, rotated.err
                await until(lambda: shipped.headers >= 2)  # the server let it come back with its new key
                second = await _until_both(*run, "echo", "after")
                assert second.out.count(" after\n") == 2, second
        finally:
            ours.terminate()
            assert await ours.wait() == 0
        assert shipped.refusals == []


async def _ours_tells_figures(data: Path) -> None:
    """By a call beside the stream, which those in the field do not know."""
    for _ in range(60):
        found = await execute("top", "edge-nodes", "--once", "-o", "json", "--data-dir", str(data))
        assert found.code == 0, found.err
        told = {one["displayName"]: one["figures"] for one in json.loads(found.out)["items"]}
        if told["b"]:
            break
        await asyncio.sleep(1)
    assert {"memoryPercent", "loadAverage", "runningCommands"} <= told["b"].keys()
    assert told["a"] == {}


async def _until_both(*run: str) -> Outcome:
    """Run once both are there; with fewer targets nothing is started.

    Ours comes back once, with its new key, when the overlap is over: a run that meets it then has no
    answer of it.
    """
    for _ in range(60):
        found = await execute(*run)
        if found.code == 0:
            return found
        assert found.code in NOT_BOTH, found
    raise AssertionError("they did not both connect")
