"""The real server, the real agent and the real command line, each a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.gpus.device_api_double import eventually
from support.gpus.nvml_stub import FakeDriver, compile_stub, uuid
from support.shared.cli_runner import Outcome, execute, spawn

from fleetplane.domains.gpus.agent.library import DriverEventKind

CONFIG = """
[listeners.web]
addresses = ["127.0.0.1:0"]
[listeners.device-api]
addresses = ["unix://{socket}", "127.0.0.1:0"]
[gpus]
lease_seconds = {lease}
"""


class Node:
    """One machine: a server with its data, a driver with two GPUs, and an agent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "device.sock"
        self.ready_file = folder / "ready.json"
        self.config = folder / "server.toml"
        self.driver_root = folder / "driver"
        compile_stub(self.driver_root)
        self.fake = FakeDriver(folder / "nvml", self.driver_root)
        self.server: subprocess.Popen[str] | None = None
        self.agent: subprocess.Popen[str] | None = None

    def start_server(self, *, lease_seconds: float = 60.0) -> None:
        self.config.write_text(CONFIG.format(socket=self.socket, lease=lease_seconds))
        self.ready_file.unlink(missing_ok=True)
        self.server = spawn(
            "server",
            "--only",
            "gpus",
            "--data-dir",
            str(self.folder / "data"),
            "--config",
            str(self.config),
            "--ready-file",
            str(self.ready_file),
            "--log-level",
            "warning",
        )
        eventually(self.is_ready, "the server is ready", within_seconds=60)

    def is_ready(self) -> bool:
        assert self.server is not None
        assert self.server.poll() is None, self.server.communicate()
        return self.ready_file.exists() and bool(self.ready_file.read_text())

    def start_agent(self) -> None:
        self.agent = spawn(
            "agent",
            "gpu",
            "--driver-root",
            str(self.driver_root),
            "--address",
            str(self.socket),
            "--heartbeat-seconds",
            "0.3",
        )

    def stop(self, process: subprocess.Popen[str] | None, number: int = signal.SIGTERM) -> int:
        if process is None:
            return 0
        process.send_signal(number)
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        return process.returncode

    def gpus(self, *arguments: str) -> Outcome:
        return execute("gpus", *arguments, "--address", str(self.socket))

    def has_lease(self) -> bool:
        told = execute("get", "providers", "-o", "json", "--data-dir", str(self.folder / "data"))
        assert told.code == 0, told.err
        return any(one["status"]["heartbeats"] for one in json.loads(told.out)["items"])

    def wait_for(self, name: str, term: str, reason: str) -> None:
        outcome = self.gpus("get", name, "--wait-for", term, "--timeout", "60s", "-o", "json")
        assert outcome.code == 0, outcome.err
        conditions = json.loads(outcome.out)["status"]["conditions"]
        kind = term.partition("=")[0]
        assert [entry["reason"] for entry in conditions if entry["type"] == kind] == [reason]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "nvml"))
    made = Node(tmp_path)
    yield made
    for process in (made.agent, made.server):
        if process is not None and process.poll() is None:
            made.stop(process, signal.SIGKILL)


def test_an_xid_travels_from_the_driver_to_the_operators_screen(node: Node) -> None:
    node.start_server()
    node.start_agent()
    node.wait_for(uuid(1), "NVMLReady=True", "Initialized")
    assert node.gpus("set-condition", uuid(1), "Ready=True", "--reason", "Checked").code == 0
    node.fake.event(1, DriverEventKind.XID, 79)
    node.wait_for(uuid(1), "NVMLReady=False", "XidError")

    listed = node.gpus("list").out.splitlines()
    assert [line.split()[:2] for line in listed[1:]] == [[uuid(0), "Healthy"], [uuid(1), "Unhealthy"]]
    conditions = json.loads(node.gpus("conditions", uuid(1), "-o", "json").out)
    assert {entry["type"]: entry["status"] for entry in conditions} == {"NVMLReady": "False", "Ready": "True"}
    assert node.gpus("get", uuid(1), "--expect", "NVMLReady=True").code == 3
    assert node.gpus("get", "nope").code == 4
    assert node.stop(node.agent) == 0
    assert node.stop(node.server) == 0
    assert node.gpus("list").code == 8


def test_a_silent_agent_turns_its_conditions_unknown_and_brings_them_back(node: Node) -> None:
    node.start_server(lease_seconds=2.0)
    node.start_agent()
    node.wait_for(uuid(0), "NVMLReady=True", "Initialized")
    eventually(node.has_lease, "the agent has a lease", within_seconds=60)
    assert node.stop(node.agent, signal.SIGKILL) == -signal.SIGKILL
    node.wait_for(uuid(0), "NVMLReady=Unknown", "ProviderSilent")
    node.start_agent()
    outcome = node.gpus("get", uuid(0), "--wait-for", "NVMLReady=True", "--timeout", "60s")
    assert outcome.code == 0, outcome.err


def test_agent_and_watch_outlive_a_killed_server(node: Node) -> None:
    node.start_agent()  # before the server
    node.start_server()
    node.wait_for(uuid(0), "NVMLReady=True", "Initialized")
    watcher = spawn("gpus", "watch", "-o", "json", "--address", str(node.socket))
    assert watcher.stdout is not None
    seen = {json.loads(watcher.stdout.readline())["object"]["name"] for _ in range(2)}
    assert seen == {uuid(0), uuid(1)}

    node.stop(node.server, signal.SIGKILL)
    node.fake.event(0, DriverEventKind.XID, 48)
    node.start_server()
    node.wait_for(uuid(0), "NVMLReady=False", "XidError")
    node.wait_for(uuid(1), "NVMLReady=True", "Initialized")

    versions: list[tuple[int, str]] = []
    for line in watcher.stdout:
        gpu = json.loads(line)["object"]
        versions.append((int(gpu["resourceVersion"]), gpu["name"]))
        if gpu["status"]["conditions"][0]["reason"] == "XidError":
            break
    assert len(versions) == len(set(versions))  # nothing twice
    assert [version for version, _ in versions] == sorted(version for version, _ in versions)
    node.stop(watcher)
