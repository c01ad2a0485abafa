"""`fleetplane demo`: everything comes up together, can be tried, ends together, and comes up again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from fleetplane.environment import PREFIX
from fleetplane.settings import known_keys

T = TypeVar("T")
BIN = Path(sys.executable).parent
WAIT_SECONDS = 120.0


def until(condition: Callable[[], T], what: str, log: Path, script: subprocess.Popen[bytes]) -> T:
    """What the condition comes to, once that is true."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := condition()):
        assert script.poll() is None, f"{what}: {log.read_text()[-3000:]}"
        assert time.monotonic() < deadline, f"{what}: {log.read_text()[-3000:]}"
        time.sleep(0.5)  # each look starts a process of its own
    return found


def processes_of(data: Path) -> list[str]:
    """Commands of all living processes that were given this data directory, by argument or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command, environment = ((entry / name).read_bytes() for name in ("cmdline", "environ"))
            except OSError:
                continue
            if command and str(data).encode() in command + environment:
                found.append(command.replace(b"\0", b" ").decode())
    return found


@contextmanager
def running(data: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    anywhere = {
        PREFIX + key.upper().replace(".", "__").replace("-", "_"): "127.0.0.1:0"
        for key, _ in known_keys()
        if key.startswith("listeners.") and key.endswith(".addresses")
    }
    anywhere[PREFIX + "LISTENERS__DEVICE_API__ADDRESSES"] = f"unix://{data}/device.sock,127.0.0.1:0"
    environment = {**os.environ, **anywhere, "FLEETPLANE_DATA_DIR": str(data)}
    with log.open("ab") as output:
        script = subprocess.Popen(
            [BIN / "fleetplane", "demo"],
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    try:
        yield script
    finally:
        if script.poll() is None:
            script.terminate()
            script.wait(WAIT_SECONDS)


def fleetplane(data: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "fleetplane"), *arguments, "--data-dir", str(data)]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT_SECONDS, check=False)


def registered(data: Path) -> list[str]:
    listed = fleetplane(data, "instances", "list", "-o", "json")
    if listed.returncode:
        return []
    return [entry["instance_id"] for entry in json.loads(listed.stdout) if entry["state"] == "registered"]


def daemons(data: Path) -> list[dict[str, Any]]:
    """Edge daemons that are connected."""
    listed = fleetplane(data, "edge", "ls", "--connected", "-o", "json")
    return json.loads(listed.stdout) if listed.returncode == 0 else []


def boards(data: Path) -> list[dict[str, Any]]:
    """Boards that are ready."""
    listed = fleetplane(data, "boards", "list", "-o", "json")
    found = json.loads(listed.stdout) if listed.returncode == 0 else []
    return [one for one in found if one["status"] == "ready"]


def level(data: Path) -> int:
    read = fleetplane(data, "boards", "gpio", "read", "demo:17", "-o", "json")
    return int(json.loads(read.stdout)["value"]) if read.returncode == 0 else -1


def until_all_ended(data: Path) -> None:
    """Whoever ends with the script is given the time to be gone."""
    deadline = time.monotonic() + WAIT_SECONDS
    while left := processes_of(data):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.timeout(900)
def test_a_local_group_comes_up_scales_ends_with_the_server_and_comes_up_again(tmp_path: Path) -> None:
    data, log = tmp_path / "data", tmp_path / "run.log"
    with running(data, log) as script:
        until(lambda: len(registered(data)) == 2, "two instances register", log, script)
        homes = [data / "instances" / "local" / name for name in registered(data)]
        wanted = [home / "recv" / file for home in homes for file in ("worker.env", "worker.crt")]
        until(lambda: all(path.exists() for path in wanted), "they get their files", log, script)
        patience = ("--timeout", f"{WAIT_SECONDS:g}s")
        scaled = fleetplane(data, "instances", "scale", "workers", "3", "--wait", *patience)
        assert scaled.returncode == 0, scaled.stderr
        assert len(processes_of(data)) >= 5, "script, server and three agents"
        before = set(registered(data))
        (daemon,) = until(lambda: daemons(data), "the edge daemon connects", log, script)
        call = ("--arg", "command=echo", "--arg", 'args=["from the edge"]')
        said = fleetplane(data, "edge", "run", "--target", "@here", *call)
        assert (said.returncode, "from the edge" in said.stdout) == (0, True), said.stderr
        (board,) = until(lambda: boards(data), "the board is ready", log, script)
        added = fleetplane(data, "boards", "gpio", "add", "demo:17", "--direction", "output")
        assert added.returncode == 0, added.stderr
        # It is ready once it has joined; where it listens it says when it runs.
        write = ("boards", "gpio", "write", "demo:17", "high")
        until(lambda: fleetplane(data, *write).returncode == 0, "its agent is reached", log, script)
        until(lambda: level(data) == 1, "its pin is driven", log, script)

        os.killpg(script.pid, signal.SIGINT)  # as a terminal does it
        assert script.wait(WAIT_SECONDS) == 0
        until_all_ended(data)
    assert "Traceback" not in log.read_text() + (data / "run.log").read_text()
    assert log.read_text().count("\n") < 30, "the terminal stays readable"

    with running(data, log) as script:
        until(lambda: bool(set(registered(data)) - before), "lost instances are replaced", log, script)
        back = until(lambda: daemons(data), "the edge daemon is back", log, script)
        assert [one["node_id"] for one in back] == [daemon["node_id"]], "as the same node"
        again = until(lambda: boards(data), "the board is back", log, script)
        assert [one["id"] for one in again] == [board["id"]], "as the same board"
        until(lambda: level(data) == 1, "its pin is driven again", log, script)
        script.send_signal(signal.SIGTERM)
        assert script.wait(WAIT_SECONDS) == 0
        until_all_ended(data)
