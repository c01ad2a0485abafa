from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.gpus.device_api_double import DeviceApiDouble, eventually
from support.shared.cli_runner import COMMAND, Invoke, spawn

from fleetplane.cli.clients.client import GpuWatch
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2


def gpu(name: str, version: int) -> gpu_pb2.Gpu:
    return gpu_pb2.Gpu(metadata=gpu_pb2.ObjectMeta(name=name), resource_version=version)


def listed(version: int, *gpus: gpu_pb2.Gpu) -> gpu_pb2.GpuList:
    made = gpu_pb2.GpuList(items=gpus)
    made.metadata.resource_version = str(version)
    return made


def event(kind: str, changed: gpu_pb2.Gpu) -> gpu_pb2.WatchGpusResponse:
    return gpu_pb2.WatchGpusResponse(type=kind, object=changed)


def kinds(changes: Iterator[object]) -> list[str]:
    return [change.kind for change in changes]  # type: ignore[attr-defined]


def test_a_second_list_tells_only_what_differs() -> None:
    watch = GpuWatch()
    assert kinds(watch.on_list(listed(2, gpu("a", 1), gpu("b", 2)))) == ["ADDED", "ADDED"]
    assert kinds(watch.on_list(listed(4, gpu("b", 2), gpu("c", 4)))) == ["DELETED", "ADDED"]
    assert kinds(watch.on_list(listed(5, gpu("b", 5), gpu("c", 4)))) == ["MODIFIED"]
    assert watch.version == "5"


def test_an_event_seen_before_is_not_told_again() -> None:
    watch = GpuWatch()
    list(watch.on_list(listed(1, gpu("a", 1))))
    assert kinds(watch.on_event(event("ADDED", gpu("a", 1)))) == []
    assert kinds(watch.on_event(event("MODIFIED", gpu("a", 2)))) == ["MODIFIED"]
    assert kinds(watch.on_event(event("DELETED", gpu("a", 3)))) == ["DELETED"]
    assert kinds(watch.on_event(event("DELETED", gpu("a", 3)))) == []


def test_a_stream_that_broke_is_resumed_after_the_last_event_it_brought() -> None:
    watch = GpuWatch()
    list(watch.on_list(listed(2, gpu("a", 1), gpu("b", 2))))
    assert watch.version == "2"
    assert kinds(watch.on_event(event("MODIFIED", gpu("a", 3)))) == ["MODIFIED"]
    assert watch.version == "3"
    assert kinds(watch.on_event(event("MODIFIED", gpu("a", 3)))) == []
    assert kinds(watch.on_event(event("MODIFIED", gpu("b", 4)))) == ["MODIFIED"]
    assert watch.version == "4"


def test_outside_a_terminal_each_change_is_a_line(device_api: DeviceApiDouble) -> None:
    device_api.put("gpu-a")
    watcher = spawn("gpus", "watch", "--address", device_api.address)
    try:
        assert watcher.stdout is not None
        assert watcher.stdout.readline().split()[:3] == ["ADDED", "gpu-a", "v1"]
        device_api.put("gpu-a", gpu_pb2.Condition(type="Ready", status="False", reason="Hot"))
        assert watcher.stdout.readline().split() == [
            "MODIFIED",
            "gpu-a",
            "v2",
            "Unhealthy",
            "Ready=False(Hot)",
        ]
        device_api.remove("gpu-a")
        assert watcher.stdout.readline().split()[0] == "DELETED"
    finally:
        watcher.terminate()
        watcher.communicate(timeout=60)


def test_json_lines_survive_a_restart_of_the_server_and_miss_nothing(device_api: DeviceApiDouble) -> None:
    device_api.put("gpu-a")
    watcher = spawn("gpus", "watch", "-o", "json", "--address", device_api.address)
    try:
        assert watcher.stdout is not None
        first = watcher.stdout.readline()
        assert first, watcher.communicate(timeout=60)[1]
        assert json.loads(first)["type"] == "ADDED"
        eventually(lambda: device_api.calls_of("WatchGpus"))
        device_api.stop()
        device_api.put("gpu-a")
        device_api.put("gpu-a")
        device_api.start()
        versions = [json.loads(watcher.stdout.readline())["object"]["resourceVersion"] for _ in range(2)]
        assert versions == ["2", "3"]
        assert device_api.calls_of("WatchGpus")[-1].opts.resource_version == "1"
        assert len(device_api.calls_of("ListGpus")) == 1
    finally:
        watcher.terminate()
        _, err = watcher.communicate(timeout=60)
    assert "trying again" in err


def test_when_the_place_is_no_longer_kept_a_fresh_list_says_what_changed(device_api: DeviceApiDouble) -> None:
    device_api.put("gpu-a")
    device_api.put("gpu-b")
    watcher = spawn("gpus", "watch", "-o", "json", "--address", device_api.address)
    try:
        assert watcher.stdout is not None
        for _ in range(2):
            watcher.stdout.readline()
        eventually(lambda: device_api.calls_of("WatchGpus"))
        device_api.stop()
        device_api.remove("gpu-a")
        device_api.put("gpu-b")
        device_api.oldest_kept = device_api.version
        device_api.start()
        changes = [json.loads(watcher.stdout.readline()) for _ in range(2)]
        assert [(change["type"], change["object"]["name"]) for change in changes] == [
            ("DELETED", "gpu-a"),
            ("MODIFIED", "gpu-b"),
        ]
    finally:
        watcher.terminate()
        watcher.communicate(timeout=60)


def test_yaml_changes_are_documents_and_timeout_ends_the_watch_well(
    invoke: Invoke, device_api: DeviceApiDouble
) -> None:
    device_api.put("gpu-a")
    outcome = invoke("gpus", "watch", "-o", "yaml", "--timeout", "5s", "--address", device_api.address)
    assert outcome.code == 0
    assert outcome.out.startswith("---\ntype: ADDED\n")


def test_a_watch_of_nothing_reachable_fails_at_once(invoke: Invoke, tmp_path: Path) -> None:
    assert invoke("gpus", "watch", "--address", str(tmp_path / "none.sock")).code == 8


class Terminal:
    """A command in a terminal of its own, and everything it drew."""

    def __init__(self, *arguments: str) -> None:
        self._leader, follower = pty.openpty()
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "140", "LINES": "40"}
        environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env=environment,
            start_new_session=True,
        )
        os.close(follower)
        self.drawn = ""

    def until(self, pattern: str, *, within_seconds: float = 60.0) -> str:
        """Read on until the pattern appears in what is drawn from now on."""
        deadline, start = time.monotonic() + within_seconds, len(self.drawn)
        while not re.search(pattern, self.drawn[start:]):
            assert time.monotonic() < deadline, f"{pattern!r} was not drawn: {self.drawn[start:]!r}"
            if select.select([self._leader], [], [], 0.1)[0]:
                try:
                    self.drawn += os.read(self._leader, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    assert re.search(pattern, self.drawn[start:]), self.drawn
        return self.drawn[start:]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)
        os.close(self._leader)


@pytest.fixture
def terminal(device_api: DeviceApiDouble) -> Iterator[Terminal]:
    device_api.put("gpu-a", gpu_pb2.Condition(type="Ready", status="True"))
    made = Terminal("gpus", "watch", "--address", device_api.address)
    yield made
    made.close()


def test_in_a_terminal_the_table_is_live_and_coloured(
    terminal: Terminal, device_api: DeviceApiDouble
) -> None:
    first = terminal.until("gpu-a")
    assert "\x1b[" in first
    terminal.until("1 GPUs, 0 unhealthy")
    device_api.put("gpu-a", gpu_pb2.Condition(type="Ready", status="False", reason="XidError"))
    assert "\x1b[1;31m" in terminal.until(r"Ready=False\(XidError\)")
    terminal.until("1 GPUs, 1 unhealthy")
    device_api.stop()
    terminal.until("not connected")
    device_api.start()
    device_api.put("gpu-b")
    terminal.until("2 GPUs")


def test_ctrl_c_leaves_the_terminal_as_it_was(terminal: Terminal, device_api: DeviceApiDouble) -> None:
    terminal.until("Ctrl-C ends")
    os.kill(terminal.process.pid, signal.SIGINT)
    terminal.until(re.escape("\x1b[?25h"))  # the cursor is shown again
    assert terminal.process.wait(60) == 130
    assert "Traceback" not in terminal.drawn
