"""Programs that try to outlive their command or to take the machine, and files under borrowed names."""

from __future__ import annotations

import asyncio
import os
import pwd
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.edge.edge_daemon_rig import configure, edge_section, enrolled, running
from support.edge.edge_server_double import EdgeServerDouble, edge_server, until

from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
from fleetplane.domains.edge.agent.tools.command import RunCommand
from fleetplane.domains.edge.agent.tools.contract import (
    CommandOutcomeReport,
    ErrorKind,
    PermittedCall,
    ProgramLimits,
    ProgramPrivileges,
    ProgramStream,
    ToolFailed,
)
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb

ESCAPE = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for descriptor in range(3):
            os.close(descriptor)
        open(sys.argv[1] + ".new", "w").write(str(os.getpid()))
        os.rename(sys.argv[1] + ".new", sys.argv[1])
        time.sleep(300)
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
time.sleep(float(sys.argv[2]))
"""
"""A daemon as the books have it: two forks and a session of its own, no output held open."""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EdgeServerDouble]:
    async with edge_server(tmp_path / "server") as double:
        yield double


@pytest.fixture
async def state(tmp_path: Path, server: EdgeServerDouble) -> StateFolder:
    return await enrolled(tmp_path / "node", server)


def _alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def _nothing(_channel: ProgramStream, _data: bytes) -> None:
    pass


def _python(
    script: str, *words: str, privileges: ProgramPrivileges | None = None, **limits: int
) -> PermittedCall:
    return PermittedCall(
        arguments={"command": sys.executable, "args": ["-c", script, *words]},
        paths={},
        environment={},
        emit=_nothing,
        output_limit_bytes=1 << 20,
        limits=ProgramLimits(**limits),
        privileges=privileges or ProgramPrivileges(),
    )


async def _run(call: PermittedCall) -> CommandOutcomeReport:
    async with asyncio.timeout(60):
        return await RunCommand().run(call)


async def test_what_makes_a_session_of_its_own_ends_with_its_command(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    ended = await _run(_python(ESCAPE, str(mark), "0"))
    assert ended.exit_code == 0
    assert not _alive(int(mark.read_text()))


async def test_and_when_the_command_is_cancelled(
    server: EdgeServerDouble, state: StateFolder, tmp_path: Path
) -> None:
    mark = tmp_path / "pid"
    async with running(state):
        await until(lambda: server.hellos)
        words = ["-c", ESCAPE, str(mark), "300"]
        command_id = server.invoke("cmd.run", {"command": sys.executable, "args": words})
        await until(lambda: mark.exists() and mark.read_text())
        server.send(pb.EdgeCommand(cancel=pb.Cancel(command_id=command_id)))
        await until(lambda: not _alive(int(mark.read_text())))


async def test_programs_have_the_limits_that_the_owner_set() -> None:
    grab = "held = [bytearray(1 << 20) for _ in range(512)]"
    assert (await _run(_python(grab))).exit_code == 0
    ended = await _run(_python(grab, memory_bytes=256 << 20))
    assert (ended.exit_code, b"MemoryError" in ended.stderr) == (1, True)
    files = "import os; held = [os.open('/dev/null', 0) for _ in range(200)]"
    assert (await _run(_python(files, open_files=100))).exit_code == 1
    core = "import resource; assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)"
    assert (await _run(_python(core))).exit_code == 0


async def test_a_limit_is_set_for_what_runs_on_a_node(server: EdgeServerDouble, state: StateFolder) -> None:
    configure(state, edge_section(limits={"open_files": 77}))
    async with running(state):
        await until(lambda: server.hellos)
        found = await server.outcome(
            "cmd.run", {"command": "/bin/sh", "args": ["-c", "ulimit -n; ulimit -c"]}
        )
        assert found.stdout.split() == [b"77", b"0"]


async def test_programs_gain_no_privileges_unless_the_owner_lets_them(
    server: EdgeServerDouble, state: StateFolder, tmp_path: Path
) -> None:
    words = {"command": "/bin/grep", "args": ["NoNewPrivs", "/proc/self/status"]}
    async with running(state):
        await until(lambda: server.hellos)
        assert (await server.outcome("cmd.run", words)).stdout.split()[1] == b"1"
    configure(state, edge_section(programs={"no_new_privileges": False, "may_detach": True}))
    mark, before = tmp_path / "pid", len(server.hellos)
    async with running(state):
        await until(lambda: len(server.hellos) > before)
        assert (await server.outcome("cmd.run", words)).stdout.split()[1] == b"0"
        detached = ["-c", ESCAPE, str(mark), "0"]
        await server.outcome("cmd.run", {"command": sys.executable, "args": detached})
        assert _alive(int(mark.read_text()))
    os.kill(int(mark.read_text()), signal.SIGKILL)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become someone else")
async def test_programs_run_as_the_user_that_the_owner_named() -> None:
    script = "import os; print(os.getuid(), os.getgroups(), os.environ['HOME'])"
    nobody = pwd.getpwnam("nobody")
    call = replace(
        _python("", privileges=ProgramPrivileges(run_as="nobody")),
        arguments={"command": "/usr/bin/python3", "args": ["-c", script]},
    )
    ended = await _run(call)
    assert ended.stdout.decode().split()[:2] == [str(nobody.pw_uid), f"[{nobody.pw_gid}]"]
    unknown = ProgramPrivileges(run_as="nobody-of-that-name")
    with pytest.raises(ToolFailed, match="no user") as failed:
        await _run(replace(call, privileges=unknown))
    assert failed.value.kind is ErrorKind.INTERNAL


async def test_a_hard_link_is_not_read_for_the_file_it_stands_for(
    server: EdgeServerDouble, state: StateFolder, tmp_path: Path
) -> None:
    """Whoever may write where reading is allowed could give any file of that file system a name there."""
    allowed, secret = tmp_path / "allowed", tmp_path / "secret"
    allowed.mkdir()
    secret.write_text("key")
    os.link(secret, allowed / "innocent")
    (allowed / "plain").write_text("fine")
    capability = {"tool_pattern": "fs.read", "path_allowlist": [str(allowed)]}
    configure(state, {"spec": {"security_contexts": [{"name": "zaru-free", "capabilities": [capability]}]}})
    async with running(state):
        await until(lambda: server.hellos)
        refused = await server.outcome("fs.read", {"path": str(allowed / "innocent")})
        assert (refused.outcome, b"key" in refused.stdout, "hard link" in refused.message) == (
            "error",
            False,
            True,
        )
        assert (await server.outcome("fs.read", {"path": str(allowed / "plain")})).stdout == b"fine"
