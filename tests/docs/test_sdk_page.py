"""The programs of docs/sdk.md, run as printed against a real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from support.shared.page_runner import ROOT
from support.shared.server_process import running_server

from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, provider_pb2, provider_pb2_grpc

PAGE = (ROOT / "docs" / "sdk.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    data = tmp_path_factory.mktemp("sdk") / "d"
    with running_server(data, "--only", "gpus,edge") as server:
        with grpc.insecure_channel(server.socket) as channel:
            provider = provider_pb2_grpc.ProviderServiceStub(channel)
            provider.RegisterGpu(
                provider_pb2.RegisterGpuRequest(
                    name="gpu-a", spec=gpu_pb2.GpuSpec(uuid="GPU-a"), provider_id="test"
                )
            )
            ready = gpu_pb2.Condition(type="Ready", status="True", reason="Tested")
            provider.UpdateGpuCondition(
                provider_pb2.UpdateGpuConditionRequest(name="gpu-a", condition=ready, provider_id="test")
            )
        yield data


@pytest.mark.parametrize("program", PROGRAMS, ids=[f"program-{n}" for n in range(len(PROGRAMS))])
def test_a_program_of_the_page_runs_as_printed(data_dir: Path, program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "FLEETPLANE_DATA_DIR": str(data_dir)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "gpu" in done.stdout or "revision" in done.stdout
