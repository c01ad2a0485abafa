"""Two real servers on one PostgreSQL: the second stands by, and serves once the first is gone."""

from __future__ import annotations

import base64
import json
import os
import secrets
import signal
import socket
from pathlib import Path
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc
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


def test_a_follower_says_that_it_serves_in_its_ready_file_and_to_its_supervisor(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    environment = _environment(postgres, tmp_path)
    with (
        running_server(tmp_path / "one", "--only", "gpus", environment=environment),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor,
    ):
        supervisor.bind(str(tmp_path / "notify.sock"))
        supervisor.settimeout(START_SECONDS)
        told = {**environment, "NOTIFY_SOCKET": str(tmp_path / "notify.sock")}
        two = WaitingServer(tmp_path / "two", told, "--only", "gpus")
        assert supervisor.recv(100) == b"READY=1\nSTATUS=follower"
        said = json.loads((tmp_path / "two" / "ready.json").read_text())
        assert (said["role"], said["pid"]) == ("follower", two.process.pid)
        web = httpx.get(f"{said['listeners']['web'][0]}/readyz/reads", timeout=START_SECONDS)
        assert web.status_code == 200
        two.process.send_signal(signal.SIGTERM)
        assert two.process.wait(STOP_SECONDS) == 0
        assert supervisor.recv(100) == b"STOPPING=1"
        assert not two.serves


def test_a_leader_that_was_stopped_for_longer_than_its_lease_tells_no_balancer_that_it_leads(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    lease = "\nseat.GIVE_UP_SECONDS, seat.LIFE_SECONDS = 8.0, 9.0\n"
    environment = _environment(postgres, tmp_path) | patient(tmp_path, reads=True, more=lease)
    with (
        running_server(tmp_path / "one", "--only", "gpus", environment=environment) as one,
        WaitingServer(tmp_path / "two", environment, "--only", "gpus") as two,
        socket.create_connection(
            ("127.0.0.1", httpx.URL(one.listeners["web"][0]).port or 80), START_SECONDS
        ) as asking,
        grpc.insecure_channel(one.socket) as channel,
    ):
        health: Any = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=START_SECONDS).status == serving
        two.until(lambda: two.serves)
        os.kill(one.pid, signal.SIGSTOP)
        try:
            asking.sendall(b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            checking = health.Check.future(health_pb2.HealthCheckRequest(), timeout=START_SECONDS)
            two.until(lambda: two.is_ready)
        finally:
            os.kill(one.pid, signal.SIGCONT)
        assert not asking.recv(100).startswith(b"HTTP/1.1 200"), "another one leads"
        try:
            assert checking.result().status != serving
        except grpc.RpcError as ended:
            assert ended.code() is grpc.StatusCode.UNAVAILABLE  # an end is no lie, either
        assert one.process.wait(STOP_SECONDS) != 0


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
