"""Two real servers on one PostgreSQL: the second stands by, and serves once the first is gone."""

from __future__ import annotations

import base64
import os
import secrets
import signal
from pathlib import Path

import grpc
from support.shared.postgres_server import PostgresServer
from support.shared.server_process import START_SECONDS, STOP_SECONDS, ServerProcess, running_server
from support.shared.waiting_server import WaitingServer, patient

from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, gpu_pb2_grpc, provider_pb2, provider_pb2_grpc


def register(server: ServerProcess, name: str) -> int:
    with grpc.insecure_channel(server.socket) as channel:
        stub = provider_pb2_grpc.ProviderServiceStub(channel)
        version: int = stub.RegisterGpu(provider_pb2.RegisterGpuRequest(name=name)).resource_version
        return version


def names(server: ServerProcess) -> list[str]:
    with grpc.insecure_channel(server.socket) as channel:
        stub = gpu_pb2_grpc.GpuServiceStub(channel)
        return [gpu.name for gpu in stub.ListGpus(gpu_pb2.ListGpusRequest()).gpu_list.items]


def _environment(postgres: PostgresServer, folder: Path) -> dict[str, str]:
    return {
        **patient(reads=True),
        "FLEETPLANE_STORE__URL": postgres.database(),
        "FLEETPLANE_IDENTITY__MASTER_KEY": base64.b64encode(secrets.token_bytes(32)).decode(),
    }


def test_a_standby_serves_after_the_active_server_was_killed(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    environment = _environment(postgres, tmp_path)
    with running_server(tmp_path / "one", "--only", "gpus", environment=environment) as one:
        version = register(one, "gpu-1")
        two = WaitingServer(tmp_path / "two", environment, "--only", "gpus")
        try:
            two.until(lambda: "store.stands_by" in two.told(), START_SECONDS)
            assert not two.is_ready
            second = register(one, "gpu-2")
            assert second > version
            os.kill(one.pid, signal.SIGKILL)
            one.process.wait(STOP_SECONDS)
            two.until(lambda: two.is_ready, START_SECONDS)
            server = two.server()
            assert names(server) == ["gpu-1", "gpu-2"]
            assert register(server, "gpu-3") > second
            assert server.stop() == 0
        finally:
            two.process.kill()
            two.process.wait()


def test_a_standby_ends_when_it_is_told_to(tmp_path: Path, postgres: PostgresServer) -> None:
    environment = _environment(postgres, tmp_path)
    with running_server(tmp_path / "one", "--only", "gpus", environment=environment):
        two = WaitingServer(tmp_path / "two", environment, "--only", "gpus")
        two.until(lambda: "store.stands_by" in two.told(), START_SECONDS)
        two.process.send_signal(signal.SIGTERM)
        assert two.process.wait(STOP_SECONDS) == 0
        assert not two.is_ready


def test_a_server_with_another_master_key_does_not_take_over(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    environment = _environment(postgres, tmp_path)
    with running_server(tmp_path / "one", "--only", "gpus", environment=environment) as one:
        register(one, "gpu-1")
        assert one.stop() == 0
    other = {**environment, "FLEETPLANE_IDENTITY__MASTER_KEY": base64.b64encode(bytes(32)).decode()}
    two = WaitingServer(tmp_path / "two", other, "--only", "gpus")
    assert two.process.wait(START_SECONDS) != 0
    assert "not made with this master key" in two.told()
    assert postgres.database().partition("@")[0] not in two.told()
