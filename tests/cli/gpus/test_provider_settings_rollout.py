"""Settings of providers, rolled out by a real server to real provider processes on the stand-in driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml
from support.gpus.nvml_stub import FakeDriver, compile_stub
from support.shared.cli_runner import COMMAND
from support.shared.seats import SOCKET, Seat, seated
from support.shared.server_process import ServerProcess, running_server

LEASE_SECONDS = 20.0
"""A heartbeat each second may be late by many seconds on a busy machine."""
CANARY, OTHER = "canary", "other"


def eventually(met: Callable[[], bool], what: str) -> None:
    """Each look is a whole command: two a second are enough."""
    deadline = time.monotonic() + 120
    while not met():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.5)


class Site:
    def __init__(self, folder: Path, seat: Seat, agents: Mapping[str, subprocess.Popen[bytes]]) -> None:
        self._folder = folder
        self._seat = seat
        self.agents = agents

    def json(self, *words: str) -> Any:
        done = self._seat(*words, "-o", "json")
        assert done.code == 0, done.err
        return json.loads(done.out)

    def apply(self, **spec: object) -> None:
        document = {
            "kind": "provider-settings",
            "metadata": {"name": "providers", "scope": "/"},
            "spec": spec,
        }
        path = self._folder / "settings.yaml"
        path.write_text(yaml.safe_dump(document))
        done = self._seat("apply", "-f", str(path))
        assert done.code == 0, done.err

    def policy(self, **fields: object) -> None:
        path = self._folder / "policy.yaml"
        path.write_text(yaml.safe_dump({"waves": ["label provider=canary", "rest"], **fields}))
        words = ("rollout", "policy", "set", "gpus.settings", "providers", "--policy", str(path))
        done = self._seat(*words)
        assert done.code == 0, done.err

    def status(self) -> Any:
        return self.json("get", "provider-settings/providers")["status"]

    def versions(self) -> dict[str, str]:
        found = self.json("get", "providers")["items"]
        return {one["metadata"]["name"]: one["status"]["settings"] for one in found}

    def rollout(self, version: str) -> Any:
        """The rollout to a version, with its targets."""
        found = [one for one in self.json("rollout", "status") if one["to"] == version]
        return self.json("rollout", "status", found[0]["id"], "--targets") if found else None

    def comes_to(self, version: str, met: Callable[[Any], bool], what: str) -> Any:
        """The rollout to a version, once it is so."""
        shown: list[Any] = []

        def is_so() -> bool:
            shown.append(self.rollout(version))
            return shown[-1] is not None and met(shown[-1])

        eventually(is_so, what)
        return shown[-1]


@contextmanager
def provider(name: str, folder: Path, root: Path, server: ServerProcess) -> Iterator[subprocess.Popen[bytes]]:
    """A provider with a driver and GPUs of its own."""
    driver = FakeDriver(folder / f"nvml-{name}", root)
    for index in range(2):
        driver.set_gpu(index, name=f"GPU-{name}-{index}")
    words = ["agent", "gpu", "--provider-id", name, "--driver-root", str(root)]
    words += ["--address", server.socket.removeprefix("unix:"), "--state-dir", str(folder / "state")]
    process = subprocess.Popen([*COMMAND, *words], env={**os.environ, "FAKE_NVML": str(driver.folder)})
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(60)


@contextmanager
def opened(folder: Path) -> Iterator[Site]:
    root = folder / "driver"
    compile_stub(root)
    lease = ("--set", f"gpus.lease_seconds={LEASE_SECONDS:g}")
    with ExitStack() as stack:
        server = stack.enter_context(running_server(folder / "d", "--only", "gpus", *lease))
        seat = seated(SOCKET, server, folder / "d", folder, ())
        agents = {name: stack.enter_context(provider(name, folder, root, server)) for name in (CANARY, OTHER)}
        yield Site(folder, seat, agents)


def outcomes(rollout: Any) -> dict[str, str]:
    return {one["name"]: one["state"] for one in rollout["targets"]}


def test_settings_go_out_in_waves_and_a_provider_that_loses_its_lease_halts_them(tmp_path: Path) -> None:
    with opened(tmp_path) as site:
        site.apply(heartbeatSeconds=1)
        eventually(lambda: site.status()["inPlace"] == 2, "everyone has them without a policy")

        site.policy(soak_seconds=0)
        site.apply(heartbeatSeconds=1.5, ignoredXids=[62])
        second = site.status()["version"]
        done = site.comes_to(second, lambda one: one["phase"] == "done", "a good version is done")
        assert outcomes(done) == {CANARY: "confirmed", OTHER: "confirmed"}
        assert site.versions() == {CANARY: second, OTHER: second}

        gate = {"name": "gpus", "query": "gpus_healthy", "min": 1, "window_seconds": 5}
        site.policy(soak_seconds=3600, max_soak_seconds=7200, on_halt="roll_back", gates=[gate])
        site.apply(heartbeatSeconds=2)
        third = site.status()["version"]
        site.comes_to(
            third, lambda one: outcomes(one).get(CANARY) == "confirmed", "the first wave has the next version"
        )
        site.agents[CANARY].send_signal(signal.SIGSTOP)  # it does not renew its lease any more
        back = site.comes_to(
            third, lambda one: one["phase"] == "rolling_back", "the lease is lost and the rollout goes back"
        )
        assert "unhealthy after it had confirmed" in json.dumps(back)
        site.agents[CANARY].send_signal(signal.SIGCONT)
        ended = site.comes_to(third, lambda one: one["phase"] == "rolled_back", "it has gone back")
        assert outcomes(ended) == {CANARY: "rolled_back", OTHER: "never_started"}
        assert site.versions() == {CANARY: second, OTHER: second}
