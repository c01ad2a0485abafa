from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from support.gpus.device_api_double import DeviceApiDouble, eventually
from support.gpus.nvml_stub import FakeDriver, compile_stub, uuid
from support.shared.cli_runner import Invoke, execute, spawn

from fleetplane.domains.gpus.agent.library import DriverEventKind


def test_without_a_driver_it_says_so_in_one_line_and_exits_8(tmp_path: Path) -> None:
    outcome = execute("agent", "gpu", "--driver-root", str(tmp_path))
    assert outcome.code == 8
    assert outcome.err.count("\n") == 1
    assert "libnvidia-ml.so.1" in outcome.err
    assert "--simulate" in outcome.err


def test_a_bad_xid_list_is_a_usage_error(invoke: Invoke) -> None:
    outcome = invoke("agent", "gpu", "--ignored-xids", "13,x")
    assert outcome.code == 2
    assert "'x' is not an XID" in outcome.err


def test_simulated_gpus_need_no_driver_and_sigterm_ends_cleanly(device_api: DeviceApiDouble) -> None:
    agent = spawn("agent", "gpu", "--simulate", "3", "--address", device_api.address, "--log-format", "json")
    assert agent.stderr is not None
    events = [json.loads(agent.stderr.readline())["event"]]
    while events[-1] != "device_api_joined":
        events.append(json.loads(agent.stderr.readline())["event"])
    assert len(device_api.gpus) == 3
    agent.send_signal(signal.SIGTERM)
    _, err = agent.communicate(timeout=60)
    assert agent.returncode == 0
    assert json.loads(err.splitlines()[-1])["event"] == "agent_stopped"


def test_the_process_reads_a_driver_root_and_enumerates_again_on_sighup(
    device_api: DeviceApiDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_stub(tmp_path / "driver")
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "nvml"))
    fake = FakeDriver(tmp_path / "nvml", tmp_path / "driver")
    agent = spawn("agent", "gpu", "--driver-root", str(tmp_path / "driver"), "--address", device_api.address)
    try:
        eventually(lambda: set(device_api.gpus) == {uuid(0), uuid(1)})
        fake.event(0, DriverEventKind.XID, 79)

        def reason() -> str:
            held = device_api.condition(uuid(0))
            return held.reason if held is not None else ""

        eventually(lambda: reason() == "XidError")
        agent.send_signal(signal.SIGHUP)
        eventually(lambda: reason() == "Recovered")
    finally:
        agent.terminate()
        agent.communicate(timeout=60)
    assert agent.returncode == 0
    assert fake.calls == ["init", "create", "free", "shutdown"] * 2
