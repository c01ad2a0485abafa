"""A command from the process that stands ready is like one that was started anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from support.shared import warm_start
from support.shared.server_process import running_server
from support.shared.warm_start import COMMAND

SECONDS = 60.0


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["get"], ["context", "list"], ["server", "--set", "nonsense=1"], ["agent", "nobody"]],
)
def test_it_says_and_ends_as_one_that_was_started_anew(arguments: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)}
    environment.pop("PYTHONUNBUFFERED", None)
    plain = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        stdin=subprocess.DEVNULL,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    warm = warm_start.run([*COMMAND, *arguments], timeout=SECONDS, env=environment, cwd=tmp_path)
    assert (warm.returncode, warm.stdout, warm.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_it_has_the_environment_folder_and_streams_that_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    environment = {**os.environ, "FLEETPLANE_DATA_DIR": "here", "FLEETPLANE_LOG__LEVEL": "loud"}
    with (tmp_path / "errors").open("w") as errors:
        process = warm_start.started(
            [*COMMAND, "server"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            cwd=tmp_path / "folder",
        )
        assert process.communicate(timeout=SECONDS)[0] == ""
    assert process.returncode == 2
    assert "log.level: 'loud'" in (tmp_path / "errors").read_text()


def test_it_is_a_process_of_its_own_that_can_be_killed_and_tells_how_it_ended(tmp_path: Path) -> None:
    with running_server(tmp_path, "--only", "gpus") as server:
        assert server.process.pid == server.pid
        assert server.pid != os.getpid()
        assert server.process.poll() is None
        assert Path(psutil.Process(server.pid).cwd()) == Path.cwd()
        streams = Path(f"/proc/{server.pid}/fd")
        assert (streams / "0").readlink() == Path("/proc/self/fd/0").readlink()
        assert (streams / "2").readlink() == server.log
        server.process.send_signal(signal.SIGKILL)
        assert server.process.wait(SECONDS) == -signal.SIGKILL
        assert server.process.poll() == -signal.SIGKILL
        assert not psutil.pid_exists(server.pid)


KILLED = """
import subprocess, sys, time
from pathlib import Path
from support.shared import warm_start
from support.shared.server_process import command

server = warm_start.started(command(Path(sys.argv[1]), "--only", "gpus"), stdout=subprocess.DEVNULL)
print(server.pid, flush=True)
time.sleep(600)
"""


def test_it_ends_with_the_tests_that_asked_for_it_although_they_were_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE) as tests:
        assert tests.stdout is not None
        server = psutil.Process(int(tests.stdout.readline()))
        ready = server.parent()
        assert ready is not None
        assert ready.ppid() == tests.pid
        tests.kill()
    deadline = time.monotonic() + SECONDS
    for process in (ready, server):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, process
            time.sleep(0.02)


def test_several_at_once_do_not_wait_for_each_other() -> None:
    def version(_: int) -> str:
        return warm_start.run([*COMMAND, "--version"], timeout=SECONDS).stdout

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(version, range(24)))
    assert len(found) == 1
    assert found.pop().startswith("fleetplane ")


@pytest.mark.parametrize("name", ["PYTHONPATH", "LD_PRELOAD", "GRPC_VERBOSITY"])
def test_what_an_interpreter_looks_at_when_it_begins_is_not_left_out(name: str) -> None:
    def kind(environment: dict[str, str]) -> type[object]:
        process = warm_start.started(
            [*COMMAND, "--version"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        process.communicate(timeout=SECONDS)
        return type(process)

    assert kind({**os.environ, "FLEETPLANE_DATA_DIR": "/x"}) is not subprocess.Popen
    assert kind({**os.environ, name: "/x"}) is subprocess.Popen


def test_an_option_that_is_not_handed_on_is_not_left_out() -> None:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = warm_start.started([*COMMAND, "--version"], start_new_session=True, **streams)
    process.communicate(timeout=SECONDS)
    assert type(process) is subprocess.Popen


def test_another_program_is_started_as_everybody_starts_it() -> None:
    done = warm_start.run([sys.executable, "-c", "import sys; print(sys.argv)", *COMMAND], timeout=SECONDS)
    assert done.stdout.startswith("['-c', ")


def test_what_is_wanted_again_comes_from_an_interpreter_that_began_so(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import fleetplane\nfleetplane.__version__ = 'another'\n")
    path = os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"]))
    kinds = []
    for _ in range(3):
        process = warm_start.started(
            [*COMMAND, "--version"], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
        )
        assert process.communicate(timeout=SECONDS)[0] == "fleetplane another\n"
        kinds.append(type(process))
    assert kinds[0] is subprocess.Popen
    assert kinds[1] is kinds[2] is not subprocess.Popen
