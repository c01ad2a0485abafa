"""The daemon as a process: enrolled, run, stopped, killed and begun again, by its command line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.edge.edge_server_double import EdgeServerDouble, until
from support.shared.cli_runner import COMMAND, Outcome
from support.shared.cli_runner import execute as run_command

from fleetplane.domains.edge.agent.identity.state_folder import StateFolder, public_bytes
from fleetplane.domains.edge.wire.protobuf_types import duration_of
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb


def words(state: Path, verb: str, *more: str) -> list[str]:
    return [*COMMAND, "agent", "edge", verb, *more, "--state-dir", str(state)]


async def execute(state: Path, verb: str, *more: str) -> Outcome:
    """Beside the event loop, on which the server runs."""

    return await asyncio.to_thread(run_command, *words(state, verb, *more)[len(COMMAND) :])


@asynccontextmanager
async def daemon(state: Path, *more: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *words(state, "run", "--log-format", "json", "--user-config", "/nonexistent", *more),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "FLEETPLANE_SECRET": "hush"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.fixture
async def state(server: EdgeServerDouble, tmp_path: Path) -> Path:
    outcome = await execute(tmp_path / "state", "enroll", server.enrollment_token())
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("enrolled node ")
    return tmp_path / "state"


async def test_it_serves_until_sigterm_and_ends_with_0(server: EdgeServerDouble, state: Path) -> None:
    async with daemon(state) as process:
        await until(lambda: server.hellos)
        found = await server.outcome("cmd.run", {"command": "/bin/sh", "args": ["-c", "env"]})
        assert b"hush" not in found.stdout
        second = await execute(state, "daemon")
        assert second.code == 8
        assert f"process {process.pid}" in second.err
        shown = json.loads((await execute(state, "status", "--output", "json")).out)
        assert shown["daemon"] == f"running as process {process.pid}"
        assert shown["enrolled"] is True
        process.send_signal(signal.SIGTERM)
        _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert [json.loads(line)["event"] for line in err.splitlines()][-1] == "agent_stopped"
    await until(lambda: server.half_closed == 1)


async def test_it_ends_with_0_when_the_server_shuts_it_down(server: EdgeServerDouble, state: Path) -> None:
    async with daemon(state) as process:
        await until(lambda: server.hellos)
        server.send(pb.EdgeCommand(shutdown=pb.Shutdown(grace=duration_of(0.1))))
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_killed_in_the_middle_of_a_command_it_does_not_run_it_again(
    server: EdgeServerDouble, state: Path, tmp_path: Path
) -> None:
    script = f"echo $$ >> {tmp_path}/ran; exec sleep 300"
    arguments = {"command": "/bin/sh", "args": ["-c", script]}
    async with daemon(state) as process:
        await until(lambda: server.hellos)
        server.invoke("cmd.run", arguments, command_id="one")
        await until(lambda: (tmp_path / "ran").exists() and (tmp_path / "ran").read_text().endswith("\n"))
        process.kill()
        await process.wait()
    pids = (tmp_path / "ran").read_text().split()
    await until(lambda: not Path(f"/proc/{pids[0]}").exists())  # its guard ends it with the daemon
    async with daemon(state):
        await until(lambda: len(server.hellos) == 2)
        found = await server.outcome("cmd.run", arguments, command_id="one")
        assert found.code == "interrupted"
    assert len((tmp_path / "ran").read_text().split()) == 1


async def test_keys_and_tokens_are_renewed_by_hand_under_a_running_daemon(
    server: EdgeServerDouble, state: Path
) -> None:
    folder = StateFolder(state)
    before = public_bytes(folder.load_key())
    async with daemon(state):
        await until(lambda: server.hellos)
        rotated = await execute(state, "rotate", "--keep-old", "1h")
        assert rotated.code == 0, rotated.err
        assert "archive" in rotated.out
        refreshed = await execute(state, "refresh")
        assert refreshed.code == 0, refreshed.err
    assert public_bytes(folder.load_key()) != before
    assert server.rotations[0].new_public_key == server.rotations[1].new_public_key


async def test_mistakes_are_one_line_and_a_code(
    server: EdgeServerDouble, state: Path, tmp_path: Path
) -> None:
    again = await execute(state, "enroll", server.enrollment_token())
    assert (again.code, again.err.count("\n")) == (6, 1)
    assert "--keep-existing" in again.err
    nothing = await execute(tmp_path / "nowhere", "run")
    assert nothing.code == 2
    assert nothing.err.count("\n") == 1
    bad = await execute(tmp_path / "new", "enroll", "nonsense")
    assert (bad.code, bad.err.count("\n")) == (2, 1)
    both = await execute(tmp_path / "new", "enroll", "--force", "--keep-existing", "x")
    assert both.code == 2
    left = await execute(state, "logout")
    assert left.code == 0
    assert "node.token" in left.out
    gone = await execute(state, "run")
    assert gone.code == 6
    assert "enrol this machine first" in gone.err


async def test_a_dry_run_says_what_it_would_do(server: EdgeServerDouble, tmp_path: Path) -> None:
    outcome = await execute(tmp_path / "new", "enroll", "--dry-run", server.enrollment_token())
    assert outcome.code == 0
    assert all(line.startswith("would ") for line in outcome.out.splitlines())
    assert not (tmp_path / "new").exists()
