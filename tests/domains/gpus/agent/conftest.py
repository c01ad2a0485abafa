from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from device_api_double import DeviceApiDouble
from nvml_stub import FakeDriver, NvmlRig, Rig, SimulatedRig, compile_stub


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
