from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.gpus.device_api_double import DeviceApiDouble
from support.shared.cli_runner import Invoke, Outcome

from fleetplane.cli.main import run


@pytest.fixture
def device_api(tmp_path: Path) -> Iterator[DeviceApiDouble]:
    double = DeviceApiDouble(tmp_path / "device.sock")
    double.start()
    yield double
    double.stop()


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Invoke:
    """Run one command in this process, in an empty folder and with no variable of ours set."""
    monkeypatch.delenv("FLEETPLANE_DEVICE_API", raising=False)
    monkeypatch.delenv("NVIDIA_DEVICE_API_TARGET", raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Outcome:
        code = run(arguments)
        captured = capsys.readouterr()
        return Outcome(code=code, out=captured.out, err=captured.err)

    return call
