from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.gpus.device_api_double import DeviceApiDouble
from support.gpus.nvml_stub import FakeDriver, NvmlRig, Rig, SimulatedRig, compile_stub

from fleetplane.domains.gpus.agent import driver


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that a busy machine lets wait is not taken for one that is stuck in the driver."""
    monkeypatch.setattr(driver, "STOP_LIMIT_SECONDS", 60.0)


@pytest.fixture(scope="session")
def driver_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("driver")
    compile_stub(root)
    return root


@pytest.fixture
def fake_driver(tmp_path: Path, driver_root: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    folder = tmp_path / "nvml"
    monkeypatch.setenv("FAKE_NVML", str(folder))
    return FakeDriver(folder, driver_root)


@pytest.fixture(params=["simulated", "nvml"])
def rig(request: pytest.FixtureRequest) -> Rig:
    """Two GPUs, once simulated and once behind pynvml: both must keep the same contract."""
    if request.param == "simulated":
        return SimulatedRig()
    return NvmlRig(request.getfixturevalue("fake_driver"))


@pytest.fixture
def device_api(tmp_path: Path) -> Iterator[DeviceApiDouble]:
    double = DeviceApiDouble(tmp_path / "device.sock")
    yield double
    double.stop()
