"""A real `fleetplane server` process, started and stopped by a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.shared import warm_start

START_SECONDS = 120.0
STOP_SECONDS = 60.0
HELD_SECONDS = 1.25
"""Of processor time by one handler or task; a quarter of a second may be another's, before it."""


STALLS = ("loop.held", "server.gap")
"""What a server warns of on a machine that stood still for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProcess:
    process: subprocess.Popen[str]
    pid: int
    listeners: dict[str, list[str]]
    log: Path

    def address(self, listener: str, scheme: str) -> str:
        return next(address for address in self.listeners[listener] if address.startswith(scheme))

    @property
    def web(self) -> str:
        return self.address("web", "http")

    @property
    def socket(self) -> str:
        """The device API's Unix socket, as grpc spells it."""
        return "unix:" + self.address("device-api", "unix://").removeprefix("unix://")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)

    def logged(self) -> list[dict[str, object]]:
        """Every whole line: a long one is written in pieces, and the last may not be there yet."""
        whole = self.log.read_bytes().rpartition(b"\n")[0]
        return [json.loads(line) for line in whole.splitlines() if line.startswith(b"{")]

    def told(self) -> list[dict[str, object]]:
        """What was logged, but for what the machine is to blame for."""
        return [line for line in self.logged() if line["event"] not in STALLS]


def command(data_dir: Path, *arguments: str) -> list[str]:
    return [
        *warm_start.COMMAND,
        "server",
        "--data-dir",
        str(data_dir),
        "--log-format",
        "json",
        "--set",
        "listeners.web.addresses=127.0.0.1:0",
        "--set",
        f"listeners.device-api.addresses=unix://{data_dir}/d.sock,127.0.0.1:0",
        "--set",
        "listeners.registration.addresses=127.0.0.1:0",
        "--set",
        "listeners.operator.addresses=127.0.0.1:0",
        "--set",
        "listeners.agent.addresses=127.0.0.1:0",
        "--set",
        "listeners.proxy-agents.addresses=127.0.0.1:0",
        "--set",
        "listeners.boards.addresses=127.0.0.1:0",
        "--set",
        "listeners.edge.addresses=127.0.0.1:0",
        *arguments,
    ]


def is_leader(ready: Path) -> bool:
    """Whether a ready file says that its server takes every call."""
    try:
        return bool(json.loads(ready.read_text())["role"] == "leader")
    except FileNotFoundError:
        return False


@contextmanager
def running_server(
    data_dir: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    admin_password: str = "",
) -> Iterator[ServerProcess]:
    """Started and ready; killed at the end if the test did not stop it. `prefix` runs the command."""
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    secrets = {"FLEETPLANE_PROXIES__ADMIN_PASSWORD": admin_password} if admin_password else {}
    ready, log = data_dir / "ready.json", data_dir / "server.log"
    ready.unlink(missing_ok=True)
    with log.open("a") as stderr:
        process = warm_start.started(
            [*prefix, *command(data_dir, *arguments), "--ready-file", str(ready)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **secrets, **(environment or {})},
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not is_leader(ready):
            assert process.poll() is None, f"the server ended with {process.returncode}: {log.read_text()}"
            assert time.monotonic() < deadline, f"the server was not ready in time: {log.read_text()}"
            time.sleep(0.02)
        said = json.loads(ready.read_text())
        server = ServerProcess(process=process, pid=said["pid"], listeners=said["listeners"], log=log)
        yield server
        held = [line for line in server.logged() if line.get("event") == "loop.held"]
        assert all(float(str(one["cpu_seconds"])) <= HELD_SECONDS for one in held), (
            f"the loop was held: {held}"
        )
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(STOP_SECONDS)
        if process.stdout is not None:
            process.stdout.close()


def run_server(data_dir: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """For servers that are expected to refuse to start."""
    return warm_start.run(command(data_dir, *arguments), timeout=START_SECONDS)
