"""A disk that fails to sync: the outcome is unknown, and the server stops rather than guess."""

from __future__ import annotations

import subprocess
from pathlib import Path

import grpc
import pytest
from support.shared.server_process import STOP_SECONDS, running_server

from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, gpu_pb2_grpc, provider_pb2, provider_pb2_grpc

SOURCE = Path(__file__).parents[2] / "support" / "shared" / "failing_sync.c"


def test_after_a_failed_sync_the_outcome_is_unknown_and_the_server_stops(tmp_path: Path) -> None:
    library, trigger, data = tmp_path / "failing_sync.so", tmp_path / "trigger", tmp_path / "data"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    environment = {"LD_PRELOAD": str(library), "FAILING_SYNC": str(trigger)}

    with running_server(data, "--only", "gpus", environment=environment) as server:
        with grpc.insecure_channel(server.socket) as channel:
            provider = provider_pb2_grpc.ProviderServiceStub(channel)
            provider.RegisterGpu(provider_pb2.RegisterGpuRequest(name="gpu-1"), timeout=60)
            trigger.touch()
            with pytest.raises(grpc.RpcError) as refused:
                provider.RegisterGpu(provider_pb2.RegisterGpuRequest(name="gpu-2"), timeout=60)
            # Neither "done" nor "not done", nor the code on which clients try again by themselves.
            assert refused.value.code() is grpc.StatusCode.UNKNOWN
            assert "could not be synced" in str(refused.value.details())
        assert server.process.wait(STOP_SECONDS) == 1
        assert "it is unknown whether the last writes are kept" in server.log.read_text()
    trigger.unlink()

    with running_server(data, "--only", "gpus") as server, grpc.insecure_channel(server.socket) as channel:
        listed = gpu_pb2_grpc.GpuServiceStub(channel).ListGpus(gpu_pb2.ListGpusRequest(), timeout=60)
        names = {gpu.metadata.name for gpu in listed.gpu_list.items}
        assert "gpu-1" in names, "what was acknowledged is kept"
        assert names <= {"gpu-1", "gpu-2"}
        assert server.stop() == 0
