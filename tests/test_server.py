"""The server as an operator meets it: a process, its files, its signals, its words."""

from __future__ import annotations

import base64
import json
import os
import shlex
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from prometheus_client.parser import text_string_to_metric_families
from support.shared.server_process import START_SECONDS, ServerProcess, command, run_server, running_server

from fleetplane import __version__
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, gpu_pb2_grpc, provider_pb2, provider_pb2_grpc

SERVICES = {
    "nvidia.device.v1alpha1.GpuService",
    "nvidia.device.v1alpha1.ProviderService",
    "nvidia.nvsentinel.v1alpha1.GpuService",
}

GPUS = ("--only", "gpus")
"""Starts in half the time; for those who need any server."""


def register(server: ServerProcess, name: str) -> int:
    with grpc.insecure_channel(server.socket) as channel:
        stub = provider_pb2_grpc.ProviderServiceStub(channel)
        version: int = stub.RegisterGpu(provider_pb2.RegisterGpuRequest(name=name)).resource_version
        return version


def names(server: ServerProcess) -> list[str]:
    with grpc.insecure_channel(server.socket) as channel:
        stub = gpu_pb2_grpc.GpuServiceStub(channel)
        return [gpu.name for gpu in stub.ListGpus(gpu_pb2.ListGpusRequest()).gpu_list.items]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """With every domain, for those who only look."""
    with running_server(tmp_path_factory.mktemp("everything")) as server:
        yield server


def test_the_ready_file_tells_version_pid_and_every_address(everything: ServerProcess) -> None:
    folder = everything.log.parent
    said = json.loads((folder / "ready.json").read_text())

    assert said["version"] == __version__
    assert said["pid"] == everything.process.pid
    assert set(said["listeners"]) == {
        "web",
        "device-api",
        "registration",
        "operator",
        "agent",
        "admin",
        "proxy-agents",
        "boards",
        "edge",
    }
    assert said["listeners"]["device-api"][0] == f"unix://{folder}/d.sock"
    assert said["listeners"]["device-api"][1].startswith("http://127.0.0.1:")
    assert not said["listeners"]["web"][0].endswith(":0")


def test_sigterm_ends_it_with_zero_and_leaves_no_socket_or_ready_file(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        assert server.stop() == 0

        assert not (tmp_path / "ready.json").exists()
        assert not (tmp_path / "d.sock").exists()
        events = [line["event"] for line in server.told()]
        assert events[-1] == "server.stopped"
        assert {line["level"] for line in server.told()} == {"info"}


def test_a_ready_file_is_never_of_a_server_that_is_gone(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    with running_server(tmp_path, *GPUS) as server:
        os.kill(server.pid, signal.SIGKILL)
        server.process.wait(60)
    assert ready.exists(), "nobody could take it away"
    (tmp_path / "master.key").chmod(0o644)
    assert run_server(tmp_path, [*GPUS, "--ready-file", str(ready)]).returncode == 2
    assert not ready.exists(), "a server that did not start passes for one that did"


def test_the_ready_file_of_another_server_is_left_alone(tmp_path: Path) -> None:
    with running_server(tmp_path, *GPUS) as server:
        (tmp_path / "ready.json").write_text("another's\n")
        assert server.stop() == 0
    assert (tmp_path / "ready.json").read_text() == "another's\n"


def test_every_setting_can_be_given_with_set(tmp_path: Path) -> None:
    with running_server(tmp_path, "--set", "only=gpus", "--set", "log.level=warning") as server:
        assert set(server.listeners) == {"web", "admin", "device-api"}
        assert server.stop() == 0
        assert server.told() == []


def test_open_watches_do_not_delay_the_end(tmp_path: Path) -> None:
    with running_server(tmp_path, *GPUS, "--set", "shutdown.grace_seconds=60") as server:
        register(server, "gpu-1")
        ended: list[grpc.StatusCode] = []

        def watch(channel: grpc.Channel) -> None:
            stream = gpu_pb2_grpc.GpuServiceStub(channel).WatchGpus(gpu_pb2.WatchGpusRequest())
            try:
                for _ in stream:
                    opened.release()
            except grpc.RpcError as error:
                assert isinstance(error, grpc.Call)
                ended.append(error.code())

        opened = threading.Semaphore(0)
        with grpc.insecure_channel(server.socket) as channel:
            watchers = [threading.Thread(target=watch, args=(channel,)) for _ in range(3)]
            for watcher in watchers:
                watcher.start()
            for _ in watchers:
                assert opened.acquire(timeout=60)
            began = time.monotonic()
            assert server.stop() == 0
            for watcher in watchers:
                watcher.join(60)

        assert ended == [grpc.StatusCode.UNAVAILABLE] * 3
        assert time.monotonic() - began < 30, "an open watch used up the grace period"


def test_state_survives_a_kill(tmp_path: Path) -> None:
    with running_server(tmp_path, *GPUS) as server:
        version = register(server, "gpu-1")
        os.kill(server.pid, signal.SIGKILL)
        server.process.wait(60)
    with running_server(tmp_path, *GPUS) as server:
        assert names(server) == ["gpu-1"]
        assert register(server, "gpu-2") > version


def test_health_and_readiness_are_told_on_the_web_listener(everything: ServerProcess) -> None:
    for path in ("/healthz", "/livez", "/readyz"):
        answer = httpx.get(everything.web + path)
        assert (answer.status_code, answer.text) == (200, "ok\n")
    assert httpx.get(everything.web + "/").json()["version"] == __version__
    missing = httpx.get(everything.web + "/nowhere")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "NOT_FOUND")
    refused = httpx.post(everything.web + "/healthz")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")


def test_metrics_follow_the_state(tmp_path: Path) -> None:
    with running_server(tmp_path, *GPUS) as server:
        version = register(server, "gpu-1")
        with grpc.insecure_channel(server.socket) as channel:
            stub = provider_pb2_grpc.ProviderServiceStub(channel)
            condition = gpu_pb2.Condition(type="Ready", status="False")
            stub.UpdateGpuCondition(provider_pb2.UpdateGpuConditionRequest(name="gpu-1", condition=condition))
            stub.Heartbeat(provider_pb2.HeartbeatRequest(provider_id="nvml-provider", gpu_names=["gpu-1"]))
            stream = gpu_pb2_grpc.GpuServiceStub(channel).WatchGpus(gpu_pb2.WatchGpusRequest())
            next(stream)

            def scraped() -> dict[str, str]:
                lines = httpx.get(server.web + "/metrics").text.splitlines()
                return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

            numbers, deadline = scraped(), time.monotonic() + START_SECONDS
            while not float(numbers.get('device_api_server_watch_events_total{type="ADDED"}', 0)):
                assert time.monotonic() < deadline, "an event that was sent is not counted"
                numbers = scraped()
            stream.cancel()

    registering = "/nvidia.device.v1alpha1.ProviderService/RegisterGpu"
    expected = {
        "device_api_server_cache_gpus_total": 1,
        "device_api_server_cache_gpus_healthy": 0,
        "device_api_server_cache_gpus_unhealthy": 1,
        "device_api_server_cache_gpus_unknown": 0,
        'device_api_server_cache_updates_total{operation="register"}': 1,
        'device_api_server_cache_updates_total{operation="update_condition"}': 1,
        "device_api_server_watch_streams_active": 1,
        'device_api_server_watch_events_total{type="ADDED"}': 1,
        "device_api_server_watch_events_dropped_total": 0,
        "device_api_server_nvml_provider_enabled": 1,
        "device_api_server_nvml_gpu_count": 1,
        'device_api_server_provider_connection_state{provider_id="nvml-provider"}': 1,
        'device_api_server_provider_heartbeat_total{provider_id="nvml-provider"}': 1,
        f'device_api_server_grpc_requests_total{{code="OK",method="{registering}"}}': 1,
        f'grpc_server_handled_total{{grpc_code="OK",grpc_method="{registering}"}}': 1,
    }
    assert version < float(numbers["device_api_server_cache_resource_version"])
    assert version < float(numbers["fleetplane_store_revision"])
    assert {name: float(numbers[name]) for name in expected} == expected


@pytest.mark.parametrize(
    "accepted",
    [
        "application/openmetrics-text; version=abc",
        "application/openmetrics-text; version=1.0.0; escaping=nonsense",
        "text/plain; version=;;,,",
    ],
)
def test_metrics_are_told_whatever_the_scraper_asks_for(tmp_path: Path, accepted: str) -> None:
    with running_server(tmp_path, *GPUS) as server:
        with grpc.insecure_channel(server.socket) as channel:
            stub = provider_pb2_grpc.ProviderServiceStub(channel)
            stub.Heartbeat(provider_pb2.HeartbeatRequest(provider_id='a"b\n# HELP evil\nevil 1'))
        answer = httpx.get(server.web + "/metrics", headers={"accept": accepted})

    assert answer.status_code == 200
    samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    assert 'a"b\n# HELP evil\nevil 1' in {sample.labels.get("provider_id") for sample in samples}
    assert "evil" not in {sample.name for sample in samples}


def test_health_is_told_for_every_service_on_the_grpc_listener(everything: ServerProcess) -> None:
    with grpc.insecure_channel(everything.socket) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", *SERVICES):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert isinstance(caught.value, grpc.Call)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("generation", ["v1", "v1alpha"])
def test_reflection_lists_the_services_and_describes_their_messages(
    everything: ServerProcess, generation: str
) -> None:
    address = everything.address("device-api", "http://").removeprefix("http://")
    with grpc.insecure_channel(address) as channel:
        info = channel.stream_stream(
            f"/grpc.reflection.{generation}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(
                file_containing_symbol="nvidia.device.v1alpha1.GpuService"
            ),
        ]
        listed, described = info(iter(asked))

    assert {service.name for service in listed.list_services_response.service} >= {
        *SERVICES,
        f"grpc.reflection.{generation}.ServerReflection",
    }
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(body)
        for body in described.file_descriptor_response.file_descriptor_proto
    ]
    [gpu] = [message for file in files for message in file.message_type if message.name == "Gpu"]
    # Clients print JSON names where reflection gives them.
    assert [field.json_name for field in gpu.field] == [
        "metadata",
        "spec",
        "status",
        "resourceVersion",
        "name",
    ]


def test_files_are_for_their_owner_only(everything: ServerProcess) -> None:
    names = ("d.sock", "master.key", "fleetplane.db")  # others come and go while the server runs
    modes = {name: stat.S_IMODE((everything.log.parent / name).stat().st_mode) for name in names}

    assert modes == {"d.sock": 0o660, "master.key": 0o600, "fleetplane.db": 0o600}


def test_the_authoritys_key_is_not_in_the_database_in_the_clear(tmp_path: Path) -> None:
    with running_server(tmp_path, *GPUS) as server:
        server.stop()
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("fleetplane.db*"))

    assert b"authority" in stored
    assert b"PRIVATE KEY" not in stored


def test_the_wrong_master_key_is_told_in_one_line(tmp_path: Path) -> None:
    with running_server(tmp_path, *GPUS) as server:
        server.stop()
    key = tmp_path / "master.key"
    key.write_bytes(base64.b64encode(bytes(32)) + b"\n")
    refused = run_server(tmp_path, GPUS)

    assert refused.returncode == 1
    assert "not made with this master key" in refused.stderr
    assert "Traceback" not in refused.stderr

    key.unlink()
    refused = run_server(tmp_path, GPUS)
    assert refused.returncode == 1
    assert f"the master key {key} is missing" in refused.stderr
    assert not key.exists(), "another one would hide that it is missing"


def test_a_second_server_on_the_same_data_is_refused_naming_the_first(tmp_path: Path) -> None:
    with running_server(tmp_path, *GPUS) as server:
        refused = run_server(tmp_path, GPUS)

        assert refused.returncode != 0
        assert str(server.pid) in refused.stderr
        assert "Traceback" not in refused.stderr
        assert names(server) == []


def test_a_taken_port_is_told_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        refused = run_server(tmp_path, [*GPUS, "--set", f"listeners.web.addresses={address}"])

    assert refused.returncode != 0
    assert address in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint", "code"),
    [
        (["--set", "gpus.lease=3"], "did you mean 'gpus.lease_seconds'", 2),
        (["--only", "gpu"], "only: 'gpu' is not one of gpus, instances", 2),
        (["--only", " ,"], "--only: names no domain", 2),
        (["--config", "absent.toml"], "absent.toml", 2),
        (["--set", "listeners.device-api.addresses=0.0.0.0:0"], "in plain text", 2),
        (["--set", "listeners.device-api.addresses=nonsense"], "nonsense", 2),
        (["--set", "nonsense"], "expected section.key=value", 2),
        (["--set", "log.level=loud"], "log.level: 'loud' is not one of", 2),
        (["--set", "listeners.web.addresses=127.0.0.1:65536"], "is no address", 2),
        (["--set", f"listeners.device-api.addresses=unix:///{'x' * 108}"], "longer than 107 bytes", 2),
        (["--ready-file", "/nowhere/ready.json"], "ready_file: cannot write /nowhere/ready.json", 2),
        (["--ready-file", "/"], "ready_file: cannot replace /", 2),
    ],
)
def test_bad_settings_are_refused_in_one_line(
    tmp_path: Path, arguments: list[str], complaint: str, code: int
) -> None:
    refused = run_server(tmp_path, arguments)

    assert complaint in refused.stderr
    assert "Traceback" not in refused.stderr
    assert refused.returncode == code


def test_settings_come_from_the_file_too(tmp_path: Path) -> None:
    config = tmp_path / "fleetplane.toml"
    config.write_text("[gpus]\nmax_gpus = 1\n")
    with running_server(tmp_path / "data", "--config", str(config), *GPUS) as server:
        register(server, "gpu-1")
        with pytest.raises(grpc.RpcError) as caught:
            register(server, "gpu-2")
        assert isinstance(caught.value, grpc.Call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("out", "err"),
    [(">&-", ""), (">/dev/full", ""), ("| true", ""), (">/dev/null", "2>&-"), (">/dev/null", "2>/dev/full")],
)
def test_a_server_that_nobody_listens_to_serves_all_the_same(tmp_path: Path, out: str, err: str) -> None:
    ready = tmp_path / "ready.json"
    started = [*command(tmp_path, "--only", "gpus"), "--ready-file", str(ready)]
    with subprocess.Popen(["/bin/bash", "-c", f"{err or '2>/dev/null'} {shlex.join(started)} {out}"]):
        pid = 0
        try:
            said = json.loads(_content(ready))
            pid = said["pid"]
            with grpc.insecure_channel("unix:" + said["listeners"]["device-api"][0][7:]) as channel:
                stub = gpu_pb2_grpc.GpuServiceStub(channel)
                with pytest.raises(grpc.RpcError) as caught:  # a failure is logged, or would be
                    stub.GetGpu(gpu_pb2.GetGpuRequest(name="gpu-1"), timeout=60)
                assert isinstance(caught.value, grpc.Call)
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        finally:
            if pid:
                os.kill(pid, signal.SIGTERM)
    assert not ready.exists()


def _content(path: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, "the server did not get ready"
        time.sleep(0.02)
    return path.read_text()
